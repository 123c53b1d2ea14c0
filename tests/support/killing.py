"""Trains in forked children that kill themselves at a chosen system call, and compares the ends.

The models are captured once, in a process that never starts a thread (`tests.support.serving`): a
child only opens the run, so that a hundred interruptions take seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

import swaptrain.verbs.train as training
from swaptrain.config.schema import Config
from swaptrain.planning import roofline
from swaptrain.planning.prepare import Prepared
from swaptrain.run.steps.training import Training
from swaptrain.store.disk import durable_files as files
from swaptrain.store.format.record import read_record
from tests.support.durability_sabotage import leave_out
from tests.support.forking import fork
from tests.support.machines import MACHINE
from tests.support.repeated import Again, lives, logger, repeated
from tests.support.runs import config_of

__all__ = ["ACTIONS", "Runs", "final_state", "in_child", "metrics_key"]

KEYS = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "skipped", "loss_scale")
_LONGEST_S = 120
"""Of a run that is resumed, or that leaves out what another part of it may wait for."""


def metrics_key(run_dir: Path) -> list[list[Any]]:
    """Return what of every line of metrics.jsonl does not depend on interruptions."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line).get(key) for key in KEYS] for line in lines]


def final_state(run_dir: Path) -> dict[str, str]:
    """Return a digest of every array of every live slot, and the versions."""
    return digest_of(run_dir / "store" / "segments")


def digest_of(directory: Path) -> dict[str, str]:
    """Return the same of the slots that the names in a directory point to."""
    state = {}
    for link in sorted(directory.iterdir()):
        if link.is_symlink():
            state[link.name] = str(read_record(link / "zarr.json")["version"])
            for array in sorted(path.parent for path in link.glob("*/zarr.json")):
                digest = xxhash.xxh3_64()
                for chunk in sorted((array / "c").iterdir(), key=lambda path: int(path.name)):
                    digest.update(chunk.read_bytes())
                state[f"{link.name}/{array.name}"] = digest.hexdigest()
    return state


