"""What each instruction does to the slabs it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.compute.blocks import add_widened
from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.device_prefetch import Ahead
from swaptrain.compute.gradient_norms import GradientNorms
from swaptrain.compute.object_tensors import clear_padding, copy_into
from swaptrain.compute.runner import Operands, Runner
from swaptrain.compute.saved_tensors import SavedTensors
from swaptrain.compute.segment_update import SegmentUpdate
from swaptrain.compute.slab_tensors import Slabs, SlabTensors
from swaptrain.compute.update import Rules
from swaptrain.models.quantization import decode
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of, Operation
from swaptrain.program.model import ParameterSpec
from swaptrain.program.roles import Role
from swaptrain.program.state_arrays import arrays_of
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["Operations"]


class Operations:
    """Computes on slabs; knows nothing of disk, commits or order.

    On a device that computes beside the host nothing is waited for: what is made is in the slabs
    after `device.wait`, and norms are read there.
    """

    def __init__(
        self,
        captured: Captured,
        layouts: Layouts,
        runner: Runner,
        rules: Rules,
        device: ComputeDevice,
    ) -> None:
        self._captured, self._layouts = captured, layouts
        self._model = captured.model
        self._runner, self.device = runner, device
        self._tensors = SlabTensors(layouts, device)
        self.ahead = Ahead(captured, layouts, device)
        self._update = SegmentUpdate(captured.model, layouts, rules, device, self.ahead)
        self._visit: tuple[int, int] | None = None
        self._decoded: dict[str, Tensor] = {}
        """Weights that lie as codes, for the segment whose micro-batches are computed."""
        self.decode = decode
        """The dry run puts another one in its place."""
        runner.move_to(device.device, device.bring_back if device.overlaps else None)

    @property
    def rules(self) -> Rules:
        """Return the optimizer's rule of each parameter."""
        return self._update.rules

    @rules.setter
    def rules(self, rules: Rules) -> None:
        self._update.rules = rules

    def forget(self, instruction: Instruction) -> None:
        """Drop the device's copies of what is dead, or belongs to one micro-batch.

        The next instruction is of another one: a visit of many needs no more memory than of one.
        The same for what belongs to one part of an update, and for what only an update reads.
        """
        passed = {
            key
            for key in instruction.touches
            if key.micro_batch >= 0
            or key.part >= 0
            or (key.kind is Kind.STATE and key.role.is_for_updates)
            or instruction.operation is Operation.COLLECT  # the sums of all are on the host
        }
        for key in passed.union(instruction.frees):
            self.device.forget(key)

    def load(self, instruction: Instruction, slabs: Slabs, batch: Mapping[str, Tensor]) -> None:
        """Put a micro-batch's tensors into their slabs."""
        for key in instruction.writes:
            copy_into(self._tensors.view(key, slabs), batch[key.name.partition("batch.")[2]])

    def forward(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        weights: StepWeights | None = None,
    ) -> None:
        """Run a forward; copy the buffers from before it where the segment mutates any."""
        self.device.begin(instruction.segment)
        self._put_buffers_before(instruction, slabs)
        operands = self._operands(instruction, slabs)
        self.ahead.fetch(instruction)
        memory = self._tensors.saved(instruction.writes, slabs, read=False)
        outputs = self._runner.forward(
            instruction.segment, step, instruction.micro_batch, operands, memory, weights
        )
        self._put_saved(instruction, slabs, memory)
        self._put_buffers(instruction, slabs, operands)
        self._store_outputs(instruction, slabs, outputs)

    def measure_saved(self, instruction: Instruction, slabs: Slabs) -> SavedTensors:
        """Run a forward for nothing; return what autograd would save, counted but not kept."""
        self.device.begin(instruction.segment)
        return self._runner.measure_saved(instruction.segment, self._operands(instruction, slabs))

    def evaluate(
        self, instruction: Instruction, slabs: Slabs, *, weights: StepWeights | None = None
    ) -> Tensor | None:
        """Run a forward in evaluation mode; return what it gives where the segment makes that.

        A vector in float64, [n]: the loss, and the numbers beside it.
        """
        self.device.begin(instruction.segment)
        graph = instruction.graph
        operands = self._operands(instruction, slabs)
        outputs = self._runner.evaluate(
            graph, instruction.segment, instruction.micro_batch, operands, weights
        )
        self._store_outputs(instruction, slabs, outputs)
        return outputs.get(self._captured.evaluations[graph].spec.given)

    def backward(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        sums_stay: bool = False,
        weights: StepWeights | None = None,
        scale: float = 1.0,
    ) -> Tensor | None:
        """Propagate gradients, times `scale`; return the loss, [], where the segment makes it.

        Parameter gradients are added to the segment's accumulator, in the order of the
        micro-batches; those of shared parameters become objects for their owner's backward. With
        `sums_stay` the device's copy of the accumulator alone is right afterwards: what comes next
        goes on with it there.
        """
        k, m = instruction.segment, instruction.micro_batch
        self.device.begin(k)
        segment = self._model.segment(k)
        operands = self._operands(instruction, slabs)
        gradients: dict[str, Tensor] = {}  # by value, in its shape
        later: dict[str, Tensor] = {}  # by value or parameter, in its shape
        for key in instruction.reads:
            if key.kind is Kind.GRADIENT:
                incoming = key.of is not Of.PARAMETER and key.name in segment.outputs
                (gradients if incoming else later)[key.name] = self._tensors.fetch(key, slabs)
        for key in instruction.writes:
            # The disk gets it, and records a checksum: a step made again has to give the same.
            clear_padding(self._layouts.array(key), slabs[key])
        first = any(key.kind is Kind.ACCUMULATOR for key in instruction.writes)
        # By parameter, in its shape.
        sums = self._tensors.accumulators(instruction, slabs, read=not first)
        partial = {key.name: key for key in instruction.writes if key.of is Of.PARAMETER}
        missing = set(sums) if first else set()
        hooks = self._runner.hooks
        memory = self._tensors.saved(instruction.reads, slabs)  # uint8, [n]
        self.ahead.fetch(instruction)

        def sink(name: str, gradient: Tensor) -> None:
            if name in partial:
                self.device.store(self._tensors.view(partial[name], slabs), gradient)
            elif name in missing:
                sums[name].copy_(gradient)
                missing.discard(name)
            else:
                add_widened(sums[name], gradient)
            if name in hooks and name not in partial:
                hooks[name].run_accumulated(operands.parameters[name], sums[name])

        inputs, loss = self._runner.backward(
            k, step, m, operands, gradients, later, sink, memory, weights, scale
        )
        for name in missing:  # nothing flowed into it in this micro-batch
            sums[name].zero_()
        for key in () if sums_stay else instruction.touches:
            if key.kind is Kind.ACCUMULATOR:
                for name, host in self._tensors.views(key, slabs).items():
                    self.device.put(host, sums[name])
        if instruction.operation is Operation.TURN:
            self._put_buffers(instruction, slabs, operands)
        for key in instruction.writes:
            if key.kind is Kind.GRADIENT and key.of is not Of.PARAMETER and key.name in inputs:
                gradient = inputs[key.name]
                target = self._tensors.view(key, slabs)
                if gradient is None:
                    target.zero_()
                else:
                    self.device.store(target, gradient)
        return loss

    def norms(
        self, instruction: Instruction, slabs: Slabs, step: int, scale: float | None = None
    ) -> GradientNorms:
        """Return the 2-norm of each parameter's gradient, for clipping, without its `scale`.

        Norms are taken of whole parameters in their own layout, as torch's clipping does.
        """
        return self._update.norms(instruction, slabs, step, scale)

    def update(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        rate: Callable[[float], float],
        coefficient: Tensor | None,
        skipped: int = 0,
    ) -> GradientNorms | None:
        """Do update `step` on every parameter that the segment owns, in place on its slabs.

        So many updates of steps before it were `skipped`.

        `rate` gives the learning rate of the step, of the one that a rule has. Of a part of an
        update, on what lies in that part. Without a `coefficient`, [], which comes of
        norms, returns those of the gradients in this part and in those before it. Where one is not
        finite NotFiniteError is raised, here or when they are read: what the slabs hold then
        must not be kept.
        """
        self.end_visit()
        return self._update.update(
            instruction, slabs, step, rate=rate, coefficient=coefficient, skipped=skipped
        )

    def begin_visit(self, instruction: Instruction, slabs: Slabs) -> None:
        """Decode the weights of a segment; the instructions on it find them decoded."""
        self.device.begin(instruction.segment)
        self._operands(instruction, slabs)

    def end_visit(self) -> None:
        """Let go of decoded weights."""
        self._visit = None
        self._decoded.clear()

    def _decode(self, parameter: ParameterSpec, codes: Tensor, scales: Tensor) -> Tensor:
        assert parameter.quantized is not None
        tensor = parameter.tensor
        weight = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=codes.device)
        self.decode(codes, scales, parameter.quantized, weight)
        return weight

    def _operands(self, instruction: Instruction, slabs: Slabs) -> Operands:
        segment = self._captured.computed_by(instruction)
        owner = self._model.owner
        parameters: dict[str, Tensor] = {}
        tables: dict[ObjectKey, dict[str, Tensor]] = {}
        if self._visit != (visit := (instruction.graph, instruction.segment)):
            self.end_visit()
            self._visit = visit
        for name in segment.parameters:
            if name in self._decoded:
                parameters[name] = self._decoded[name]
                continue
            spec, stored = self._model.parameters[name], []
            for array in arrays_of(spec, self._layouts.compute_dtype):
                key = ObjectKey(Kind.STATE, array, owner[name])
                if key not in slabs:  # another rank has the state, and has sent it
                    key = key._replace(kind=Kind.SHARED)
                if key not in tables:
                    tables[key] = self._tensors.views(key, slabs)
                stored.append(self.device.fetch(key, name, tables[key][name]))
            if spec.quantized is not None:
                stored = [self._decoded.setdefault(name, self._decode(spec, *stored))]
            (parameters[name],) = stored
        values = {
            key.name: self._tensors.fetch(key, slabs)
            for key in instruction.reads
            if key.kind is Kind.VALUE and key.of is not Of.BUFFERS_BEFORE
        }
        return Operands(parameters, self._buffers(instruction, slabs), values)

    def _buffers(self, instruction: Instruction, slabs: Slabs) -> dict[str, Tensor]:
        """Return the mutated buffers: the live ones, or copies of what a recomputation starts from.

        An evaluation reads them and changes nothing.
        """
        buffers: dict[str, Tensor] = {}
        for key in instruction.touches:
            if key.kind is Kind.STATE and key.role is Role.BUFFERS:
                buffers.update(self._tensors.named(key, slabs))
        for key in instruction.reads:
            if key.of is Of.BUFFERS_BEFORE:
                copies = self._tensors.named(key, slabs)
                buffers.update({name: copy.clone() for name, copy in copies.items()})
        return buffers

    def _put_buffers_before(self, instruction: Instruction, slabs: Slabs) -> None:
        for key in instruction.writes:
            if key.of is Of.BUFFERS_BEFORE:
                source = ObjectKey(Kind.STATE, key.name, key.segment)
                slabs[key].memory[:] = slabs[source].memory

    def _put_buffers(self, instruction: Instruction, slabs: Slabs, operands: Operands) -> None:
        for key in instruction.changes:
            if key.kind is Kind.STATE:
                for name, target in self._tensors.views(key, slabs).items():
                    self.device.put(target, operands.buffers[name])

    def _store_outputs(
        self, instruction: Instruction, slabs: Slabs, outputs: Mapping[str, Tensor]
    ) -> None:
        for key in instruction.writes:
            if key.kind is Kind.VALUE and key.of is not Of.BUFFERS_BEFORE:
                self.device.store(self._tensors.view(key, slabs), outputs[key.name])

    def _put_saved(self, instruction: Instruction, slabs: Slabs, memory: Tensor | None) -> None:
        for key in instruction.writes:
            if key.kind is Kind.SAVED and memory is not None:
                self.device.put(self._tensors.view(key, slabs), memory)
