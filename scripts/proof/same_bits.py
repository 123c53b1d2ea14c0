"""Compare what this source tree writes with what another commit writes: bits, numbers and order.

    python scripts/proof/same_bits.py BASE [--modes fused clipped] [--runs 3]

BASE is a commit. Small runs train at both, in processes of their own, through the command line
alone. Compared are the bytes of every file that the live store leads to, the metrics that no clock
decides, the least budget that `plan` names, and the order of file operations: what always came at
BASE before a rename, a removal or the end of a flush, of the same slot or of the whole store, has
to come before it here. Threads race: where runs of BASE differ from each other nothing is compared,
and where anything differs, more runs of both have to agree that it does. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
CHILD = HERE.with_name("same_bits_child.py")

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 2, "dropout": 0.1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "64KiB"},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
}
TIED: dict[str, Any] = {
    "model": {
        "hf": {
            "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
            "max_position_embeddings": 64, "tie_word_embeddings": True,
        },
    },
    "data": {"python": "tests.support.datasets:text"},
    "memory": {"segment": "16KiB"},
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "fused": GPT,
    "clipped": {**GPT, "optimizer": {"clip_norm": 0.3}},
    "trees": {**GPT, "store": {"commit": {"every": 2}}, "train": {"steps": 4}},
    "parts": {**GPT, "memory": {"segment": "200KiB"}, "store": {"chunk": "8KiB"}},
    "batch-norm": CNN,
    "tied": TIED,
    "tied-bfloat16": {**TIED, "model": {**TIED["model"], "dtype": "bfloat16"}},
    "adafactor": {**TIED, "optimizer": {"name": "adafactor", "lr": 1e-2, "weight_decay": 0.0}},
    "bfloat16-clipped": {
        **TIED, "model": {**TIED["model"], "dtype": "bfloat16"}, "optimizer": {"clip_norm": 0.3},
    },
    "evaluated": {
        **GPT,
        "eval": {"python": "tests.support.datasets:tokens", "every": 1, "batches": 2},
        "store": {"keep": {"every": 1, "last": 2}},
    },
}  # fmt: skip
_ROUNDS = 4
"""Of so many runs, where two at a time still differ; threads that race seldom agree so often."""
BARRIERS = ("rename", "unlink", "rmdir", "syncfs ended", "fsync ended", "fdatasync ended")


@dataclass(frozen=True)
class Found:
    """What one run left: facts by name, and its file operations in order."""

    facts: dict[str, Any]
    order: list[str]


def main() -> int:
    """Compare the modes that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--runs", type=int, default=2, help="runs of each to begin with")
    chosen = parser.parse_args()
    failed = 0
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="same-bits-", dir=ROOT / "runs") as name:
        folder = Path(name)
        with source_of(chosen.base, folder / "base") as base:
            for mode in chosen.modes:
                before: list[Found] = []
                after: list[Found] = []
                for _ in range(_ROUNDS):
                    before += [run(base, MODES[mode], folder) for _ in range(chosen.runs)]
                    after += [run(ROOT, MODES[mode], folder) for _ in range(chosen.runs)]
                    faults = [*differences(before, after), *disorder(before, after)]
                    if not faults:
                        break
                failed += bool(faults)
                stable = len(agreed(before))
                print(
                    f"{mode}: {stable} facts and {len(before[0].order)} file operations, "
                    f"{len(faults)} differences",
                    flush=True,
                )
                for fault in faults[:20]:
                    print(f"  {fault}")
    return 1 if failed else 0


