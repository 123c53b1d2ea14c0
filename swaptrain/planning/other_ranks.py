"""What a start knows of the other ranks of its run, on this machine and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swaptrain.capture.uncut import Uncut
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.program.row_ranges import WHOLE, RangeSizes
from swaptrain.ranks.agreement import echoed
from swaptrain.units import how_many

__all__ = ["NOBODY", "FixedCut", "OtherRanks", "check_divisible", "check_whole"]


@dataclass(frozen=True)
class FixedCut:
    """A cut that is not to be chosen: that of another rank."""

    cuts: tuple[int, ...]
    chunk: int
    """Largest chunk file, in bytes."""
    ranges: RangeSizes = WHOLE
    """How much a range of a parameter that is divided holds."""


@dataclass(frozen=True)
class OtherRanks:
    """The other ranks of a run; none, where it has one process."""

    ranks: Ranks = ALONE
    local_count: int = 1
    """Ranks on this machine, which share its cores and its memory."""
    local_rank: int = 0
    """Among these."""
    device: str | None = None
    """The device of this rank; None: that of the config."""
    same_cut: Callable[[FixedCut | None], FixedCut | None] = lambda cut: cut
    """Gives all ranks the cut of rank 0, which has chosen it; the others give None."""


NOBODY = OtherRanks()
"""A run of one process."""


def check_whole(uncut: Uncut, ranks: Ranks) -> None:
    """Raise ConfigError, in all ranks, for a model of which several cannot compute parts."""
    buffers = [binding.name for binding in uncut.origins.values() if binding.kind == "buffer"]
    if ranks.count > 1 and buffers:
        raise echoed(
            ConfigError(
                f"the forward changes the buffer {buffers[0]} (batch norm in training mode does), "
                "and several ranks would each change their own: train with one process, or with a "
                "norm that keeps none"
            )
        )
    if ranks.count > 1 and uncut.hooks:
        raise echoed(
            ConfigError(
                f"the gradient of {next(iter(uncut.hooks))} has a hook, which several ranks would "
                "call with parts of it: train with one process, or take the hook away"
            )
        )


def check_divisible(state: Mapping[int, Sequence[str]], ranks: Ranks) -> None:
    """Raise ConfigError, in all ranks, where one would own nothing that is trained.

    `state` has by segment the arrays that an update changes.
    """
    trained = [k for k, names in state.items() if names]
    without = ranks.owners_of_none(trained)
    if ranks.count > 1 and without:
        raise echoed(
            ConfigError(
                f"{how_many(ranks.count, 'rank')} and {how_many(len(state), 'segment')}, of which "
                f"{len(trained)} can be trained: rank {without[0]} would own none of these. Start "
                "fewer ranks, or set memory.segment to less"
            )
        )
