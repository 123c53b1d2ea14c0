"""A file that appears whole, and never in the place of another one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from swaptrain.errors import ConfigError
from swaptrain.store.disk.durable_files import disk_errors, flush_directory

__all__ = ["check_new", "write_new"]

_SUFFIXES = (".yaml", ".yml")


def check_new(path: Path) -> None:
    """Raise ConfigError where no config can be written: a name that is taken, or no directory."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: name the config to write, such as {path.name or 'mine'}.yaml")
    if os.path.lexists(path):
        raise ConfigError(f"{path}: it is there already, and is not overwritten: name another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: {path.parent} is no directory: make it")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path}: this user may not write to {path.absolute().parent}: allow it")


def write_new(path: Path, text: str) -> None:
    """Write a text file durably; raises ConfigError where the name is taken meanwhile.

    Raises RunError where the disk refuses. What was written beside it is gone in any case.
    """
    with disk_errors(path, "write", len(text)):
        descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o666 & ~_umask())
            try:
                os.link(aside, path)  # which never replaces a file
            except FileExistsError:
                check_new(path)
        finally:
            os.unlink(aside)
    flush_directory(path.absolute().parent)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
