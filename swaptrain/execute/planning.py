"""Decides the cut and how the host budget is divided, or refuses with the number that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from swaptrain.capture.capture import Captured, cut
from swaptrain.capture.cut import CutLimits
from swaptrain.config import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.execute.build import BuiltModel
from swaptrain.execute.device import ComputeDevice
from swaptrain.execute.dry_run import Measured, dry_run
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.operations import Operations
from swaptrain.execute.runner import Runner
from swaptrain.execute.update import UpdateRule
from swaptrain.memory.malloc import trim
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.program.check import Peaks, check_program
from swaptrain.program.instructions import Kind, ObjectKey, Program
from swaptrain.program.model import ParameterSpec
from swaptrain.program.state import begins_with_values, contiguous
from swaptrain.program.step import StepBuilder
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.units import format_size, parse_size, roomy_size

__all__ = ["Plan", "Planner"]

_LARGEST_TARGET_BYTES = 1 << 30
_SMALLEST_TARGET_BYTES = 1 << 18
_SLACK_BYTES = 24 << 20
"""Of the host budget, for Python objects, I/O threads and what the allocator cannot reuse."""
_HOST_PER_TARGET = 64 / 9
"""The host budget that a target is meant for: the slabs, 3/4 of it, hold 16/3 of them."""
_MOST_INSTRUCTIONS = 1_000_000
"""Of a step: each one takes a kilobyte or two, and is looked at in every step."""
_SMALLEST_CHUNK_BYTES = 1 << 20
_LARGEST_CHUNK_BYTES = 64 << 20
_LEAST_ACTIVATION_BYTES = 4 << 20
_NOISE_BYTES = 4 << 20
"""By how much two measurements of one arena may differ, besides 1/20 of it."""


@dataclass(frozen=True)
class Plan:
    """A cut model that fits its budgets, and what it takes."""

    captured: Captured
    cuts: list[int]
    layouts: Layouts
    builder: StepBuilder
    operations: Operations
    measured: Measured
    peaks: Peaks
    base_bytes: int
    """Resident before the pool exists: torch, the graph, the data."""
    arena_bytes: int
    """Of the host budget: what torch allocates while it computes, as measured, and slack."""
    pool_bytes: int
    """Of the host budget: slabs."""
    creation_bytes: int
    """What writing the initial weights holds at most: an array, a value, what makes it."""
    tier_s: float = 0.0
    """Seconds that the tier itself takes for an instruction, where that was measured."""

    @property
    def least_host_bytes(self) -> int:
        """The smallest memory.host that works with this cut, as measured this time."""
        return max(
            self.arena_bytes + self.peaks.instruction_bytes, self.creation_bytes + _SLACK_BYTES
        )

    @property
    def fits(self) -> bool:
        """Whether the budget that it was made for is enough."""
        return self.arena_bytes + self.pool_bytes >= self.least_host_bytes

    def step(self) -> Program:
        """Return the program of a step in the middle of a run."""
        return self.builder.step(pending_updates=self.updates if self.builder.deferred else ())

    def check(self) -> Peaks:
        """Prove the program of a step; return its peaks. Raises ProgramError, which is a bug."""
        return _check(self.builder, self.layouts)

    @property
    def updates(self) -> list[int]:
        """The segments whose state an update changes."""
        return _updates(self.layouts)


@dataclass(frozen=True)
class _Cut:
    """A cut model and its program: what is known before anything is measured."""

    captured: Captured
    cuts: list[int]
    layouts: Layouts
    builder: StepBuilder
    peaks: Peaks
    """Of a short step: what is alive at once is more in a longer one."""

    @property
    def estimated_bytes(self) -> int:
        """Slabs and, instead of the measured arena, the bytes of a segment's activations."""
        activations = max(s.activation_bytes for s in self.captured.model.segments)
        return self.peaks.instruction_bytes + activations


