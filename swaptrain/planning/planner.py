"""Divides the host budget for a cut, or refuses it with the number that works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.ranges.expert_products import has_products
from swaptrain.capture.tokens.divided import divide_tokens
from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.known_products import KnownProducts
from swaptrain.compute.operations import Operations
from swaptrain.compute.runner import Runner
from swaptrain.compute.update import Rules
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.memory.malloc import trim
from swaptrain.memory.onednn import limit_primitive_caches
from swaptrain.models.build import BuiltModel
from swaptrain.observe.memory_usage import resident_bytes
from swaptrain.planning.budgets.creation import creation_bytes
from swaptrain.planning.budgets.device_budget import DeviceBudgetError, check_device_budget
from swaptrain.planning.budgets.remedies import remedy_of
from swaptrain.planning.cuts import Cut, Cutter, check_steps, short_steps
from swaptrain.planning.measure.dry_run import dry_run
from swaptrain.planning.measure.measured import Measured
from swaptrain.planning.measure.measured_record import MeasuredRecord
from swaptrain.planning.other_ranks import FixedCut
from swaptrain.program.check import Peaks
from swaptrain.program.instructions import Program
from swaptrain.program.ranks import ALONE, STAGING_BYTES, Ranks
from swaptrain.program.row_ranges import RangeSizes
from swaptrain.program.step import StepBuilder
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.root import Choices
from swaptrain.units import format_size, parse_size, roomy_size

__all__ = ["Plan", "Planner"]

_SLACK_BYTES = 24 << 20
"""Of the host budget, for Python objects, I/O threads and what the allocator cannot reuse."""
_FEW_TOKENS = 1024
"""In a range that a refusal offers."""
_NOISE_BYTES = 4 << 20
"""By how much two measurements of one arena may differ, besides 1/20 of it."""


@dataclass(frozen=True)
class Plan:
    """A cut model that fits its budgets, and what it takes."""

    captured: Captured
    cuts: list[int]
    ranges: RangeSizes
    """How much a range of a parameter that is divided holds."""
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
    saved_tensors: int = 0
    """How many tensors the graphs that wait for their backward have saved, where segments save."""
    tier_s: float = 0.0
    """Seconds that the tier itself takes for an instruction, where that was measured."""
    load_s: float = 0.0
    """Seconds that a micro-batch takes to load, where that was measured."""
    link_bytes_per_s: float | None = None
    """What a rank gets of another one, where that was measured."""
    lag: int = 1
    """Segments whose backward a kill may repeat (`store.commit.lag`)."""

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

    @property
    def pending(self) -> tuple[int, ...]:
        """The segments whose update a step leaves to the next one."""
        return tuple(self.layouts.updated) if self.builder.deferred else ()

    @cached_property
    def step(self) -> Program:
        """The program of a step in the middle of a run."""
        return self.builder.step(pending_updates=self.pending)

    def check(self) -> Peaks:
        """Prove the program of a step; return its peaks. Raises ProgramError, which is a bug."""
        return check_steps(self.builder, self.layouts)


class Planner:
    """Finds the largest segments that fit a host budget, and the least budget that works.

    What it measures is kept by cut: `plan` and `least_host` ask for each only once. With the
    `choices` of a run that exists there is only the one cut.
    """

    def __init__(
        self,
        config: Config,
        built: BuiltModel,
        rules: Rules,
        device: ComputeDevice,
        batch: Mapping[str, Tensor],
        *,
        choices: Choices | FixedCut | None = None,
        creates: bool = True,
        positions: tuple[str, int] | None = None,
        measures: Path | None = None,
        products: KnownProducts | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Take what is planned; `measures` is the file of what a start measures for the next.

        `products` are those of a planner of the same model.
        """
        self._config, self._built, self._rules = config, built, rules
        self._device, self.batch, self._positions = device, batch, positions
        self._ranks = ranks
        self._creates = creates
        self._cutter = Cutter(config, built, rules, choices=choices, ranks=ranks)
        self._plans: dict[tuple[RangeSizes, tuple[int, ...]], Plan] = {}
        self._measures = measures
        self.products = products or KnownProducts()
        self._kept: set[tuple[int, ...]] = set()
        """Cuts whose figures were found in that file."""
        trim()
        self._base_bytes = resident_bytes()

    def plan(self) -> Plan:
        """Return the plan with the largest segments that fit `memory.host`.

        Of those that fit `memory.device` too, where there is one. Raises BudgetError with the
        smallest budget that was found to work.
        """
        host_bytes = self._config.memory.host
        targets = [t for t in self._cutter.targets() if self._cutter.meant_for(t) <= host_bytes]
        refused: BudgetError | None = None
        for target_bytes, ranges in self._cutter.ways(targets):
            try:
                found = self._cutter.cut(target_bytes, ranges)
                if ranges == self._cutter.said and found.peaks.instruction_bytes > host_bytes:
                    refused = None
                    continue  # what measures it takes the memory
                plan = self._measured(found)
            except DeviceBudgetError as error:
                refused = error.with_traceback(None)  # whose frames hold the device's memory
                continue
            if plan.fits:
                return replace(plan, peaks=plan.check())
            refused = None
        if refused is not None:
            raise refused
        size, text = self._refusal()
        raise BudgetError(text, enough=size)

    def keep_measures(self, plan: Plan) -> None:
        """Write what was measured for `plan`, for the next start, where it was measured anew."""
        record = self._record(plan.captured, plan.cuts)
        if record is not None and tuple(plan.cuts) not in self._kept:
            record.write(replace(plan.measured, tier_s=plan.tier_s))

    def _record(self, captured: Captured, cuts: Iterable[int]) -> MeasuredRecord | None:
        """Return the record of figures; None on a device, whose memory is measured each time."""
        if self._measures is None or self._device.device.type != "cpu":
            return None
        return MeasuredRecord(self._measures, self._config, captured.model.fingerprint, cuts)

    def least_host(self) -> str:
        """Return the smallest `memory.host` that was found to work, as a config says it."""
        return self._least()[0]

    def _least(self) -> tuple[str, Plan]:
        # To measure a cut takes seconds: only the one that promises most is.
        def promised_bytes(way: tuple[int, RangeSizes]) -> int:
            return max(cutter.cut(*way).estimated_bytes, cutter.meant_for(way[0]))

        cutter = self._cutter
        way = min(cutter.least_ways(cutter.targets()), key=promised_bytes)
        target_bytes = way[0]
        plan = self._measured(cutter.cut(*way))
        noise_bytes = max(_NOISE_BYTES, plan.arena_bytes // 20)
        host_bytes = max(plan.least_host_bytes + noise_bytes, cutter.meant_for(target_bytes))
        return roomy_size(host_bytes), plan

    def _check_device(self, found: Cut) -> None:
        """Raise DeviceBudgetError where an instruction needs more than `memory.device`."""
        budget_bytes, builder = self._config.memory.device, found.builder
        if budget_bytes is not None:
            pending = found.layouts.updated if builder.deferred else ()
            short = short_steps(builder)
            program = (*short.step(pending_updates=pending), *short.evaluation())
            check_device_budget(
                budget_bytes,
                found.captured,
                found.layouts,
                program,
                hint=self._tokens_hint,
                remedy=partial(self._remedy, found.captured),
            )

    def _measured(self, found: Cut) -> Plan:
        key = found.ranges, tuple(found.cuts)
        if key not in self._plans:
            self._plans[key] = self._measure(found)
        return self._plans[key]

    def _measure(self, found: Cut) -> Plan:
        config, rules, captured, layouts = self._config, self._rules, found.captured, found.layouts
        micro_batches = config.data.micro_batches
        runner = Runner(
            captured,
            seed=config.train.seed,
            micro_batches=micro_batches,
            first=self._ranks.first(micro_batches),
        )
        operations = Operations(captured, layouts, runner, rules, self._device)
        self._check_device(found)
        if has_products(code.train for code in captured.codes):
            limit_primitive_caches()
        record = self._record(captured, found.cuts)
        known = None if record is None or not self._cutter.is_recorded else record.read()
        try:
            measured = dry_run(
                captured,
                layouts,
                operations,
                short_steps(found.builder),
                self.batch,
                host_bytes=config.memory.host - _SLACK_BYTES,
                saving=not config.train.recompute,
                products=self.products,
                known=known,
            )
        except torch.OutOfMemoryError as error:
            raise DeviceBudgetError(
                f"the device has no memory left for a segment ({str(error).splitlines()[0]}): set "
                "memory.device to more, or memory.segment or data.micro_batch to less",
                key="memory.device",
            ) from error.with_traceback(None)
        except (IndexError, torch.AcceleratorError) as error:  # an id that an embedding has not
            if isinstance(error, torch.AcceleratorError) and "assert" not in str(error):
                raise
            raise ConfigError(
                f"the model fails on the first micro-batch of the data: {error}: "
                + self._what_is_too_large()
            ) from error
        except RuntimeError as error:
            if "allocate" in str(error):
                raise  # the machine's memory, not the model
            if not torch.are_deterministic_algorithms_enabled() or "determin" not in str(error):
                raise ConfigError(_fails(error, config.model.dtype)) from error
            raise ConfigError(
                f"train.deterministic: {str(error).partition(',')[0]}: set it to false, or change "
                "the model"
            ) from error
        if known is not None and measured.seconds is known.seconds:
            self._kept.add(tuple(found.cuts))
        scratch_bytes = max(
            (
                rules(name).scratch_bytes(
                    p.tensor.shape, split=p.split, rounded=p.rounded, holes=not p.tensor.is_dense
                )
                for name, p in captured.model.parameters.items()
                if p.trainable
            ),
            default=0,
        )
        arena_bytes = max(measured.arena_bytes * 21 // 20, scratch_bytes) + _SLACK_BYTES
        if self._ranks.count > 1:
            arena_bytes += STAGING_BYTES
        return Plan(
            captured=captured,
            cuts=found.cuts,
            ranges=found.ranges,
            layouts=layouts,
            builder=found.builder,
            operations=operations,
            measured=measured,
            peaks=found.peaks,
            base_bytes=self._base_bytes,
            arena_bytes=arena_bytes,
            pool_bytes=config.memory.host - arena_bytes,
            creation_bytes=creation_bytes(self._built.initial, layouts) if self._creates else 0,
        )

    def _what_is_too_large(self) -> str:
        """Ask what an index of the first micro-batch that the model has not may have come from."""
        data = self._config.data
        if data.python is None and self._positions and data.sequence_length > self._positions[1]:
            name, count = self._positions
            return (
                f"data.sequence_length is {data.sequence_length}, and {name} of model.hf is "
                f"{count}: lower the one or raise the other"
            )
        return "are its ids, or labels, larger than the model knows?"

    def _refusal(self) -> tuple[str, str]:
        """Return a budget that is enough, and the message."""
        host_bytes = self._config.memory.host
        size, least = self._least()
        # Measured anew, a budget that was just too small may be found to be enough.
        size = roomy_size(max(parse_size(size), host_bytes + 1))
        creating = least.creation_bytes + _SLACK_BYTES >= least.least_host_bytes
        if creating:
            needs = f"making the initial weights needs {format_size(least.least_host_bytes)}"
        else:
            needs = (
                f"{least.peaks.largest} needs {format_size(least.peaks.instruction_bytes)} of "
                f"slabs beside {format_size(least.arena_bytes)} that torch takes while it computes"
            )
        text = f"memory.host is {format_size(host_bytes)}, and {needs}: set memory.host to {size}"
        if self._cutter.is_recorded:
            return size, text + ", since the cut into segments is fixed for the life of a store"
        if self._config.memory.segment is not None:
            return size, text + ", or memory.segment to less"
        if creating:  # however few tokens there are
            return size, text
        computing = least.arena_bytes - _SLACK_BYTES > least.peaks.instruction_bytes
        remedy = self._remedy(least.captured, least.peaks.instruction_bytes)
        if not computing and remedy is not None:
            return size, text + remedy
        text += ", or lower data.micro_batch or data.sequence_length"
        return size, text + (self._tokens_hint if computing else "")

    def _remedy(self, captured: Captured, instruction_bytes: int) -> str | None:
        """Say what helps where one parameter decides; the cut of a run that exists is fixed."""
        if self._cutter.is_recorded:
            return None
        return remedy_of(captured.model, instruction_bytes, self._cutter.said)

    @cached_property
    def _tokens_hint(self) -> str:
        """What to do where activations decide, and ranges of tokens would divide them."""
        uncut, tokens = self._built.uncut, self._config.memory.tokens
        if self._cutter.is_recorded:
            return ""
        if tokens is not None:
            return f", or memory.tokens, which is {tokens}, to less"
        found = divide_tokens(uncut.captured, uncut.trace, _FEW_TOKENS)
        if not found.regions and not found.heads:
            return ""
        return (
            ", or set memory.tokens, such as 1024: each MLP and the head take ranges of tokens then"
        )


def _fails(error: RuntimeError, dtype: str) -> str:
    """Say that the model's own code failed in the dry run, and what to do."""
    text = f"the model fails on the first micro-batch of the data: {str(error).splitlines()[0]}: "
    if dtype != "float32":
        return text + f"in {dtype} its buffers keep their dtype, so cast them where they are used"
    return text + "see that it runs on such a micro-batch in plain PyTorch"
