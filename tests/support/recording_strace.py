"""Compares a recording with what strace saw of the same process: nothing may escape it.

`python -m tests.support.recording_strace FOLDER` trains a small run with real flushes while it is
recorded, and writes FOLDER/tally.json: calls by kind and path. `calls_of` reads the same from
`strace -f -y`'s output of that very process.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["TRACED", "calls_of"]

_KINDS = {
    **dict.fromkeys(("write", "pwrite64", "pwritev", "pwritev2", "writev"), "write"),
    **dict.fromkeys(("sendfile", "copy_file_range"), "write"),
    "ftruncate": "truncate",
    "truncate": "truncate",
    "fallocate": "allocate",
    **dict.fromkeys(("rename", "renameat", "renameat2"), "rename"),
    **dict.fromkeys(("symlink", "symlinkat"), "symlink"),
    **dict.fromkeys(("link", "linkat"), "link"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    "unlink": "unlink",
    "rmdir": "rmdir",
    "unlinkat": "unlink",
    **{name: name for name in ("fsync", "fdatasync", "syncfs", "sync", "msync")},
    **dict.fromkeys(("open", "openat", "creat"), "open"),
}
TRACED = ",".join([*_KINDS, "mmap", "chdir", "io_uring_setup", "io_submit", "ioctl"])
"""What strace has to trace."""

_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)(.*)$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$")
_PLACE = re.compile(r'(?:AT_FDCWD|\d+)<([^>]*)>, "([^"]*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")
_NAME = re.compile(r'"([^"]*)"')


def calls_of(lines: Iterable[str], roots: list[str]) -> Counter[tuple[str, str]]:
    """Return the successful calls that change or flush something below the roots."""
    tally: Counter[tuple[str, str]] = Counter()
    for line in _whole(lines):
        match = _CALL.match(line)
        if match is None or int(match[3]) < 0:
            continue
        name, arguments = match[1], match[2]
        place = _place(name, arguments, match[4])
        if place is None or not any(f"{place}/".startswith(f"{root}/") for root in roots):
            continue
        kind = _KINDS.get(name)
        if kind == "open" and not re.search(r"O_CREAT|O_TRUNC", arguments):
            continue
        if name == "mmap" and not ("MAP_SHARED" in arguments and "PROT_WRITE" in arguments):
            continue
        if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
            kind = "rmdir"
        tally[kind or name, place] += 1
    return tally


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Yield each call on one line: strace splits those that another thread comes between."""
    begun: dict[str, str] = {}
    for line in lines:
        text = line.rstrip("\n")
        if (match := _UNFINISHED.match(text)) is not None:
            begun[match[1]] = match[2]
        elif (match := _RESUMED.match(text)) is not None:
            yield f"{match[1]} {begun.pop(match[1])}{match[3]}"
        else:
            yield text


def _place(name: str, arguments: str, result: str) -> str | None:
    """Return the physical path that a call is about; the first of two."""
    if name in ("open", "openat", "creat"):
        found = re.match(r"^<([^>]*)>", result)
        return found[1] if found is not None else None
    if name == "mmap":
        found = re.search(r", \d+<([^>]*)>, ", arguments)
        return found[1] if found is not None else None
    if name in ("symlink", "symlinkat"):
        path = _NAME.findall(arguments)[-1]
        at = re.search(r", (?:AT_FDCWD|\d+)<([^>]*)>, ", arguments)
        return _physical(os.path.join(at[1] if at is not None else "/", path))
    if (match := _PLACE.search(arguments)) is not None:
        return _physical(os.path.join(match[1], match[2]))
    if (match := _DESCRIPTOR.match(arguments)) is not None:
        return match[1].removesuffix(" (deleted)")
    if (match := _NAME.search(arguments)) is not None:
        return _physical(match[1])
    return None


def _physical(path: str) -> str:
    """Resolve a path's directory as far as it is still there, through the links of a store."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def main() -> None:
    """Train a small run under the recorder, with every flush done."""
    import torch

    from tests.support.recording import Recorder
    from tests.support.recording_runs import Job

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    tree: dict[str, Any] = json.loads(sys.argv[2])
    job = Job(folder, tree)
    for disk in job.disks:
        disk.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(job.disks, flush=True)
    recorder.install()
    error = job.train()
    assert error is None, error
    rows = [[kind, path, count] for (kind, path), count in recorder.tally.items()]
    (folder / "tally.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
