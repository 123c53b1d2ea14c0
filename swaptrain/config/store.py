"""The `store` section: where the state lies, when it becomes durable, and what is kept of it."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from swaptrain.config.kinds import Folders, Positive, Size
from swaptrain.config.section import Section
from swaptrain.units import GIB, KIB, exact_size

__all__ = ["CommitConfig", "KeepConfig", "StoreConfig"]

_PAGE_BYTES = 4096


class KeepConfig(Section):
    """Snapshots of earlier steps, to which `--from-step N` goes back."""

    every: Positive | None = None
    """A snapshot is made of each step whose number is a multiple of this. With
    `store.commit.every` > 1 such a step is committed. null: of the `best` alone."""
    last: Positive = 2
    """How many of every so many steps are kept; the oldest goes when there is one more. Each takes
    the disk of the state once more, reserved at the start."""
    best: Positive | None = None
    """How many are kept of the steps of lowest held-out loss (`eval`) beside those; one that is as
    low as an earlier one is not lower. Each takes the disk of the state once more, too. With
    `store.commit.every` > 1 such a step is committed. null: none."""

    @model_validator(mode="after")
    def _check(self) -> KeepConfig:
        if self.every is None and self.best is None:
            raise ValueError(
                "names no steps: give every (each so many), best (of lowest held-out loss), or both"
            )
        return self


class CommitConfig(Section):
    """When a step becomes durable, and what a killed run repeats."""

    unit: Literal["segment", "step"] | None = None
    """What is committed together. segment: each segment's state after its update, with activations
    and gradients on their way; a killed run repeats at most one segment's backward (or two: `lag`).
    step: the whole state at the end of a step, and nothing inside it; a killed run repeats the
    step, the disk holds the trained state twice, and writes least. null: `step` where the state
    that a step writes is smaller than what crosses between its segments, as with adapters, or where
    `every` > 1, else `segment`; recorded."""
    every: Positive = 1
    """Steps between commits; more than 1 with the unit `step` only."""
    lag: Literal[1, 2] | None = None
    """Segments whose backward a killed run may have to do again, with the unit `segment`. 2: a
    commit has all micro-batches of the next segment to become durable instead of the first one,
    which makes steps shorter where the disk takes about as long as the processor. null: 2 where a
    start finds that it makes them a twentieth shorter, else 1."""

    @property
    def is_whole(self) -> bool:
        """Whether the state is committed as a whole; False also while that is to be chosen."""
        return self.unit == "step" or self.every > 1

    @model_validator(mode="after")
    def _check(self) -> CommitConfig:
        if self.unit == "segment" and self.every > 1:
            raise ValueError(
                f"every is {self.every}, and unit is segment, which is committed in each step: set "
                "unit to step, or every to 1"
            )
        return self


class StoreConfig(Section):
    """Where the training state lies on disk, and how often it becomes durable."""

    paths: Folders | None = None
    """Directories on one or several disks, which share the slots by their bytes; the directory that
    one is in has to exist. null: `run.dir`."""
    chunk: Size | None = None
    """Largest chunk file: a multiple of 4096 bytes from 8KiB to 1GiB. An update goes through what
    only it reads by chunks, a sixteenth of a segment or more at a time: smaller ones need less
    memory. null: chosen at creation by the size of the segments, 1MiB to 64MiB, and recorded."""
    commit: CommitConfig = CommitConfig()
    """When a step becomes durable, and what a killed run repeats."""
    verify: Literal["always", "first_read", "never"] = "first_read"
    """When the checksum of a chunk is compared as it is read. first_read: once for what an earlier
    process wrote; always: also each time for what this process wrote itself; never: not at all (a
    chunk that is missing or too short stops the run in any case)."""
    keep: KeepConfig | None = None
    """null: no snapshots are made; those that a run has stay until they are deleted."""

    @field_validator("chunk")
    @classmethod
    def _check_chunk(cls, chunk: int | None) -> int | None:
        if chunk is not None and (not 8 * KIB <= chunk <= GIB or chunk % _PAGE_BYTES):
            raise ValueError(
                f"found {exact_size(chunk)}; it must be a multiple of 4096 bytes from 8KiB to "
                "1GiB, such as 64MiB"
            )
        return chunk