@contextmanager
def source_of(commit: str, to: Path) -> Iterator[Path]:
    """Check out a commit beside this tree, and remove it afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(to), commit], check=True)
    try:
        yield to
    finally:
        subprocess.run([*git, "remove", "--force", str(to)], check=True)


def run(tree: Path, changes: dict[str, Any], folder: Path) -> Found:
    """Train one config at one tree; return what it left."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        config: dict[str, Any] = {
            "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
            "train": {"steps": 3, "seed": 3, "threads": 1, "check_capture": False},
            "device": "cpu",
            "memory": {"host": "256MiB"},
            # null chooses by the speed of the machine, and by the size of the model
            "store": {"commit": {"lag": 1, "unit": "segment"}},
            "run": {"dir": f"{name}/disk/run"},
        }
        for section, fields in changes.items():
            config[section] = {**config.get(section, {}), **fields}
        config["store"] = as_known_at(tree, config["store"])
        config["data"] |= {"micro_batch": 2, "micro_batches": 2, "shuffle": False}
        Path(name, "disk").mkdir()
        Path(name, "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, str(CHILD), str(tree), f"{name}/config.yaml", f"{name}/disk/run"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=tree, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
        return Found(**json.loads(done.stdout))


def as_known_at(tree: Path, store: dict[str, Any]) -> dict[str, Any]:
    """Return the section `store` with the keys that a tree has for its `commit`."""
    schema = "".join(file.read_text() for file in (tree / "swaptrain/config").glob("*.py"))
    if "unit: Literal" in schema:
        return store
    if "class CommitConfig" in schema:
        fields = {key: value for key, value in store["commit"].items() if key != "unit"}
        return {**store, "commit": fields}
    commit = {
        "commit_every": store["commit"].get("every", 1),
        "repeats": store["commit"].get("lag"),
    }
    return {key: value for key, value in store.items() if key != "commit"} | commit


def agreed(runs: Sequence[Found]) -> dict[str, Any]:
    """Return the facts that all runs share."""
    first, *others = runs
    return {
        name: value
        for name, value in first.facts.items()
        if all(name in other.facts and other.facts[name] == value for other in others)
    }


def differences(before: Sequence[Found], after: Sequence[Found]) -> Iterator[str]:
    """Yield the facts of all runs of the base that a run here does not share."""
    for name, value in agreed(before).items():
        for found in after:
            if found.facts.get(name) != value:
                yield f"{name}: {value!r} before, {found.facts.get(name)!r} now"
                break
    for name in sorted(agreed(after).keys() - set().union(*(f.facts for f in before))):
        yield f"{name} is new"


def disorder(before: Sequence[Found], after: Sequence[Found]) -> Iterator[str]:
    """Yield operations that are missing, new, or behind a barrier that they came before."""
    always = set.intersection(*(set(found.order) for found in before))
    ever = set.union(*(set(found.order) for found in before))
    for label in sorted(always - set.intersection(*(set(found.order) for found in after))):
        yield f"missing: {label}"
    for label in sorted(set.intersection(*(set(found.order) for found in after)) - ever):
        yield f"new: {label}"
    labels = sorted(always & set.intersection(*(set(found.order) for found in after)))
    barriers = [label for label in labels if label.startswith(BARRIERS)]
    places = [place_of(label) for label in labels]
    kept = np.array(
        [[place in ("", to) or not to for to in map(place_of, barriers)] for place in places],
        dtype=bool,
    ).reshape(len(labels), len(barriers))
    turned = np.ones_like(kept)
    for runs, table, sign in ((before, kept, 1), (after, turned, -1)):
        for found in runs:
            place = {label: index for index, label in enumerate(found.order)}
            row = np.array([place[label] for label in labels], dtype=np.int64)
            column = np.array([place[label] for label in barriers], dtype=np.int64)
            table &= sign * (column[None, :] - row[:, None]) > 0
    for row, column in zip(*np.nonzero(kept & turned), strict=True):
        yield f"before, {labels[row]} came ahead of {barriers[column]}"


def place_of(label: str) -> str:
    """Return the slot or the spilled file of an operation; empty for what is the whole store's."""
    found = re.search(r"slots/\([^)]*\)|spill/\S+", label.partition(" -> ")[0])
    return found[0] if found else ""


if __name__ == "__main__":
    raise SystemExit(main())
