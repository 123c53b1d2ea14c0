"""What a look at a run directory finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from swaptrain.errors import DamagedStoreError
from swaptrain.store.check.claims import Claim
from swaptrain.store.check.scan import Chunk

__all__ = ["Finding", "Verification"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    damage: DamagedStoreError
    title: str = ""
    """What of the run it is, where it is not a segment's live state."""
    claim: Claim | None = None
    chunk: Chunk | None = None
    """The chunk whose bytes are wrong, if it is one."""
    content: bytes | None = None
    """What the file has to hold, where that is always the same."""

    def __str__(self) -> str:
        damage = self.damage
        parts = [
            f"{name} {value}"
            for name, value in (
                ("segment", damage.segment),
                ("array", damage.array),
                ("chunk", damage.chunk),
            )
            if value is not None
        ]
        title = f"{self.title}, " if self.title else ""
        return f"{title}{', '.join(parts)}{': ' if parts else ''}{damage.path}: {damage.what}"


@dataclass
class Verification:
    """What was looked at, and what is wrong."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not checked, and why."""
    position: str = "at a step that cannot be told"
    segments: int = 0
    arrays: int = 0
    chunks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    snapshots: dict[int, bool] = field(default_factory=dict)
    """By step: whether all of it verifies."""
