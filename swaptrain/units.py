"""Bytes, counts and durations as text, and back: units are parsed and printed here only."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from swaptrain.errors import ConfigError

__all__ = ["GIB", "MIB", "exact_size", "format_count", "format_duration", "format_size"]
__all__ += ["format_wear", "how_many", "parse_size", "roomy_size"]

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(
    r"\s*([0-9]{1,20}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([a-z]*)\s*", re.ASCII | re.I
)
_KNOWN = "KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (powers of 1000) or B"


def parse_size(text: str | int | float) -> int:
    """Turn a size with its unit, such as `4GiB` or `1.5 MiB`, into bytes (rounded down).

    GiB is 2^30 and GB is 10^9; upper and lower case do not matter. Raises ConfigError for a number
    without a unit, because nobody can see whether 4 means bytes or GiB.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise ConfigError(f"{text!r} is not a size: write a number and its unit, such as 4GiB")
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f"the size {text} has no unit: say {number}GiB or {number}MiB")
    factor = _UNITS.get(unit.lower())
    if factor is None:
        hint = f" (say {number}{unit.upper()}iB)" if unit.lower() in {"k", "m", "g", "t"} else ""
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}{hint}: use {_KNOWN}")
    return int(Fraction(number) * factor)


def format_size(size_bytes: int | float) -> str:
    """Show bytes for a person, with one decimal: `4.0 GiB`, `512.0 MiB`, `3.5 KiB`, `17 B`."""
    size = abs(size_bytes)
    # The limits lie where rounding would print 1,024.0 of the smaller unit.
    if size >= 1023.95 * MIB:
        return f"{size_bytes / GIB:,.1f} GiB"
    if size >= 1023.95 * KIB:
        return f"{size_bytes / MIB:.1f} MiB"
    if size >= KIB:
        return f"{size_bytes / KIB:.1f} KiB"
    return f"{size_bytes:.0f} B"


def format_wear(size_bytes: int | float) -> str:
    """Show written bytes as drives' guarantees do, by powers of 1000: `2.31 TB`, `84.0 GB`."""
    if size_bytes >= 999.95e9:
        return f"{size_bytes / 1e12:,.2f} TB"
    if size_bytes >= 99.95e6:
        return f"{size_bytes / 1e9:.1f} GB"
    return f"{size_bytes / 1e6:.1f} MB"


def exact_size(size_bytes: int) -> str:
    """Write bytes as the shortest text that `parse_size` reads back to the same number: `64MiB`."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def roomy_size(size_bytes: int) -> str:
    """Round bytes up to a text fit for a config: what a message tells the user to set.

    Tenths of GiB from 1 GiB on, whole MiB below; `parse_size` of it is never less than the input.
    """
    if size_bytes > 1023 * MIB:
        tenths = -(-size_bytes * 10 // GIB)
        return f"{tenths // 10}.{tenths % 10}GiB" if tenths % 10 else f"{tenths // 10}GiB"
    return f"{max(1, -(-size_bytes // MIB))}MiB"


def format_count(count: int | float) -> str:
    """Show a number of things: `1,640`, and from a million on `2.60 M`, `70.55 B` (10^9)."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if round(abs(count) / factor, 2) >= 1:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,.0f}"


def how_many(count: int, one: str, many: str | None = None) -> str:
    """Show how many there are of something: `1 segment`, `1,640 steps`; `many` if not by an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_duration(duration_s: float) -> str:
    """Show seconds for a person: `3.2 ms`, `41.2 s`, `12.5 min`, `2.1 h`, `3.4 d`."""
    if not math.isfinite(duration_s):
        return "unknown"
    size_s = abs(duration_s)
    if size_s < 0.9995:
        return f"{duration_s * 1e3:.1f} ms"
    for limit_s, factor_s, unit in ((99.95, 1, "s"), (99.95 * 60, 60, "min")):
        if size_s < limit_s:
            return f"{duration_s / factor_s:.1f} {unit}"
    if size_s < 48 * 3600:
        return f"{duration_s / 3600:.1f} h"
    return f"{duration_s / 86400:,.1f} d"
