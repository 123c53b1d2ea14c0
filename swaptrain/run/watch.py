"""Follows the instructions of a run: for whoever looks on, and for a signal that ends it."""

from __future__ import annotations

from typing import Literal

from swaptrain.compute.slab_tensors import Slabs
from swaptrain.observe.memory_record import MemoryRecord
from swaptrain.observe.progress import Progress
from swaptrain.observe.step_metrics import StepMetrics
from swaptrain.observe.trace import TraceFile
from swaptrain.program.instructions import Instruction
from swaptrain.run.memory_guard import UnusedBlocks
from swaptrain.run.signals import StopRequest
from swaptrain.run.steps.boundary import Boundary

__all__ = ["Watch"]

_PHASES: dict[str, Literal["forward", "backward", "update", "eval", "exchange"]] = {
    "load": "forward",
    "forward": "forward",
    "turn": "backward",
    "backward": "backward",
    "norms": "update",
    "update": "update",
    "store": "update",
    "share": "exchange",
    "collect": "exchange",
    "evaluate": "eval",
}


class Watch:
    """Shows where a step is, and lets a signal end the run after an instruction.

    With `trace` it also writes what happened when, with `memory` what held memory; with `unused` it
    gives back what the allocator holds too much.
    """

    def __init__(
        self,
        stop: StopRequest,
        progress: Progress,
        segments: int,
        boundary: Boundary,
        trace: TraceFile | None = None,
        memory: MemoryRecord | None = None,
        unused: UnusedBlocks | None = None,
    ) -> None:
        """Take who is told; `boundary` has the number of the step that runs."""
        self._stop, self._progress = stop, progress
        self._segments, self._boundary, self._trace = segments, boundary, trace
        self._memory, self._unused = memory, unused

    def begin(self, instruction: Instruction) -> None:
        """Say what a signal would wait for."""
        self._stop.doing(f"segment {max(1, instruction.segment)}/{self._segments}")
        if self._trace is not None:
            self._trace.instruction_begins()

    def weigh(self, instruction: Instruction, slabs: Slabs) -> None:
        """Look at what memory holds, where somebody wants to know."""
        if self._memory is not None:
            self._memory.weigh(instruction, slabs)

    def tick(self, instruction: Instruction) -> None:
        """Show where the step is; raise StoppedBySignal if a signal came."""
        k = instruction.segment
        if k:
            phase = _PHASES[instruction.operation]
            self._progress.tick(self._boundary.step, phase, k - 1, self._segments)
        what = f"{instruction.operation} of segment {k}/{self._segments}"
        self._stop.check_after(what if k else "loading a batch")

    def step_done(self, metrics: StepMetrics) -> None:
        """Show the line of a finished step."""
        self._progress.step_done(metrics)
        if self._trace is not None:
            self._trace.step_done()
        if self._memory is not None:
            self._memory.step_done(metrics.step)
        if self._unused is not None:
            self._unused.step_done()