class Planner:
    """Cuts a captured model for a host budget, and finds the least budget that it works in.

    What it measures is kept by cut: `plan` and `least_host` ask for each only once. With
    the `choices` of a run that exists there is only the one cut.
    """

    def __init__(
        self,
        config: Config,
        built: BuiltModel,
        rule: UpdateRule,
        device: ComputeDevice,
        batch: Mapping[str, Tensor],
        *,
        choices: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._built, self._rule = config, built, rule
        self._device, self._batch = device, batch
        self._recorded: list[int] | None = None
        self._chunk_bytes = config.store.chunk
        if choices is not None:
            self._recorded, self._chunk_bytes = list(choices["cuts"]), int(choices["chunk"])
        self._cuts: dict[int, _Cut] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        trim()
        self._base_bytes = resident_bytes()

    def plan(self) -> Plan:
        """Return the plan with the largest segments that fit `memory.host`.

        Raises BudgetError with the smallest budget that was found to work.
        """
        host_bytes = self._config.memory.host
        targets = [t for t in self._targets() if self._meant_for(t) <= host_bytes]
        for target_bytes in targets:
            plan = self._measured(self._cut(target_bytes))
            if plan.fits:
                return replace(plan, peaks=plan.check())
        raise BudgetError(self._refusal())

    def least_host(self) -> str:
        """Return the smallest `memory.host` that was found to work, as a config says it."""
        return self._least()[0]

    def _least(self) -> tuple[str, Plan]:
        # To measure a cut takes seconds: only the one that promises most is.
        def promised_bytes(target_bytes: int) -> int:
            return max(self._cut(target_bytes).estimated_bytes, self._meant_for(target_bytes))

        target_bytes = min(self._targets(), key=promised_bytes)
        plan = self._measured(self._cut(target_bytes))
        noise_bytes = max(_NOISE_BYTES, plan.arena_bytes // 20)
        host_bytes = max(plan.least_host_bytes + noise_bytes, self._meant_for(target_bytes))
        return roomy_size(host_bytes), plan

    def _targets(self) -> list[int]:
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

    def _meant_for(self, target_bytes: int) -> int:
        """Return the least budget that the planner tries a target in."""
        if self._recorded is not None or self._config.memory.segment is not None:
            return 0
        return 0 if target_bytes <= _SMALLEST_TARGET_BYTES else int(target_bytes * _HOST_PER_TARGET)

    def _cut(self, target_bytes: int) -> _Cut:
        if target_bytes not in self._cuts:
            self._cuts[target_bytes] = self._new_cut(target_bytes)
        return self._cuts[target_bytes]

    def _new_cut(self, target_bytes: int) -> _Cut:
        config, rule = self._config, self._rule

        def state_bytes(parameter: ParameterSpec) -> int:
            return _state_bytes(parameter, rule)

        def working_bytes(parameter: ParameterSpec) -> int:
            return state_bytes(parameter) + 4 * parameter.tensor.numel * parameter.trainable

        chosen = config.memory.segment is not None
        captured, cuts = cut(
            self._built.uncut,
            CutLimits(
                target_bytes=target_bytes,
                hard_bytes=(target_bytes if chosen else 2 * target_bytes) * 4 // 3,
                activation_target_bytes=max(
                    int(target_bytes * _HOST_PER_TARGET) // 6,
                    8 * _LEAST_ACTIVATION_BYTES if chosen else _LEAST_ACTIVATION_BYTES,
                ),
                micro_batches=config.data.micro_batches,
            ),
            state_bytes=state_bytes,
            working_bytes=working_bytes,
            cuts=self._recorded,
        )
        layouts = Layouts(
            captured.model,
            compute_dtype=config.model.dtype,
            state_shapes=rule.state_tensors,
            elementwise=rule.elementwise,
            chunk_bytes=self._chunk_bytes or _chunk_bytes(target_bytes),
            micro_batches=(m := config.data.micro_batches),
        )
        deferred = config.optimizer.clip_norm is not None
        wave = min(config.train.wave or m, m)
        self._check_length(len(captured.model.segments))
        builder = StepBuilder(
            captured.model,
            config.model.dtype,
            layouts.state_arrays,
            m,
            wave,
            deferred=deferred,
            parts=layouts.parts,
        )
        return _Cut(captured, cuts, layouts, builder, _check(_short(builder), layouts))

    def _check_length(self, segments: int) -> None:
        """Raise ConfigError for a step, or an evaluation, whose program would fill the memory."""
        config = self._config
        lengths = {"data.micro_batches": (config.data.micro_batches, 2)}
        if config.eval is not None:
            lengths["eval.batches"] = (config.eval.batches, 1)
        for key, (count, passes) in lengths.items():
            instructions = passes * count * segments
            if instructions > _MOST_INSTRUCTIONS:
                raise ConfigError(
                    f"{key} is {count:,}: that makes {instructions:,} instructions with {segments} "
                    f"segments, and {_MOST_INSTRUCTIONS:,} are the most: lower it; larger ones "
                    "(data.micro_batch) hold as many items"
                )

    def _measured(self, found: _Cut) -> Plan:
        if tuple(found.cuts) not in self._plans:
            self._plans[tuple(found.cuts)] = self._measure(found)
        return self._plans[tuple(found.cuts)]

    def _measure(self, found: _Cut) -> Plan:
        config, rule, captured, layouts = self._config, self._rule, found.captured, found.layouts
        runner = Runner(captured, seed=config.train.seed, micro_batches=config.data.micro_batches)
        operations = Operations(captured, layouts, runner, rule, self._device)
        try:
            measured = dry_run(
                captured,
                layouts,
                operations,
                _short(found.builder),
                self._batch,
                host_bytes=config.memory.host - _SLACK_BYTES,
                saving=not config.train.recompute,
            )
        except IndexError as error:  # an id that an embedding does not have
            raise ConfigError(
                f"the model fails on the first micro-batch of the data: {error}: are its ids, or "
                "labels, larger than the model knows?"
            ) from error
        parameters = [p for p in captured.model.parameters.values() if p.trainable]
        scratch_bytes = max(
            (rule.scratch_bytes(p.tensor.shape, split=p.split) for p in parameters), default=0
        )
        arena_bytes = max(measured.arena_bytes * 21 // 20, scratch_bytes) + _SLACK_BYTES
        return Plan(
            captured=captured,
            cuts=found.cuts,
            layouts=layouts,
            builder=found.builder,
            operations=operations,
            measured=measured,
            peaks=found.peaks,
            base_bytes=self._base_bytes,
            arena_bytes=arena_bytes,
            pool_bytes=config.memory.host - arena_bytes,
            creation_bytes=0 if self._recorded is not None else self._creation_bytes(layouts),
        )

    def _creation_bytes(self, layouts: Layouts) -> int:
        arrays = [
            array
            for segment in (*layouts.state.values(), *layouts.frozen.values())
            for array in segment.arrays
            if begins_with_values(array.name)
        ]
        masters = [p.tensor.numel * ITEMSIZE[p.master] for p in layouts.model.parameters.values()]
        return (
            max((array.nbytes for array in arrays), default=0)
            + max(masters, default=0)
            + self._built.construction.largest_value_bytes()
        )

    def _refusal(self) -> str:
        host_bytes = self._config.memory.host
        size, least = self._least()
        # Measured anew, a budget that was just too small may be found to be enough.
        size = roomy_size(max(parse_size(size), host_bytes + 1))
        if least.creation_bytes + _SLACK_BYTES >= least.least_host_bytes:
            needs = f"making the initial weights needs {format_size(least.least_host_bytes)}"
        else:
            needs = (
                f"{least.peaks.largest} needs {format_size(least.peaks.instruction_bytes)} of "
                f"slabs beside {format_size(least.arena_bytes)} that torch takes while it computes"
            )
        text = f"memory.host is {format_size(host_bytes)}, and {needs}: set memory.host to {size}"
        if self._recorded is not None:
            return text + ", since the cut into segments is fixed for the life of a store"
        if self._config.memory.segment is not None:
            return text + ", or memory.segment to less"
        return text + ", or lower data.micro_batch or data.sequence_length"


def _short(builder: StepBuilder) -> StepBuilder:
    """Return the builder of steps of few micro-batches: the same instructions, fewer of each."""
    if builder.wave < builder.micro_batches:
        return replace(builder, micro_batches=min(builder.micro_batches, 3), wave=1)
    few = min(builder.micro_batches, 2)
    return replace(builder, micro_batches=few, wave=few)


def _chunk_bytes(target_bytes: int) -> int:
    """Return the largest chunk for segments of this size: some sixteenth of the host budget.

    What cannot be cut further, a large embedding, is updated chunk by chunk: beside each other an
    update, what is read for the next one and what is written of the one before must find room.
    """
    octave = (target_bytes // 2).bit_length() - 1
    return min(max(1 << octave, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)


def _updates(layouts: Layouts) -> list[int]:
    return [k for k, arrays in layouts.state_arrays.items() if arrays]


def _check(builder: StepBuilder, layouts: Layouts) -> Peaks:
    if not builder.deferred:
        return check_program(builder.step(), layouts.size_bytes)
    kept = [ObjectKey(Kind.ACCUMULATOR, "gradient", k) for k in layouts.accumulators]
    program = builder.step(pending_updates=_updates(layouts))
    return check_program(program, layouts.size_bytes, present=kept)


def _state_bytes(parameter: ParameterSpec, rule: UpdateRule) -> int:
    """Return what a parameter takes on disk: weight, remainder, optimizer state."""
    tensor = parameter.tensor
    if not parameter.trainable:
        return tensor.nbytes
    elements = 0
    for shape in rule.state_tensors(tensor.shape).values():
        elements += max(1, contiguous(shape)[0] * shape[0] if shape else 1)
    return tensor.nbytes + (2 * tensor.numel if parameter.split else 0) + 4 * elements
