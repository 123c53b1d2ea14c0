"""What a captured and cut model is, without torch: parameters, values and segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from swaptrain.program.quantized import QuantizedAs, quantized_tensors
from swaptrain.program.roles import Role
from swaptrain.program.row_ranges import RowRange
from swaptrain.program.tensors import TensorSpec

__all__ = ["BufferSpec", "ModelSpec", "ParameterSpec", "SegmentSpec", "ValueSpec"]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the graph computes with it."""

    tensor: TensorSpec
    master: str
    """The dtype of the master copy; when it is wider than the tensor's, the remainder is stored.
    `none`: there is none, and an update rounds by chance."""
    trainable: bool
    """Requires a gradient, and the loss reaches it: it has optimizer state and is updated."""

    quantized: QuantizedAs | None = None
    """How it lies on the disk and in RAM, where it never changes; None: as it is."""
    rows: RowRange | None = None
    """Of a range of rows: of which parameter of the model, and which ones; None: it is one."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """What of it lies on the disk, but for what only an update reads."""
        if self.quantized is None:
            return (self.tensor,)
        return tuple(quantized_tensors(self.tensor, self.quantized).values())

    @property
    def split(self) -> bool:
        """Whether something beside the weight completes it to its float32 master."""
        return self.master not in (self.tensor.dtype, "none")

    @property
    def lower(self) -> tuple[str, str]:
        """Array and dtype of what completes a split weight: bfloat16 is the upper half of a
        float32, of whose bits the lower half is left; of float16 the whole master is kept."""
        if self.tensor.dtype == "bfloat16":
            return Role.REMAINDER.value, "uint16"
        return Role.REMAINDER.array(self.master), self.master

    @property
    def rounded(self) -> bool:
        """Whether the weight alone is kept, which every update rounds by chance."""
        return self.master == "none"

    @property
    def widest(self) -> str:
        """The dtype in which an update computes with it."""
        return "float32" if self.rounded else self.master

    def place_of(self, first: int) -> tuple[str, int]:
        """Return whose element in the order of memory an element is, and which of its own.

        Of a range of rows the parameter that it is of.
        """
        if self.rows is None:
            return self.name, first
        return self.rows.whole, self.rows.first * self.tensor.stride[0] + first

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to 1-D parameters (norms, biases)."""
        return len(self.tensor.shape) >= 2


@dataclass(frozen=True)
class BufferSpec:
    """A buffer that the forward mutates: state of its segment."""

    tensor: TensorSpec

    @property
    def name(self) -> str:
        return self.tensor.name


@dataclass(frozen=True)
class ValueSpec:
    """A tensor that crosses from one segment to later ones, per micro-batch."""

    tensor: TensorSpec
    producer: int
    """The segment that computes it; 0 for what the batch brings."""
    readers: tuple[int, ...]
    """The segments that read it, ascending."""
    gradient: bool
    """Whether the loss sends a gradient into it."""
    gradient_stride: tuple[int, ...] | None = None
    """The strides in which autograd hands its gradient on, where they are not its own."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def gradient_tensor(self) -> TensorSpec:
        """The layout of its gradient."""
        if self.gradient_stride is None:
            return self.tensor
        return replace(self.tensor, stride=self.gradient_stride)


@dataclass(frozen=True)
class SegmentSpec:
    """A slice of the graph: the unit that is resident on the device together."""

    index: int
    """From 1, in the order of the forward."""
    isomorphism: int
    """Segments of one class run the same code on other tensors."""
    owns: tuple[str, ...]
    """Parameters stored with this segment: it is the first that reads them."""
    parameters: tuple[str, ...]
    """Parameters it reads, its own and those of earlier segments (tied), in call order."""
    buffers: tuple[str, ...]
    """Buffers that it mutates, and so owns."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    activation_bytes: int
    """Bytes of every tensor its graph computes, an upper bound of what recomputation holds."""
    flops: int
    """Multiply-adds times two of its matrix products in one forward of one micro-batch."""
    module: str
    """Path of the module that it covers, for a person; of several the first and the last."""
    divided_bytes: int = 0
    """By how much less is held at once than `activation_bytes`, with ranges of tokens."""

    @property
    def at_once_bytes(self) -> int:
        """Bytes that recomputation holds at the most."""
        return self.activation_bytes - self.divided_bytes


@dataclass(frozen=True)
class ModelSpec:
    """The whole model, cut."""

    parameters: Mapping[str, ParameterSpec]
    """By name, in the model's own order."""
    buffers: Mapping[str, BufferSpec]
    values: Mapping[str, ValueSpec]
    segments: tuple[SegmentSpec, ...]
    loss: str
    """Name of the value that is the loss, a scalar."""
    fingerprint: str
    """Digest of the captured graph and of the cut."""

    def segment(self, index: int) -> SegmentSpec:
        """Return segment `index`, counted from 1."""
        return self.segments[index - 1]

    def owns_trained(self, segment: SegmentSpec) -> bool:
        """Whether parameters that are stored with the segment are trained."""
        return any(self.parameters[name].trainable for name in segment.owns)

    def has_state(self, segment: SegmentSpec) -> bool:
        """Whether the segment has state: trained parameters of its own, or buffers that change."""
        return bool(segment.buffers) or self.owns_trained(segment)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """The segment that stores each parameter and mutated buffer."""
        return {
            name: segment.index
            for segment in self.segments
            for name in (*segment.owns, *segment.buffers)
        }

    def decoded_bytes(self, parameters: Iterable[str]) -> int:
        """Return what those of some parameters that lie as codes take, decoded."""
        found = (self.parameters[name] for name in parameters)
        return sum(p.tensor.nbytes for p in found if p.quantized is not None)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.tensor.numel for parameter in self.parameters.values())
