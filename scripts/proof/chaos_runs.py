"""One kind of run, killed again and again: for scripts/proof/chaos.py."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import yaml

__all__ = ["POSITIONS", "Result", "Tormented", "differences"]

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("chaos_child.py")
KEYS = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "skipped", "loss_scale")
POOLS = (1.05, 1.3, 2.0, 6.0)
"""Slabs, in units of what the largest instruction needs."""
NEW_PROCESSES = 0.04
"""The share of processes that are new ones."""
POSITIONS = ("creation", "opening", "forward", "backward", "update", "eval", "between", "ending")
EVALUATIONS = 0.8
"""The share of kills of `eval` after which another one is killed."""
INSIDE = 0.5
"""The share of kills, with held-out data, that are timed from inside of an evaluation."""
INSIDE_S = 0.002

State = tuple[dict[str, str], list[list[Any]]]
"""A digest of every chunk of the live store, and the lines of metrics."""


@dataclass
class Result:
    """What became of one mode."""

    mode: str
    kills: int = 0
    new_processes: int = 0
    """Of the kills, those of processes that imported and captured for themselves."""
    runs: int = 0
    positions: Counter[str] = field(default_factory=Counter)
    again: list[dict[str, float]] = field(default_factory=list)
    """By kill: segments' forwards, backwards and updates that were done again."""
    mismatches: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def total(cls, results: Sequence[Result]) -> Result:
        """Return the sum of several modes."""
        total = cls("all")
        for result in results:
            total.kills += result.kills
            total.new_processes += result.new_processes
            total.runs += result.runs
            total.positions += result.positions
            total.again += result.again
            total.mismatches += result.mismatches
        return total

    def again_of(self, kind: str) -> tuple[float, float]:
        """Return mean and maximum over the kills."""
        counts = [row.get(kind, 0.0) for row in self.again] or [0.0]
        return sum(counts) / len(counts), max(counts)


