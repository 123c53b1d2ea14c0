"""Runs a small job again and again, another disk operation failing each time.

As in `tests.support.killing`, the model is captured once and runs are forked.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from swaptrain import cli
from swaptrain.errors import DamagedStoreError
from swaptrain.store.format.record import read_record
from tests.faults.injection import COUNTED, READS, WRITES, Fault, Injector
from tests.support.killing import Runs, final_state, in_child, metrics_key

__all__ = ["ACTIONS", "Outcome", "explain", "faults_of", "sweep"]

_FLUSHES = ("fsync", "fdatasync", "syncfs")
_LASTING = ("ENOSPC", "EROFS", "ENODEV")
_ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "ENODEV", "ENXIO")
_HARMLESS = ("slow", "short")
_LONGEST_S = 60


@dataclass(frozen=True)
class Outcome:
    """How a run ended that met a fault."""

    status: int
    """Its exit code, or minus the signal that ended it."""
    said: str
    """What it wrote to the standard error."""
    hit: str | None
    """The path of the operation that failed; None if the run never came to it."""
    counts: dict[str, int]


class FaultyRuns(Runs):
    """A job whose runs meet faults."""

    def meet(self, fault: Fault | None, *, delay_s: float = 0) -> Outcome:
        """Give the training command in a child that meets `fault`."""

        def body() -> tuple[int, Any]:
            signal.alarm(_LONGEST_S)
            self.use_prepared()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            with tempfile.TemporaryFile() as said:
                os.dup2(said.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                injector = Injector([self.run_dir], fault, delay_s=delay_s)
                code = cli.main(["--config", str(self.run_dir.with_suffix(".yaml"))])
                injector.end()
                sys.stderr.flush()
                said.seek(0)
                text = said.read().decode()
            return code, [text, injector.hit, dict(injector.counts)]

        status, content = in_child(body)
        text, hit, counts = content or ("", None, {})
        return Outcome(os.waitstatus_to_exitcode(status), text, hit, counts)

    def interrupt(self, kill_at: int) -> None:
        """Make what every run begins with: a run that was killed in the middle."""
        shutil.rmtree(self._template, ignore_errors=True)
        self.reset()
        status, _, _ = self.child(kill_at)
        assert status == signal.SIGKILL
        shutil.copytree(self.run_dir, self._template, symlinks=True)


def faults_of(counts: dict[str, int], *, flips: bool) -> Iterator[Fault]:
    """Yield the faults of a run: every operation that it makes fails, in more than one way.

    In turn with one errno of those that fit it, or with a fault that lasts; what moves data also
    moves too little, or all of it wrong. Some are slow.
    """
    turn = 0
    for name in COUNTED:
        errnos = list(_ERRNOS)
        if name in READS or name in ("scandir", "listdir", "readlink", "statvfs"):
            errnos = ["EIO", "ENODEV", "ENXIO", "ESTALE"]
        elif name == "open":
            errnos = ["EIO", "EMFILE", "EACCES", "ENXIO", "ENOSPC", "EROFS"]
        for at in range(1, counts.get(name, 0) + 1):
            turn += 1
            if turn % 2:
                yield Fault(name, at, errnos[turn // 2 % len(errnos)])
            else:
                yield Fault(name, at, _LASTING[turn // 2 % len(_LASTING)], lasting=True)
            if name in (*READS, *WRITES):
                yield Fault(name, at, "short")
                if flips:
                    yield Fault(name, at, "flip")
            if name in WRITES:
                yield Fault(name, at, "torn")
                yield Fault(name, at, "full", lasting=True)
            if turn % 50 == 0:
                yield Fault(name, at, "slow")


def explain(fault: Fault, outcome: Outcome) -> str | None:
    """Return what is wrong with the way a run ended that met a fault; None if nothing is."""
    said = outcome.said.strip()
    if outcome.status not in (0, 1, 2, 3):
        return f"ended with {outcome.status}"
    if outcome.status == 0:
        return f"finished, but said {said!r}" if said else None
    if "Traceback" in said or "this is a bug" in said:
        return "a traceback"
    if not said.startswith("swaptrain: error: ") or said.count("swaptrain: ") > 1:
        return "not one message"
    if fault.kind in ("ENOSPC", "EDQUOT", "full") and not ("need" in said and "free" in said):
        return "says not what was needed and is free"
    return None if "/" in said else "names no path"


def sweep(plan: dict[str, Any]) -> dict[str, Any]:
    """Let one operation after the other fail; each run goes on afterwards, and must end the same.

    `plan`: folder, tree, pool; from (`nothing`, or `interrupted`: a run killed in the middle);
    count (how many faults, evenly spread; 0 for all); flips (whether bits flip as well).
    """
    runs = FaultyRuns(Path(plan["folder"]), plan["tree"], pool=plan["pool"])
    expected, calls = _expected(runs)
    if plan["from"] == "interrupted":
        runs.interrupt(calls * 3 // 5)
    runs.reset()
    whole = runs.meet(None)
    assert whole.status == 0, whole.said
    faults = list(faults_of(whole.counts, flips=bool(plan.get("flips"))))
    count = min(plan["count"] or len(faults), len(faults))
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    messages: dict[str, str] = {}
    passed: list[str] = []
    for fault in (faults[len(faults) * number // count] for number in range(count)):
        runs.reset()
        try:
            outcome = runs.meet(fault)
            problem = explain(fault, outcome) or _goes_on(runs, expected, fault, outcome)
        except Exception:  # whatever a run left behind that cannot even be compared
            wrong.append(f"{fault}: {traceback.format_exc()[-2500:]}")
            continue
        if outcome.hit is None and outcome.status == 0:
            tally["not reached"] += 1
            continue
        tally[f"{fault.kind}: exit {outcome.status}"] += 1
        messages.setdefault(f"{fault.name} {fault.kind}", outcome.said.strip())
        if outcome.status == 0 and fault.kind not in _HARMLESS:
            passed.append(f"{fault}, {outcome.hit}")
        if problem is not None:
            wrong.append(f"{fault}, {outcome.hit}: {problem}: {outcome.said.strip()[-2500:]}")
    return {
        "operations": whole.counts,
        "faults": count,
        "tally": dict(sorted(tally.items())),
        "passed": passed,
        "wrong": wrong[: plan.get("show", 5)],
        "wrong_count": len(wrong),
        **({"messages": messages} if plan.get("messages") else {}),
    }


def _expected(runs: Runs) -> tuple[Any, int]:
    """Return what an undisturbed run ends with, and how many changing calls it made."""
    runs.reset()
    status, calls, error = runs.child()
    assert status == 0, error
    return (final_state(runs.run_dir), metrics_key(runs.run_dir)), calls


def _goes_on(runs: FaultyRuns, expected: Any, fault: Fault, outcome: Outcome) -> str | None:
    """Give the same command again, without a fault; return what is wrong with its end."""
    if outcome.status != 0:
        again = runs.meet(None)
        if fault.kind == "flip" and again.status == 3:
            return None  # what was written wrong, or from what was read wrong, is noticed
        if again.status != 0:
            return f"does not go on ({again.status}: {again.said.strip()[-1500:]})"
    if fault.kind != "flip" or fault.name not in WRITES:
        return _difference(runs, expected)
    try:
        if outcome.hit is not None and outcome.hit.endswith(("metrics.jsonl", "starts.jsonl")):
            # Files without a checksum: a line is for people, and nothing is made from it.
            return None if final_state(runs.run_dir) == expected[0] else "the state differs"
        difference = _difference(runs, expected)
    except DamagedStoreError:
        return None  # the last record is what was written wrong: the next reader notices
    if difference and _verifies(runs.run_dir):
        return f"{difference}, and all checksums are right"
    return None


def _verifies(run_dir: Path) -> bool:
    """Whether every chunk of every live slot has the checksum that its record says."""
    for link in (run_dir / "store" / "segments").glob("[0-9]*"):
        for name, sums in read_record(link / "zarr.json")["checksums"].items():
            for chunk, expected in enumerate(sums):
                content = (link / name / "c" / str(chunk)).read_bytes()
                if xxhash.xxh3_64_intdigest(content) != expected:
                    return False
    return True


def _difference(runs: Runs, expected: Any) -> str | None:
    found = final_state(runs.run_dir), metrics_key(runs.run_dir)
    if found == expected:
        return None
    differing = [key for key, value in expected[0].items() if found[0].get(key) != value]
    return f"arrays {differing} differ; metrics {found[1] == expected[1]}"


def delay(plan: dict[str, Any]) -> dict[str, Any]:
    """Train where every operation takes up to four times `delay_s` longer; compare the end."""
    runs = FaultyRuns(Path(plan["folder"]), plan["tree"], pool=plan["pool"])
    expected = _expected(runs)[0]
    runs.reset()
    outcome = runs.meet(None, delay_s=plan["delay_s"])
    return {"wrong": outcome.said or _difference(runs, expected)}


ACTIONS = {"sweep": sweep, "delay": delay}
"""What `tests.support.serving` may be asked for."""