class Killer:
    """Counts the system calls that change the disk, and dies in the one with a given number."""

    def __init__(self, at: int | None, *, delay_s: float = 0) -> None:
        """Kill in call number `at`; writes of chunks and flushes take `delay_s` longer."""
        self.count = 0
        self.at = at
        self._delay_s = delay_s
        self._lock = threading.Lock()
        # A killed process loses nothing that it wrote: flushing would only take time.
        files.syncfs = lambda _: None
        os.fsync = os.fdatasync = lambda _: None
        for name in ("fsync", "fdatasync", "replace", "symlink", "ftruncate", "unlink"):
            self._patch(name, lambda call: call)
        self._patch("pwritev", self._torn)
        self._patch("pwrite", self._torn)
        self._patch("write", self._torn)

    def _patch(self, name: str, tear: Callable[[Any], Any]) -> None:
        original = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "write" and args[0] <= 2:
                return original(*args)
            if self._delay_s and name in ("pwritev", "fdatasync"):
                time.sleep(self._delay_s)
            with self._lock:
                self.count += 1
                if self.count == self.at:
                    if tear is not None and name.startswith(("pw", "wr")):
                        tear(original)(*args)
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, counted)

    @staticmethod
    def _torn(original: Any) -> Callable[..., None]:
        """Return what does the first half of a write."""

        def half(descriptor: int, data: Any, *offset: int) -> None:
            if isinstance(data, list):
                size = len(data[0]) // 2 // 4096 * 4096
                if size:
                    original(descriptor, [data[0][:size]], *offset)
            else:
                original(descriptor, data[: len(data) // 2], *offset)

        return half


class Runs:
    """One job: its config, captured once, and a run directory that is made anew from a template."""

    def __init__(self, folder: Path, tree: dict[str, Any], *, pool: float) -> None:
        """Prepare the job; slabs get `pool` times what the largest instruction needs."""
        self.run_dir = folder / "run"
        self.log = folder / "instructions"
        self._template = folder / "template"
        self.config = config_of(self.run_dir, tree)
        self._prepared = {None: self._prepare(self.config, pool)}
        self._pool = pool

    def _prepare(self, config: Config, pool: float) -> Prepared:
        prepared = Prepared(config.resolved(), None, lambda _: None)
        pool_bytes = int(prepared.plan.peaks.instruction_bytes * pool)
        prepared.plan = dataclasses.replace(prepared.plan, pool_bytes=pool_bytes)
        return prepared

    def also(self, name: str, tree: dict[str, Any]) -> None:
        """Prepare a second config of the same run, that `child` may be told to use."""
        self._prepared[name] = self._prepare(config_of(self.run_dir, tree), self._pool)

    def create(self) -> None:
        """Make the template: a run that was killed before its first step."""
        status, _, error = self.child(stop_after_creation=True)
        assert status == 0, error
        shutil.copytree(self.run_dir, self._template, symlinks=True)

    def reset(self) -> None:
        """Put the run directory back to where its first step begins, or away; empty the log."""
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if self._template.exists():
            shutil.copytree(self._template, self.run_dir, symlinks=True)

    def done_again(self) -> list[Again]:
        """Return what each process since `reset` did that an earlier one had completed."""
        return repeated(lives(self.log))

    def too_much_again(self) -> str | None:
        """Say where a process did more again than a forward or the backwards that are allowed."""
        if self.config.store.commit.is_whole:
            return None  # it goes back to the last commit of the whole store
        for again in self.done_again():
            backwards = self.config.store.commit.lag or 2
            if not again.within(backwards):
                return f"done again: {again.instructions}"
        return None

    def child(
        self,
        kill_at: int | None = None,
        *,
        after_s: float | None = None,
        stop_after_creation: bool = False,
        steps: int | None = None,
        name: str | None = None,
        setup: Callable[[], None] = lambda: None,
        options: Mapping[str, Any] | None = None,
        delay_s: float = 0,
    ) -> tuple[int, int, str]:
        """Train in a child; return its wait status, the calls it counted, and its last words."""

        def body() -> tuple[int, Any]:
            killer = Killer(kill_at, delay_s=delay_s)
            code, text = 0, ""
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                config = self.use_prepared(name)
                if steps is not None:
                    changed = config.train.model_copy(update={"steps": steps})
                    config = config.model_copy(update={"train": changed})
                if stop_after_creation:
                    Training.run = _stop  # type: ignore[method-assign]
                setup()
                observe = logger(self.log)
                training.train(config, observe=observe, **(options or {}))
            except _Created:
                pass
            except BaseException as error:
                code = getattr(error, "exit_code", 99)
                text = "".join(traceback.format_exception(error))[-3000:]
            killer.at = None
            return code, [killer.count, text]

        status, content = in_child(body, kill_after_s=after_s)
        count, text = content or (0, "")
        return status, count, text

    def use_prepared(self, name: str | None = None) -> Config:
        """Let `train` take what was captured once, in a child; return the config to give it."""
        prepared = self._prepared[name]
        training.Prepared = lambda *_: prepared  # type: ignore[assignment,misc]
        roofline.machine = lambda *_: MACHINE  # type: ignore[assignment]
        if name is None:  # a test may have changed what needs no other capture
            weighting = prepared.config.train.loss_weighting
            train = self.config.train.model_copy(update={"loss_weighting": weighting})
            prepared.config = self.config.resolved().model_copy(update={"train": train})
            return self.config
        return prepared.config


def in_child(
    body: Callable[[], tuple[int, Any]], *, kill_after_s: float | None = None
) -> tuple[int, Any]:
    """Run `body` in a forked child, which ends with the code that it returns.

    Returns the wait status, and what `body` returned beside the code; None of a child that died.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        os.close(reading)
        code, content = body()
        os.write(writing, json.dumps(content).encode())
        os._exit(code)
    os.close(writing)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, json.loads(content) if content else None


class _Created(Exception):
    pass


def _stop(self: object) -> None:
    raise _Created


def chain(plan: dict[str, Any]) -> dict[str, Any]:
    """Kill a run again and again, each time it goes on, until `kills` are done; compare its end.

    `plan`: folder, tree, pool, kills; timed (at random moments, else at random system calls). A run
    that comes to its end before is begun anew. Returns the kills, the runs and what differed.
    """
    runs, expected, calls = _prepare(plan)
    rng = random.Random(plan.get("seed", 0))
    kills = ended = 0
    runs.reset()
    while True:
        last = kills == plan["kills"]
        if last:
            status, _, error = runs.child()
        elif plan.get("timed"):
            status, _, error = runs.child(after_s=rng.uniform(0.02, 0.3))
        else:
            status, _, error = runs.child(rng.randrange(1, calls // 2))
        if status == signal.SIGKILL:
            kills += 1
            continue
        wrong = error or _difference(runs, expected) or runs.too_much_again()
        ended += 1
        if wrong or last:
            return {"kills": kills, "runs": ended, "wrong": wrong or None}
        runs.reset()


def _prepare(plan: dict[str, Any]) -> tuple[Runs, Any, int]:
    """Return the job, what its uninterrupted run ends with, and how many calls that makes.

    Where the plan says `creation`, kills come in the creation of the store as well.
    """
    runs = Runs(Path(plan["folder"]), plan["tree"], pool=plan["pool"])
    if not plan.get("creation"):
        runs.create()
    runs.reset()
    status, calls, error = runs.child()
    assert status == 0, error
    return runs, (final_state(runs.run_dir), metrics_key(runs.run_dir)), calls


def _difference(runs: Runs, expected: Any) -> str | None:
    found = final_state(runs.run_dir), metrics_key(runs.run_dir)
    if found == expected:
        return None
    differing = [k for k, v in expected[0].items() if found[0].get(k) != v]
    return f"arrays {differing}; metrics {found[1]} instead of {expected[1]}"


def sweep(plan: dict[str, Any]) -> dict[str, Any]:
    """Kill one run per position and resume it; return how many, and what differed.

    `plan`: folder, tree, pool, positions (how many, evenly spread; 0 for all), twice (kill the
    resumed run as well). `without` names what the killed run does not make durable, of
    `durability_sabotage.WITHOUT`; `delay_s` makes its disk slow; the first `enough` wrong ends are
    enough. Of `wrong_count`, `lost` ends have other bits or none; the others repeated too much.
    """
    runs, expected, calls = _prepare(plan)
    count = min(plan["positions"] or calls, calls)
    wrong: list[list[Any]] = []
    kills = lost = 0
    spread = [1 + number * calls // count for number in range(count)]
    for number, at in enumerate(plan.get("at") or spread):
        if len(wrong) == plan.get("enough"):
            break
        runs.reset()
        status, _, error = runs.child(
            at, setup=partial(_leave_out, plan.get("without")), delay_s=plan.get("delay_s", 0)
        )
        if status != signal.SIGKILL:
            continue  # threads finished in another order
        kills += 1
        if plan.get("twice"):
            runs.child(1 + number * 7 % (calls // 3))
        status, _, error = runs.child(setup=_limit_time)
        difference = error or f"ended with {status}" if status else _difference(runs, expected)
        lost += difference is not None
        difference = difference or runs.too_much_again()
        if difference is not None:
            wrong.append([at, difference])
    return {
        "calls": calls,
        "kills": kills,
        "wrong": wrong[:5],
        "wrong_count": len(wrong),
        "lost": lost,
    }


def _leave_out(part: str | None) -> None:
    if part is not None:
        leave_out(part)
        _limit_time()


def _limit_time() -> None:
    """End this process by a signal if it waits for what never comes."""
    signal.alarm(_LONGEST_S)


def power_loss(plan: dict[str, Any]) -> dict[str, Any]:
    """Kill runs, take away some of what they had not flushed, and resume them.

    `plan`: folder, tree, pool, positions. Chunks of values and of buffers, and the journal, which
    are never flushed, lose a part, their content, or nothing. Returns the kills, how many of them
    made forwards again that one segment's do not account for, and what differed.
    """
    runs, expected, calls = _prepare(plan)
    rng = random.Random(plan.get("seed", 0))
    wrong, kills, more = [], 0, 0
    for number in range(plan["positions"]):
        runs.reset()
        status, _, error = runs.child(calls * (2 * number + 1) // (2 * plan["positions"]))
        if status != signal.SIGKILL:
            continue  # threads finished in another order
        kills += 1
        spill = runs.run_dir / "spill"
        journal = spill / "journal"
        for file in (*spill.glob("values/*/c/*/*"), *spill.glob("buffers/*/*/c/*"), journal):
            if file.exists() and rng.random() < 0.5:  # a run at its end deletes them
                content = bytearray(file.read_bytes())
                half = len(content) // 2 if rng.random() < 0.5 else 0
                content[half:] = bytes(len(content) - half)
                file.write_bytes(content)
        status, _, error = runs.child()
        difference = error if status else _difference(runs, expected)
        if difference:
            wrong.append([number, difference])
        more += runs.too_much_again() is not None
    return {"kills": kills, "more": more, "wrong": wrong[:5]}


ACTIONS = {"chain": chain, "power loss": power_loss, "sweep": sweep}
"""What `tests.support.serving` may be asked for."""
