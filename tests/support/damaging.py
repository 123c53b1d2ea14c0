"""Damages one file of a run after the other and looks at what verify and a resumed run make of it.

The model is captured once; each case is a forked child, as in `tests.support.killing`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swaptrain.store.check.verify import Verifier
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.record import read_record
from tests.support.forking import fork
from tests.support.killing import Runs, final_state, metrics_key

__all__ = ["ACTIONS", "KINDS", "damage", "damageable"]

KINDS = ("flipped", "truncated", "missing", "swapped", "stale")
_OTHERS = ("lock", "config.yaml", "metrics.jsonl", "starts.jsonl", "data", "trace.json")


def damageable(run_dir: Path) -> list[Path]:
    """Return every file and link of a store, relative to its run, but for what is no store."""
    return sorted(
        path.relative_to(run_dir)
        for path in run_dir.rglob("*")
        if (path.is_symlink() or path.is_file())
        and path.relative_to(run_dir).parts[0] not in _OTHERS
    )


def damage(kind: str, path: Path, older: Path, others: list[Path], rng: random.Random) -> bool:
    """Damage a file; return whether that changed anything.

    `older` is the same file at an earlier moment; `others` are files to be swapped with.
    """
    if path.is_symlink():
        return _damage_link(kind, path, others)
    content = path.read_bytes()
    if kind == "flipped":
        position = rng.randrange(len(content))
        bit = 1 << rng.randrange(8)
        path.write_bytes(
            content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :]
        )
    elif kind == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "missing":
        path.unlink()
    elif kind == "stale":
        if not older.is_file() or older.read_bytes() == content:
            return False
        path.write_bytes(older.read_bytes())
    else:
        alike = [p for p in others if not p.is_symlink() and p.stat().st_size == len(content)]
        alike = [p for p in alike if p.name == path.name or p.parent.name == path.parent.name]
        different = [p for p in alike if p.read_bytes() != content]
        if not different:
            return False
        other = rng.choice(different)
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    return True


def _damage_link(kind: str, path: Path, others: list[Path]) -> bool:
    if kind == "missing":
        path.unlink()
        return True
    if kind != "swapped":
        return False
    links = [p for p in others if p.is_symlink() and p.parent == path.parent and p != path]
    if not links:
        return False
    target, other = os.readlink(path), os.readlink(links[0])
    for link, to in ((path, other), (links[0], target)):
        link.unlink()
        link.symlink_to(to)
    return True


def interrupted(runs: Runs, wanted: Callable[[Path], bool], calls: int) -> None:
    """Kill the run, later and later, until its directory is as wanted."""
    for at in [*range(calls // 4, calls, max(1, calls // 50)), *range(calls // 4, calls)]:
        runs.reset()
        status, _, _ = runs.child(at)
        if status == signal.SIGKILL and wanted(runs.run_dir):
            return
    raise AssertionError("no kill left the state that is wanted")


def versions(run_dir: Path) -> list[int]:
    """Return the versions of the live slots."""
    links = sorted((run_dir / "store" / "segments").glob("[0-9]*"))
    return [read_record(link / "zarr.json")["version"] for link in links if link.is_symlink()]


STATES: dict[str, Callable[[Path], bool]] = {
    # Inside a step that is not the last: some segments are committed, and their hand-off is needed;
    # or, with clipping, in the forward of the next one, some updates are done and others pend.
    "inside": lambda run: set(versions(run)) == {1, 2},
    # Between two commits of the whole store.
    "between": lambda run: set(versions(run)) == {2},
}


def sweep(plan: dict[str, Any]) -> dict[str, Any]:
    """Damage every file of a store in the plan's kinds of ways, one at a time.

    `plan`: folder, tree, pool, state (of STATES), kinds (by default each file gets one, in turn),
    stride (2: every second file).
    Returns how many cases there were, by what came of them, and those that went wrong.
    """
    folder = Path(plan["folder"])
    runs = Runs(folder, plan["tree"], pool=plan["pool"])
    runs.create()
    runs.reset()
    status, calls, error = runs.child()
    assert status == 0, error
    expected = final_state(runs.run_dir), metrics_key(runs.run_dir)
    interrupted(runs, STATES[plan["state"]], calls)
    base, older = folder / "base", folder / "template"
    shutil.copytree(runs.run_dir, base, symlinks=True)
    rng = random.Random(7)
    files = damageable(base)
    outcomes = {"stopped": 0, "no matter": 0, "no change": 0}
    wrong: list[Any] = []
    for number, file in enumerate([Path(), *files]):
        if number % plan.get("stride", 1):
            continue
        kinds = plan.get("kinds") or [KINDS[number % len(KINDS)]]
        for kind in kinds if number else ["none"]:
            shutil.rmtree(runs.run_dir)
            shutil.copytree(base, runs.run_dir, symlinks=True)
            others = [runs.run_dir / other for other in files if other != file]
            if number and not damage(kind, runs.run_dir / file, older / file, others, rng):
                outcomes["no change"] += 1
                continue
            before = _snapshot(runs.run_dir)
            changed = [runs.run_dir / f for f in files if _content(base / f) != before.get(str(f))]
            found = _verified(runs, folder)
            same = _snapshot(runs.run_dir) == before
            status, _, error = runs.child()
            # Another record of the segment verifies by itself: what it says of chunks does not.
            slots = [f.parent for f in changed if f.parent.parent.name == "slots"]
            named = [*map(str, changed), *(f"{slot}/" for slot in slots if kind == "swapped")]
            if slots and kind == "swapped":
                named.append("the store holds a mixture")
            problem = _judge(runs, named, os.waitstatus_to_exitcode(status), error, found, expected)
            if not same:
                problem = "verify wrote"
            if problem:
                wrong.append([str(file), kind, problem, found, error[-500:]])
            outcomes["stopped" if status else "no matter"] += 1
    return {"outcomes": outcomes, "files": len(files), "wrong": wrong[:5], "count": len(wrong)}


def _judge(
    runs: Runs, named: list[str], code: int, error: str, found: list[str], expected: Any
) -> str | None:
    """Return what is wrong with the way a damage was met, None if nothing is.

    Each message has to have one of the texts in `named`.
    """
    if not all(any(text in line for text in named) for line in found):
        return "verify names a file that was not damaged"
    if code == 0:
        if (final_state(runs.run_dir), metrics_key(runs.run_dir)) != expected:
            return "other bits, without a word"
        return None
    if code != 3:
        return f"exit code {code}"
    if not any(text in error for text in named):
        return "the message names no file that was damaged"
    if "segment" not in error and "root" not in error:
        return "the message names no segment"
    return None if found else "verify finds nothing"


def _verified(runs: Runs, folder: Path) -> list[str]:
    """Verify in a child, since this process starts no thread; return the findings."""
    to = folder / "findings.json"
    child = fork()
    if child == 0:
        try:
            with DirectIO() as io:
                result = Verifier(runs.run_dir, io).verify()
            to.write_text(json.dumps([str(finding) for finding in result.findings]))
        except BaseException:
            to.write_text(json.dumps([traceback.format_exc()]))
        os._exit(0)
    os.waitpid(child, 0)
    return list(json.loads(to.read_text()))


def _snapshot(folder: Path) -> dict[str, str | None]:
    return {str(file): _content(folder / file) for file in damageable(folder)}


def _content(path: Path) -> str | None:
    if path.is_symlink():
        return os.readlink(path)
    return hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else None


ACTIONS = {"damage": sweep}
"""What `tests.support.serving` may be asked for."""
