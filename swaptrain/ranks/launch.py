"""What torchrun says of this process, by the environment; without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from swaptrain.errors import ConfigError
from swaptrain.program.ranks import MOST_RANKS, Ranks

__all__ = ["Launch", "launched"]


@dataclass(frozen=True)
class Launch:
    """This process among those that torchrun started."""

    ranks: Ranks
    local_rank: int = 0
    """Among those of this machine."""
    local_count: int = 1
    """How many processes this machine has."""
    restarts: int = 0
    """How often torchrun has started them again; another machine's may have another number."""


def launched() -> Launch | None:
    """Return which of several processes this is; None where torchrun started one, or none.

    Raises ConfigError where the environment says it in part.
    """
    said = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if said["WORLD_SIZE"] is None or said["WORLD_SIZE"] == "1":
        return None
    try:
        rank, count = _number(said, "RANK"), _number(said, "WORLD_SIZE")
        local_rank = _number(said, "LOCAL_RANK")
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError as error:
        raise ConfigError(
            f"the environment does not say which of several processes this is ({error}): start "
            "them with torchrun, or unset WORLD_SIZE"
        ) from None
    if not 0 <= rank < count <= MOST_RANKS or local_count < 1:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {count}: at most {MOST_RANKS} ranks work")
    return Launch(Ranks(rank, count), local_rank, local_count, restarts)


def _number(said: dict[str, str | None], name: str) -> int:
    text = said[name]
    if text is None:
        raise ValueError(f"{name} is not set")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}") from None