class Tormented:
    """One config, its uninterrupted result, and the processes that train it."""

    def __init__(self, name: str, tree: dict[str, Any], folder: Path, seed: int) -> None:
        """Capture the model of `tree`, a config but for run.dir, which will be in `folder`."""
        self.result = Result(name)
        self._random = random.Random(f"{seed} {name}")
        self._run_dir, self._log = folder / "run", folder / "log"
        self._config = folder / "config.yaml"
        self._errors = folder / "errors.txt"
        tree = {**tree, "run": {"dir": str(self._run_dir)}}
        self._micro_batches = tree["data"]["micro_batches"]
        self._watched = "eval" in tree
        self._paths = [Path(path) for path in tree.get("store", {}).get("paths", [])]
        folder.mkdir(parents=True)
        self._config.write_text(yaml.safe_dump(tree))
        self._server = self._start("serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def torment(self, kills: int) -> Result:
        """Kill runs `kills` times in all, and compare each end."""
        begun = time.monotonic()
        self._reset()
        code = self._ask(POOLS[1], None)["code"]
        if code != 0:
            raise SystemExit(f"the uninterrupted run ended with {code}: see {self._errors}")
        self._expected = self._state()
        times = {word: float(rest[-1]) for word, *rest in self._log_lines()}
        # A third of the steps, so that most of the kills come before the end, and a few after it.
        self._moments_s = times["open"] - times["process"] + (times["finish"] - times["open"]) / 3
        self._evaluations = self._count_evaluations() // 3
        self._expected_loss = self._evaluated()
        self._reset()
        while True:
            if self._process(self.result.kills < kills):
                self.result.kills += 1
                continue
            self._count_again()
            self._kill_evaluations(kills)
            self.result.runs += 1
            self._compare()
            if self.result.kills >= kills or self.result.mismatches:
                break
            self._reset()
        self.result.seconds = time.monotonic() - begun
        return self.result

    def _process(self, kill: bool) -> bool:
        """Let one process train; return whether it was killed."""
        before = self._log.stat().st_size if self._log.exists() else 0
        existed = (self._run_dir / "store" / "zarr.json").exists()
        if kill and self._random.random() < NEW_PROCESSES:
            killed = self._new_process(before)
            self.result.new_processes += killed
        else:
            moment = self._moment(self._moments_s, self._evaluations) if kill else (None, 0)
            code = self._ask(self._random.choice(POOLS), *moment)["code"]
            killed = self._was_killed(code)
        if killed:
            self.result.positions[self._position(before, existed)] += 1
        return killed

    def _kill_evaluations(self, kills: int) -> None:
        """Kill `eval` some times, and compare the loss that it gives after that."""
        while self._watched and self.result.kills < kills and self._random.random() < EVALUATIONS:
            before, moment = self._log.stat().st_size, self._moment(self._eval_s, self._eval_count)
            code = self._ask(self._random.choice(POOLS), *moment, verb="eval")["code"]
            if self._was_killed(code):
                self.result.positions[self._position(before, True)] += 1
                self.result.kills += 1
        if not self.result.mismatches and (loss := self._evaluated()) != self._expected_loss:
            self.result.mismatches.append(f"eval gives {loss} instead of {self._expected_loss}")

    def _moment(self, seconds: float, evaluations: int) -> tuple[float, int]:
        """Return when to kill: after seconds, or so long after the begin of an evaluation."""
        if evaluations and self._random.random() < INSIDE:
            return self._random.uniform(0, INSIDE_S), self._random.randint(1, evaluations)
        return self._random.uniform(0, seconds), 0

    def _evaluated(self) -> str | None:
        """Return the step and the loss that an uninterrupted `eval` gives; None without data."""
        if not self._watched:
            return None
        before = self._log.stat().st_size
        answer = self._ask(POOLS[1], None, verb="eval")
        self._eval_s, self._eval_count = answer["seconds"], self._count_evaluations(before)
        word, *rest = self._log_lines()[-1]
        return " ".join(rest[:2]) if word == "loss" else f"exit {answer['code']}"

    def _new_process(self, before: int) -> bool:
        """Start the command, and kill it at some moment of its start or of its training."""
        process = self._start("train", stdout=subprocess.DEVNULL)
        if self._random.random() < 0.75:
            while process.poll() is None and b"open" not in self._log_after(before):
                time.sleep(0.005)
            delay_s = self._random.uniform(0, self._moments_s)
        else:
            delay_s = self._random.uniform(0, 10)
        try:
            code = process.wait(delay_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return self._was_killed(code)

    def _was_killed(self, code: int) -> bool:
        if code not in (0, -9):
            self.result.mismatches.append(f"exit {code}: see {self._errors}")
        return code == -9

    def _start(self, what: str, **pipes: Any) -> subprocess.Popen[bytes]:
        with self._errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, str(CHILD), what, str(self._config), str(self._log)],
                stderr=errors,
                cwd=ROOT,
                **pipes,
            )

    def _count_evaluations(self, offset: int = 0) -> int:
        return sum(line[0] == "b" and line[2] == "evaluate" for line in self._log_lines(offset))

    def _ask(
        self, pool: float, kill_after_s: float | None, evaluations: int = 0, verb: str = "train"
    ) -> dict[str, Any]:
        assert self._server.stdin is not None
        request = {
            "pool": pool,
            "kill_after_s": kill_after_s,
            "evaluations": evaluations,
            "verb": verb,
        }
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise SystemExit(f"the process that forks the runs has ended: see {self._errors}")
        return dict(json.loads(line))

    def _reset(self) -> None:
        for path in (self._run_dir, *self._paths):
            shutil.rmtree(path, ignore_errors=True)
        self._log.unlink(missing_ok=True)

    def _log_after(self, offset: int) -> bytes:
        if not self._log.exists():
            return b""
        with self._log.open("rb") as file:
            file.seek(offset)
            return file.read()

    def _log_lines(self, offset: int = 0) -> list[list[str]]:
        return [line.split() for line in self._log_after(offset).decode().splitlines()]

    def _position(self, before: int, existed: bool) -> str:
        """Return what the last process was doing when it was killed."""
        word, *rest = (self._log_lines(before) or [["process"]])[-1]
        if word == "process":
            return "opening" if existed else "creation"
        if word == "b":
            kind = _kind(rest[1])
            return "between" if kind is None else kind
        return {"open": "opening", "finish": "ending"}.get(word, "between")

    def _count_again(self) -> None:
        """Count, for each process after a kill, what an earlier one had completed before."""
        done: set[tuple[str, ...]] = set()
        lives: list[Counter[str]] = []
        life: set[tuple[str, ...]] = set()
        for word, *rest in self._log_lines():
            if word == "process":
                lives.append(Counter())
                done |= life
                life = set()
            elif word == "e" and (kind := _kind(rest[1])) is not None:
                key = (rest[0], kind, *rest[2:4])
                life.add(key)
                if key in done:
                    lives[-1][kind] += 1
        for counts in lives[1:]:
            units = {"forward": self._micro_batches, "backward": self._micro_batches}
            self.result.again.append({k: n / units.get(k, 1) for k, n in counts.items()})

    def _state(self) -> State:
        chunks = {}
        for link in sorted((self._run_dir / "store" / "segments").iterdir()):
            for chunk in sorted(link.glob("*/c/*")):
                name = f"{link.name}/{chunk.relative_to(link)}"
                chunks[name] = xxhash.xxh3_128_hexdigest(chunk.read_bytes())
        lines = (self._run_dir / "metrics.jsonl").read_text().splitlines()
        return chunks, [[json.loads(line).get(key) for key in KEYS] for line in lines]

    def _compare(self) -> None:
        if not self.result.mismatches:
            self.result.mismatches += differences(self._expected, self._state())


def differences(expected: State, found: State) -> list[str]:
    """Say what of two ends differs."""
    texts = []
    (expected_chunks, expected_lines), (chunks, lines) = expected, found
    differing = sorted(
        name
        for name in chunks.keys() | expected_chunks.keys()
        if chunks.get(name) != expected_chunks.get(name)
    )
    if differing:
        texts.append(f"{len(differing)} chunks differ: {differing[:3]}")
    if lines != expected_lines:
        texts.append(f"metrics.jsonl has {lines} instead of {expected_lines}")
    return texts


def _kind(operation: str) -> str | None:
    """Return the phase that an instruction belongs to."""
    kinds = {"forward": "forward", "turn": "backward", "backward": "backward", "update": "update"}
    return {**kinds, "evaluate": "eval"}.get(operation)
