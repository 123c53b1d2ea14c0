"""What a step moved and waited for."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.memory.tier import Tier
from swaptrain.store.disk.direct import DirectIO

__all__ = ["Counters"]


@dataclass(frozen=True)
class Counters:
    """Cumulative counts at one moment, or their difference."""

    wait_s: float
    read_bytes: int
    write_bytes: int
    needed_bytes: int
    missed_bytes: int

    @classmethod
    def of(cls, tier: Tier, io: DirectIO) -> Counters:
        """Return the counts as they are now."""
        found = tier.counters
        return cls(
            found.wait_s, io.read_bytes, io.write_bytes, found.needed_bytes, found.missed_bytes
        )

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.wait_s - other.wait_s,
            self.read_bytes - other.read_bytes,
            self.write_bytes - other.write_bytes,
            self.needed_bytes - other.needed_bytes,
            self.missed_bytes - other.missed_bytes,
        )

    @property
    def hit_fraction(self) -> float | None:
        """Return the part of what instructions needed that was in memory."""
        if not self.needed_bytes:
            return None
        return max(0.0, 1 - self.missed_bytes / self.needed_bytes)
