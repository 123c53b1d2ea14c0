"""Decides the cut and how the host budget is divided, or refuses with the number that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swaptrain.capture.capture import Captured, cut
from swaptrain.capture.cut import CutLimits
from swaptrain.config import Config
from swaptrain.errors import BudgetError
from swaptrain.execute.build import BuiltModel
from swaptrain.execute.device import ComputeDevice
from swaptrain.execute.dry_run import measure_arena
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.operations import Operations
from swaptrain.execute.runner import Runner
from swaptrain.execute.update import UpdateRule
from swaptrain.memory.malloc import trim
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.program.check import Peaks, check_program
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.model import ParameterSpec
from swaptrain.program.state import contiguous
from swaptrain.program.step import StepBuilder
from swaptrain.units import format_size, roomy_size

__all__ = ["Plan", "make_plan"]

_LARGEST_TARGET_BYTES = 1 << 30
_SMALLEST_TARGET_BYTES = 1 << 18
_SLACK_BYTES = 24 << 20
"""Of the host budget, for Python objects, I/O threads and what the allocator cannot reuse."""


@dataclass(frozen=True)
class Plan:
    """A cut model that fits its budgets, and what it takes."""

    captured: Captured
    cuts: list[int]
    layouts: Layouts
    builder: StepBuilder
    operations: Operations
    peaks: Peaks
    base_bytes: int
    """Resident before the pool exists: torch, the graph, the data."""
    arena_bytes: int
    """Of the host budget: what torch allocates while it computes, as measured, and slack."""
    pool_bytes: int
    """Of the host budget: slabs."""

    @property
    def least_host_bytes(self) -> int:
        """The smallest memory.host that works with this cut."""
        return self.arena_bytes + self.peaks.instruction_bytes


def make_plan(
    config: Config,
    built: BuiltModel,
    rule: UpdateRule,
    device: ComputeDevice,
    batch: Mapping[str, Tensor],
    *,
    recorded_cuts: Sequence[int] | None = None,
) -> Plan:
    """Cut the model for `memory.host` (or at the recorded cuts) and measure that it fits.

    Tries smaller and smaller segments until one fits. Raises BudgetError with the smallest budget
    that was found to work.
    """
    trim()
    base_bytes = resident_bytes()
    least: Plan | None = None
    for target_bytes in _targets(config, recorded_cuts is not None):
        plan = _plan_for(
            config, built, rule, device, batch, target_bytes, base_bytes,
            None if recorded_cuts is None else list(recorded_cuts),
        )  # fmt: skip
        if plan.pool_bytes >= plan.peaks.instruction_bytes:
            return plan
        if least is not None and plan.cuts == least.cuts:
            break  # it cannot be cut any finer
        if least is None or plan.least_host_bytes < least.least_host_bytes:
            least = plan
    assert least is not None
    raise BudgetError(_refusal(config, least, recorded=recorded_cuts is not None))


def _targets(config: Config, recorded: bool) -> list[int]:
    """Return the segment sizes to try, the largest first.

    The sizes are powers of two times the largest, whatever the budget, so that the budget that a
    refusal names finds the same cut again.
    """
    if recorded:
        return [_LARGEST_TARGET_BYTES]
    if config.memory.segment is not None:
        return [config.memory.segment]
    wish = config.memory.host * 3 // 4 * 3 // 16
    sizes = []
    size = _LARGEST_TARGET_BYTES
    while size >= _SMALLEST_TARGET_BYTES:
        if size <= wish:
            sizes.append(size)
        size //= 2
    return sizes or [_SMALLEST_TARGET_BYTES]


def _plan_for(
    config: Config,
    built: BuiltModel,
    rule: UpdateRule,
    device: ComputeDevice,
    batch: Mapping[str, Tensor],
    target_bytes: int,
    base_bytes: int,
    cuts: list[int] | None,
) -> Plan:
    def state_bytes(parameter: ParameterSpec) -> int:
        return _state_bytes(parameter, rule)

    def working_bytes(parameter: ParameterSpec) -> int:
        return _state_bytes(parameter, rule) + 4 * parameter.tensor.numel * parameter.trainable

    ceiling = target_bytes if config.memory.segment is not None else 2 * target_bytes
    limits = CutLimits(
        target_bytes=target_bytes,
        hard_bytes=ceiling * 4 // 3,
        activation_target_bytes=max(config.memory.host // 6, 1),
        micro_batches=config.data.micro_batches,
    )
    captured, cuts = cut(
        built.uncut, limits, state_bytes=state_bytes, working_bytes=working_bytes, cuts=cuts
    )
    layouts = Layouts(
        captured.model,
        compute_dtype=config.model.dtype,
        state_shapes=rule.state_tensors,
        chunk_bytes=config.store.chunk,
    )
    m = config.data.micro_batches
    builder = StepBuilder(
        captured.model,
        config.model.dtype,
        layouts.state_arrays,
        m,
        min(config.train.wave or m, m),
        deferred=config.optimizer.clip_norm is not None,
    )
    program = builder.step()
    peaks = check_program(program, layouts.size_bytes)
    updates = [k for k, arrays in layouts.state_arrays.items() if arrays]
    if builder.deferred:
        kept = [ObjectKey(Kind.ACCUMULATOR, "gradient", k) for k in layouts.accumulators]
        peaks = check_program(
            builder.step(pending_updates=updates), layouts.size_bytes, present=kept
        )
    runner = Runner(captured, seed=config.train.seed, micro_batches=m)
    operations = Operations(captured, layouts, runner, rule, device)
    measured = measure_arena(captured, layouts, operations, program, batch)
    scratch = max(
        (
            rule.scratch_bytes(p.tensor.shape, split=p.split)
            for p in captured.model.parameters.values()
            if p.trainable
        ),
        default=0,
    )
    arena_bytes = max(measured * 21 // 20, scratch) + _SLACK_BYTES
    return Plan(
        captured=captured,
        cuts=cuts,
        layouts=layouts,
        builder=builder,
        operations=operations,
        peaks=peaks,
        base_bytes=base_bytes,
        arena_bytes=arena_bytes,
        pool_bytes=config.memory.host - arena_bytes,
    )


def _state_bytes(parameter: ParameterSpec, rule: UpdateRule) -> int:
    """Return what a parameter takes on disk: weight, remainder, optimizer state."""
    tensor = parameter.tensor
    if not parameter.trainable:
        return tensor.nbytes
    elements = 0
    for shape in rule.state_tensors(tensor.shape).values():
        elements += max(1, contiguous(shape)[0] * shape[0] if shape else 1)
    return tensor.nbytes + (2 * tensor.numel if parameter.split else 0) + 4 * elements


def _refusal(config: Config, least: Plan, *, recorded: bool) -> str:
    needed = least.peaks.instruction_bytes
    text = (
        f"memory.host is {format_size(config.memory.host)}, and {least.peaks.largest} needs "
        f"{format_size(needed)} of slabs beside {format_size(least.arena_bytes)} that torch takes "
        f"while it computes: set memory.host to {roomy_size(least.least_host_bytes)}"
    )
    if recorded:
        return text + ", since the cut into segments is fixed for the life of a store"
    if config.memory.segment is not None:
        return text + ", or memory.segment to less"
    return text + ", or lower data.micro_batch or data.sequence_length"
