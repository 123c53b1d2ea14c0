"""The figures of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swaptrain.machine.speeds import Machine
from swaptrain.planning.budgets.disk_budget import DiskNeed
from swaptrain.program.residency import Traffic

__all__ = ["PlanReport", "Segment"]


@dataclass(frozen=True)
class Segment:
    """One row of the segment table."""

    index: int
    module: str
    parameters: int
    state_bytes: int
    isomorphism: int


@dataclass(frozen=True)
class PlanReport:
    """What a run of the config takes."""

    description: str
    parameters: int
    trained_parameters: int
    trained: str
    """How many of them are trained, and what is not, in words."""
    rows: str | None
    """What the rows of `data.chat` come to, and one of them; None for other data."""
    quantized: str | None
    """How many are stored as codes, and what that saves; None where none are."""
    segments: tuple[Segment, ...]
    resumes: bool
    """Whether run.dir holds a run, whose cut is kept."""
    host_bytes: int
    base_bytes: int
    pool_bytes: int
    arena_bytes: int
    instruction_bytes: int
    largest: str
    """The instruction that needs most slabs, and how much."""
    live_bytes: int
    """The most that values, gradients and accumulators take together."""
    least_host: str
    """The smallest memory.host that was found to work, as the config says it."""
    disk: tuple[DiskNeed, ...]
    free_disk_bytes: tuple[int | None, ...]
    occupied_disk_bytes: int
    """What the run takes in run.dir already."""
    traffic: Traffic | None
    """Of a step in the middle of a run, rehearsed; None where the program is too long for it."""
    least_traffic_bytes: float
    """The lower bound of a step's traffic with this pool as the cache."""
    step_write_bytes: int
    written_bytes: int
    """By the steps so far, as metrics.jsonl has it."""
    steps_left: int
    tokens: int
    """Tokens of a step, or items of data without tokens."""
    counted: Literal["tokens", "items"]
    """Which of the two."""
    machine: Machine | None
    """None where the machine was never measured."""
    saves: int
    """Segments whose forward saves what the backward needs instead of recomputing it."""
    io_s: float | None
    compute_s: float
    """As measured when the plan was made, instruction by instruction with no I/O beside them."""
    step_s: float | None
    """Of the rehearsal."""
    lag: int
    """Segments whose backward a kill may repeat, as the config says or as was chosen."""
    break_even_tokens: float | None
    weighting: str | None
    """What weighs alike in a step; None where that changes nothing."""
    data_share: float | None = None
    """Of the last steps of the run, the part in which they waited for data; None without a run."""
    idle_steps: str | None = None
    """What is said of steps whose learning rate is 0; None where there are none."""
    bound: str | None = None
    """What bounds a step, and what would help most; None where no seconds are known."""
    experts: int | None = None
    """Experts of a range, where layers of experts are divided."""
    embedding_rows: int | None = None
    """Rows of a range, where embeddings are divided."""
    ranks_disk_bytes: tuple[tuple[int, int], ...] = ()
    """How many ranks were asked for, and what each of them reserves on its disk."""
