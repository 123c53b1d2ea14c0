"""Small files that are there as a whole or not at all, and survive a power loss."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "write_durably"]


def write_durably(path: Path, content: bytes) -> None:
    """Write a file aside, flush it, rename it into place and flush its directory."""
    aside = path.with_name(path.name + ".new")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
