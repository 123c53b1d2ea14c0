"""JSON that somebody else may have written: every surprise in it is one ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "read_json"]

_DIGITS = 40
"""More than any whole number in swaptrain's files has; Python takes long for thousands of them."""


def parse_json(content: bytes) -> Any:
    """Return the value of UTF-8 JSON text.

    Raises ValueError for what is malformed, not UTF-8, nested too deeply, NaN or an infinity, a
    whole number of more than 40 digits, or an object with a key twice (readers differ in which of
    the two they take).
    """
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, most_bytes: int) -> Any:
    """Return the value of a JSON file; raises OSError, or ValueError for one that is too large."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    return parse_json(content)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    if len(text) > _DIGITS + 1:
        raise ValueError("a number has too many digits")
    return int(text)
