"""Globs over directories that may hold links: each file once, and no directory inside itself."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MOST_NAMES", "GlobError", "kind_of", "matches"]

MOST_NAMES = 20_000_000
"""Names that one glob looks at, before it is refused: `/**` would never end."""
_MAGIC = re.compile(r"[*?[]")
_UNREADABLE = "lost+found"
"""What every ext4 file system has, for its owner alone."""

Identity = tuple[int, int]


class GlobError(Exception):
    """What a glob meets that it can neither follow nor pass over; its text says what to do."""


def matches(pattern: str) -> list[str]:
    """Return the names that match, sorted, as `glob.glob(pattern, recursive=True)` does.

    `*`, `?` and `[...]` match no leading dot, `**` any number of directories. Links to directories
    are followed, but never into a directory that is on the path already (by device and inode), or
    holds where a link on it leads to.
    Raises GlobError for a directory that cannot be listed and for more than MOST_NAMES names.
    """
    if not _MAGIC.search(pattern):
        return [pattern] if os.path.lexists(pattern) else []
    start = "/" if pattern.startswith("/") else ""
    parts = [part for part in pattern.split("/") if part]
    parts = [p for i, p in enumerate(parts) if p != "**" or i == 0 or parts[i - 1] != "**"]
    walk = _GlobWalk(pattern)
    try:
        return sorted(set(walk.below(start, parts, walk.above(start or "."))))
    except RecursionError as error:
        raise GlobError(
            f"{pattern!r} leads through hundreds of directories in each other: write a "
            "narrower glob"
        ) from error


class _GlobWalk:
    """One glob's way through directories."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._seen = pattern, 0

    def above(self, directory: str) -> frozenset[Identity]:
        """Return a directory and all that it really lies in."""
        real = Path(os.path.realpath(directory))
        return frozenset(found for path in (real, *real.parents) if (found := _identity(str(path))))

    def below(self, base: str, parts: list[str], on_path: frozenset[Identity]) -> Iterator[str]:
        """Yield what the rest of the pattern matches below `base`; `on_path` leads to it."""
        if not parts:
            yield base
            return
        part, rest = parts[0], parts[1:]
        if part == "**":
            if rest or base:
                yield from self.below(base, rest, on_path)
            for name, is_directory in self._listed(base, part):
                if is_directory:
                    yield from self._into(os.path.join(base, name), parts, on_path)
                elif not rest:
                    yield os.path.join(base, name)
        elif _MAGIC.search(part):
            for name, is_directory in self._listed(base, part):
                if not fnmatch.fnmatchcase(name, part):
                    continue
                if not rest:
                    yield os.path.join(base, name)
                elif is_directory:
                    yield from self._into(os.path.join(base, name), rest, on_path)
        else:
            path = os.path.join(base, part)
            if not rest:
                if os.path.lexists(path):
                    yield path
            elif part in (".", ".."):
                yield from self.below(path, rest, self.above(path))
            elif os.path.isdir(path):
                yield from self._into(path, rest, on_path, named=True)

    def _into(
        self, path: str, parts: list[str], on_path: frozenset[Identity], *, named: bool = False
    ) -> Iterator[str]:
        """Go on in a directory, unless it is on the path; `named`: the pattern says its name."""
        found = _identity(path)
        if found is None or (found in on_path and not named):
            return
        led = self.above(path) if os.path.islink(path) else {found}
        yield from self.below(path, parts, on_path | led)

    def _listed(self, base: str, part: str) -> Iterator[tuple[str, bool]]:
        """Yield the names in a directory that are not hidden, each with whether it is one too."""
        try:
            with os.scandir(base or ".") as entries:
                found = [(entry.name, _is_directory(entry)) for entry in entries]
        except NotADirectoryError:
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if os.path.basename(base) == _UNREADABLE and isinstance(error, PermissionError):
                return
            raise GlobError(
                f"{self._pattern!r} leads into {base or '.'}, which cannot be listed "
                f"({error.strerror}): make it readable, or write globs that leave it out"
            ) from error
        self._seen += len(found)
        if self._seen > MOST_NAMES:
            raise GlobError(
                f"{self._pattern!r} leads to more than {MOST_NAMES:,} names, the last ones in "
                f"{base or '.'}: write a narrower glob"
            )
        for name, is_directory in sorted(found):
            if part.startswith(".") or not name.startswith("."):
                yield name, is_directory


def kind_of(status: os.stat_result) -> str | None:
    """Return what a file is that is neither regular nor a directory; None for these two."""
    mode = status.st_mode
    kinds = {
        stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads nowhere, or to itself


def _identity(path: str) -> Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
