"""The row of a step in metrics.jsonl: its loss, its seconds, and what it moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swaptrain.compute.gradient_norms import step_loss
from swaptrain.compute.weighting.counts import LossWeights
from swaptrain.data.batches import Batches
from swaptrain.durable.ledger import Ledger
from swaptrain.memory.tier import Tier
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak
from swaptrain.observe.step_metrics import StepMetrics, time_stamp
from swaptrain.planning.planner import Plan
from swaptrain.ranks.together import Together
from swaptrain.run.steps.counters import Counters
from swaptrain.run.steps.step_state import StepState, global_norm
from swaptrain.store.disk.direct import DirectIO

__all__ = ["Floor", "MetricRows"]

Floor = Callable[[int, int, float, float], float | None]
"""From bytes read and written, seconds of compute and of updates to a step's least seconds."""


@dataclass(frozen=True)
class _StepBegin:
    """The moment at which a step began."""

    at_s: float
    counters: Counters
    data_wait_s: float
    exchange_bytes: int
    exchange_wait_s: float


class MetricRows:
    """Makes rows, each of a step that `begin` saw begin."""

    def __init__(
        self,
        plan: Plan,
        data: Batches,
        weights: LossWeights,
        tier: Tier,
        io: DirectIO,
        floor_s: Floor,
        together: Together | None,
    ) -> None:
        self._plan, self._data, self._weights = plan, data, weights
        self._tier, self._io, self._floor_s = tier, io, floor_s
        self._exchange = None if together is None else together.exchange
        self._order = list(plan.captured.model.parameters)
        self._written_bytes = 0
        """By the process when the last row was made: what a step leaves is written after it."""

    def start(self) -> None:
        """Count from here: what was written so far belongs to no step."""
        self._written_bytes = self._counters().write_bytes

    def begin(self) -> _StepBegin:
        """Return the moment at which a step begins, for `make`."""
        exchange = self._exchange
        return _StepBegin(
            time.perf_counter(),
            self._counters(),
            self._weights.read_s,
            0 if exchange is None else exchange.moved_bytes,
            0.0 if exchange is None else exchange.wait_s,
        )

    def make(self, begun: _StepBegin, state: StepState, lr: float, *, resumed: bool) -> StepMetrics:
        """Return the row of a step that is done, without held-out losses; once a step.

        The next row's peaks and written bytes count from here.
        """
        norm = global_norm(state.ledger, self._order)
        losses = state.ledger.in_order()
        now, exchange = self._counters(), self._exchange
        moved, written_bytes = now - begun.counters, now.write_bytes - self._written_bytes
        self._written_bytes = now.write_bytes
        step_s = time.perf_counter() - begun.at_s
        return StepMetrics(
            step=state.step,
            loss=step_loss(losses, state.weights),
            lr=lr,
            grad_norm=float(norm),
            tokens=self._tokens(),
            step_s=step_s,
            epoch=self._epoch(state.step),
            ended_at=time_stamp(),
            compute_s=state.compute_s,
            update_s=state.update_s,
            io_wait_s=moved.wait_s,
            data_wait_s=self._weights.read_s - begun.data_wait_s,
            read_bytes=moved.read_bytes,
            write_bytes=written_bytes,
            cache_hit_fraction=moved.hit_fraction,
            peak_host_bytes=self._peak_host_bytes(),
            peak_device_bytes=self._plan.operations.device.peak_bytes(),
            roofline_fraction=self._roofline(moved, state, step_s),
            exchange_bytes=None
            if exchange is None
            else exchange.moved_bytes - begun.exchange_bytes,
            exchange_wait_s=None if exchange is None else exchange.wait_s - begun.exchange_wait_s,
            resumed=resumed,
            loss_scale=None if state.ledger.scale is None else state.ledger.scale.scale,
            skipped=state.ledger.overflowed,
        )

    def missing(self, step: int, finished: Ledger, lr: float) -> StepMetrics:
        """Return the row of a step that a process before this one did, whose line a kill lost."""
        return StepMetrics(
            step=step,
            loss=step_loss(finished.in_order(), self._weights.of_step(step)),
            lr=lr,
            grad_norm=float(global_norm(finished, self._order)),
            tokens=self._tokens(),
            step_s=0.0,
            epoch=self._epoch(step),
            ended_at=time_stamp(),
            resumed=True,
            loss_scale=None if finished.scale is None else finished.scale.scale,
            skipped=finished.overflowed,
        )

    def _tokens(self) -> int:
        return self._data.tokens_per_micro_batch * self._data.micro_batches

    def _epoch(self, step: int) -> float:
        items = step * self._data.micro_batch * self._data.micro_batches
        return round(items / len(self._data), 4)

    def _counters(self) -> Counters:
        return Counters.of(self._tier, self._io)

    def _peak_host_bytes(self) -> int:
        peak = peak_resident_bytes() - self._plan.base_bytes
        reset_peak()
        return max(peak, 0)

    def _roofline(self, moved: Counters, state: StepState, step_s: float) -> float | None:
        floor_s = self._floor_s(
            moved.read_bytes, moved.write_bytes, state.compute_s, state.update_s
        )
        return None if floor_s is None else min(1.0, floor_s / step_s)
