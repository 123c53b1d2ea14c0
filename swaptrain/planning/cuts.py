"""Cuts a captured model for segments of a size, and builds the program of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from swaptrain.capture.capture import cut
from swaptrain.capture.captured import Captured
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.evaluation.slices import slice_evaluations
from swaptrain.compute.state_codecs import ShapeAndDtype
from swaptrain.compute.update import Rules
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.build import BuiltModel
from swaptrain.planning.other_ranks import FixedCut
from swaptrain.planning.ranges import DividedModel
from swaptrain.program.check import Peaks, check_program, check_ranks
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.model import ParameterSpec
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.program.row_ranges import WHOLE, RangeSizes
from swaptrain.program.step import StepBuilder
from swaptrain.program.tensors import ITEMSIZE, TensorSpec
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import Choices
from swaptrain.units import how_many

__all__ = ["Cut", "Cutter", "check_steps", "short_steps"]

_LARGEST_TARGET_BYTES = 1 << 30
_SMALLEST_TARGET_BYTES = 1 << 18
_HOST_PER_TARGET = 64 / 9
"""The host budget that a target is meant for: the slabs, 3/4 of it, hold 16/3 of them."""
_MOST_INSTRUCTIONS = 1_000_000
"""Of a step: each one takes a kilobyte or two, and is looked at in every step."""
_SMALLEST_CHUNK_BYTES = 1 << 20
_LARGEST_CHUNK_BYTES = 64 << 20
_LEAST_ACTIVATION_BYTES = 4 << 20


@dataclass(frozen=True)
class Cut:
    """A cut model and its program: what is known before anything is measured."""

    captured: Captured
    cuts: list[int]
    ranges: RangeSizes
    """How much a range of a parameter that is divided holds."""
    layouts: Layouts
    builder: StepBuilder
    peaks: Peaks
    """Of a short step: what is alive at once is more in a longer one."""

    @property
    def estimated_bytes(self) -> int:
        """Slabs and, instead of the measured arena, the bytes of a segment's activations."""
        activations = max(s.at_once_bytes for s in self.captured.model.segments)
        return self.peaks.instruction_bytes + activations


