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

_OF_A_DESCRIPTOR = {
    *("write", "pwrite64", "pwritev", "pwritev2", "writev", "sendfile", "ftruncate", "fallocate"),
    *("fsync", "fdatasync", "syncfs", "ioctl"),
}
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)(.*)$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$")
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")
_NAME = re.compile(r'"([^"]*)"')


def calls_of(lines: Iterable[str], roots: list[str]) -> Counter[tuple[str, str]]:
    """Return the successful calls that change or flush something below the roots."""
    tally: Counter[tuple[str, str]] = Counter()
    links: dict[str, str] = {}
    for line in _whole(lines):
        match = _CALL.match(line)
        if match is None or int(match[3]) < 0:
            continue
        name, arguments = match[1], match[2]
        kind = _KINDS.get(name, name)
        if kind == "open" and not re.search(r"O_CREAT|O_TRUNC", arguments):
            continue
        if name == "mmap" and not ("MAP_SHARED" in arguments and "PROT_WRITE" in arguments):
            continue
        if name == "ioctl" and "FICLONE" not in arguments:
            continue
        if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
            kind = "rmdir"
        place = _physical(_place(name, arguments, match[4]), links)
        if kind == "symlink":
            links[place] = _NAME.findall(arguments)[0]
        made = kind == "mkdir" and place in roots  # the disks themselves, before the recorder
        if not made and any(f"{place}/".startswith(f"{root}/") for root in roots):
            tally[kind, place] += 1
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


def _place(name: str, arguments: str, result: str) -> str:
    """Return the path that a call is about, the first of two; nothing where it has none."""
    if name in _OF_A_DESCRIPTOR:
        found = _DESCRIPTOR.match(arguments)
    elif name in ("open", "openat", "creat"):
        found = re.match(r"^<([^>]*)>", result)
    elif name in ("mmap", "copy_file_range"):
        found = re.search(r", \d+<([^>]*)>, ", arguments)
    else:
        names = _NAME.findall(arguments)
        at = re.search(r"(?:AT_FDCWD|\d+)<([^>]*)>, ", arguments)
        path = names[-1 if "symlink" in name else 0]
        return os.path.join(at[1] if at is not None else "/", path)
    return found[1].removesuffix(" (deleted)") if found is not None else ""


def _physical(path: str, links: dict[str, str]) -> str:
    """Resolve a path's directory through the links that the process has made."""
    folder, name = os.path.split(path)
    for link, target in links.items():
        if target.startswith("/") and f"{folder}/".startswith(f"{link}/"):
            folder = target + folder[len(link) :]
    return os.path.join(folder, name)


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
