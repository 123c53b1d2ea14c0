"""What is asked of the verb `plan` beside the plan itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMMON_DRIVE_BYTES", "Questions"]

COMMON_DRIVE_BYTES = 600e12
"""What a common 1 TB drive is guaranteed to take."""


@dataclass(frozen=True)
class Questions:
    """What is asked beside the plan itself."""

    suggest: bool = False
    layers: bool = False
    what_if: Sequence[str] = ()
    ranks: Sequence[int] = ()
    drive_bytes: float = COMMON_DRIVE_BYTES
    as_json: bool = False