class Cutter:
    """Cuts a captured model for any size of segments, for each only once.

    With the `choices` of a run that exists there is only the one cut.
    """

    def __init__(
        self,
        config: Config,
        built: BuiltModel,
        rules: Rules,
        *,
        choices: Choices | FixedCut | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config, self._built, self._rules = config, built, rules
        self._divided = DividedModel(config, built, rules, partial(_state_bytes, rules=rules))
        self._ranks = ranks
        self._recorded: list[int] | None = None
        self._recorded_ranges = WHOLE
        self._chunk_bytes = config.store.chunk
        if choices is not None:
            self._recorded, self._chunk_bytes = list(choices.cuts), choices.chunk
            self._recorded_ranges = choices.ranges
        self._cuts: dict[tuple[int, RangeSizes], Cut] = {}

    @property
    def said(self) -> RangeSizes:
        """What the config says of the sizes of ranges."""
        return self._divided.said

    @property
    def is_recorded(self) -> bool:
        """Whether there is only the cut of a run that exists."""
        return self._recorded is not None

    def targets(self) -> list[int]:
        """Return the segment sizes to try, the largest first.

        Neither they nor the cut for each depend on the budget, so that a run with the budget that
        a refusal names finds the same cut again.
        """
        if self._recorded is not None:
            return [_LARGEST_TARGET_BYTES]
        if self._config.memory.segment is not None:
            return [self._config.memory.segment]
        octaves = (_LARGEST_TARGET_BYTES // _SMALLEST_TARGET_BYTES).bit_length()
        return [_LARGEST_TARGET_BYTES >> octave for octave in range(octaves)]

    def meant_for(self, target_bytes: int) -> int:
        """Return the least budget that a target is tried in."""
        if self._recorded is not None or self._config.memory.segment is not None:
            return 0
        return 0 if target_bytes <= _SMALLEST_TARGET_BYTES else int(target_bytes * _HOST_PER_TARGET)

    def ways(self, targets: Iterable[int]) -> Iterator[tuple[int, RangeSizes]]:
        """Yield segment sizes with those of ranges: as the config says, and then as fit one."""
        for target_bytes, ranges in self.least_ways(targets):
            if not self.is_recorded and ranges != self.said:
                yield target_bytes, self.said
            yield target_bytes, ranges

    def least_ways(self, targets: Iterable[int]) -> Iterator[tuple[int, RangeSizes]]:
        """Yield those of the `ways` that take least."""
        for target_bytes in targets:
            if self._recorded is not None:
                yield target_bytes, self._recorded_ranges
            else:
                yield target_bytes, self._divided.fitting(target_bytes)

    def cut(self, target_bytes: int, ranges: RangeSizes = WHOLE) -> Cut:
        """Return the cut for segments of this size, and ranges of so much.

        Raises ConfigError for too long a step, and for ranges that cannot be.
        """
        way = target_bytes, ranges
        if way not in self._cuts:
            self._cuts[way] = self._new_cut(*way)
        return self._cuts[way]

    def _new_cut(self, target_bytes: int, ranges: RangeSizes) -> Cut:
        config, rules = self._config, self._rules
        uncut, uncut_evaluations = self._divided.divided(ranges)

        def state_bytes(parameter: ParameterSpec) -> int:
            return _state_bytes(parameter, rules)

        def working_bytes(parameter: ParameterSpec) -> int:
            decoded_bytes = 0 if parameter.quantized is None else parameter.tensor.nbytes
            gradient_bytes = 4 * parameter.tensor.numel * parameter.trainable
            return state_bytes(parameter) + decoded_bytes + gradient_bytes

        chosen = config.memory.segment is not None
        captured, cuts = cut(
            uncut,
            CutLimits(
                target_bytes=target_bytes,
                hard_bytes=(target_bytes if chosen else 2 * target_bytes) * 4 // 3,
                activation_target_bytes=max(
                    int(target_bytes * _HOST_PER_TARGET) // 6,
                    8 * _LEAST_ACTIVATION_BYTES if chosen else _LEAST_ACTIVATION_BYTES,
                ),
                micro_batches=self._ranks.share(config.data.micro_batches),
            ),
            state_bytes=state_bytes,
            working_bytes=working_bytes,
            cuts=self._recorded,
            skip_ignored=config.train.skip_ignored,
            tokens=config.memory.tokens,
        )
        evaluations = slice_evaluations(
            uncut_evaluations, captured.model, tokens=config.memory.tokens
        )
        captured = replace(captured, evaluations=evaluations)
        layouts = Layouts(
            captured.model,
            compute_dtype=config.model.dtype,
            state_shapes=lambda tensor: _stored(rules, tensor),
            elementwise=lambda name: rules(name).elementwise,
            chunk_bytes=self._chunk_bytes or _chunk_bytes(target_bytes),
            micro_batches=config.data.micro_batches,
            evaluations=[graph.spec for graph in captured.evaluations],
            ranks=self._ranks,
        )
        # A scaled loss may overflow anywhere: no update before all gradients are known.
        deferred = config.optimizer.clip_norm is not None or config.model.dtype == "float16"
        self._check_length(captured)
        builder = StepBuilder(
            captured.model,
            config.model.dtype,
            layouts.state_arrays,
            self._ranks.share(config.data.micro_batches),
            deferred=deferred,
            parts=layouts.parts,
            undivided={k: whole.arrays for k, whole in layouts.undivided.items()},
            evaluations=tuple(graph.spec for graph in evaluations),
            ranks=self._ranks,
        )
        peaks = check_steps(short_steps(builder), layouts)
        divided = [p for p in captured.model.parameters.values() if p.rows is not None]
        ranges = replace(
            ranges,
            experts=ranges.experts if any(len(p.tensor.shape) == 3 for p in divided) else None,
            rows=ranges.rows if any(len(p.tensor.shape) == 2 for p in divided) else None,
        )
        return Cut(captured, cuts, ranges, layouts, builder, peaks)

    def _check_length(self, captured: Captured) -> None:
        """Raise ConfigError for a step, or an evaluation, whose program would fill the memory."""
        segments = len(captured.model.segments)
        own = self._ranks.share(self._config.data.micro_batches)
        lengths = {"data.micro_batches": (own, 2 * segments)}
        graphs = [graph.spec for graph in captured.evaluations]
        if graphs:
            slices = max(len(graph.slices) for graph in graphs)
            lengths["eval.batches"] = (sum(graph.batches for graph in graphs), slices)
        for key, (count, each) in lengths.items():
            instructions = count * each
            if instructions > _MOST_INSTRUCTIONS:
                raise ConfigError(
                    f"{key} is {count:,}: that makes {instructions:,} instructions with "
                    f"{how_many(segments, 'segment')}, and {_MOST_INSTRUCTIONS:,} are the most: "
                    "lower it; larger ones "
                    "(data.micro_batch) hold as many items"
                )


def _stored(rules: Rules, tensor: TensorSpec) -> dict[str, ShapeAndDtype]:
    """Return what is stored of a parameter's optimizer state; raises ConfigError with its name."""
    try:
        return rules(tensor.name).stored(tensor.shape)
    except ConfigError as error:
        raise ConfigError(f"{tensor.name}: {error}") from error


def short_steps(builder: StepBuilder) -> StepBuilder:
    """Return the builder of steps of few micro-batches: the same instructions, fewer of each."""
    graphs = (replace(g, batches=min(g.batches, 2)) for g in builder.evaluations)
    few = min(builder.micro_batches, 2)
    return replace(builder, micro_batches=few, evaluations=tuple(graphs))


def _chunk_bytes(target_bytes: int) -> int:
    """Return the largest chunk for segments of this size: some sixteenth of the host budget.

    What cannot be cut further, a large embedding, is updated chunk by chunk: beside each other an
    update, what is read for the next one and what is written of the one before must find room.
    """
    octave = (target_bytes // 2).bit_length() - 1
    return min(max(1 << octave, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)


def check_steps(builder: StepBuilder, layouts: Layouts) -> Peaks:
    """Prove the programs of a usual step and of an evaluation; return the peaks of both.

    And that those of other ranks exchange the same. Raises ProgramError, which is a bug.
    """
    own = [k for k in layouts.accumulators if builder.ranks.owns(k)]
    finished = [ObjectKey(Kind.ACCUMULATOR, "gradient", k) for k in own] if builder.deferred else []
    if builder.ranks.count > 1:
        count = builder.ranks.count
        few = short_steps(builder)
        every = [replace(few, ranks=Ranks(rank, count)) for rank in range(count)]
        check_ranks([other.step() for other in every])
        check_ranks([other.evaluation() for other in every])
    program = builder.step(pending_updates=layouts.updated if builder.deferred else ())
    step = check_program(program, layouts.size_bytes, present=finished)
    evaluation = check_program(builder.evaluation(), layouts.size_bytes)
    largest = max((step, evaluation), key=lambda peaks: peaks.instruction_bytes)
    return replace(largest, live_bytes=max(step.live_bytes, evaluation.live_bytes))


def _state_bytes(parameter: ParameterSpec, rules: Rules) -> int:
    """Return what a parameter takes on disk: weight, remainder, optimizer state."""
    tensor = parameter.tensor
    if not parameter.trainable:
        return sum(stored.nbytes for stored in parameter.stored)
    state_bytes = sum(
        ITEMSIZE[dtype] * max(1, prod(shape)) for shape, dtype in _stored(rules, tensor).values()
    )
    remainder_bytes = ITEMSIZE[parameter.lower[1]] * tensor.numel if parameter.split else 0
    return tensor.nbytes + remainder_bytes + state_bytes
