"""Trains one config in a source tree and prints what it left: `same_bits_child.py TREE CONFIG RUN`.

Only the command line of the tree is used, so that any two commits can be compared. Started by
same_bits.py; the recorder of file operations is that of the tree which the script belongs to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import xxhash

RECORDER = Path(__file__).resolve().parents[2] / "tests" / "support" / "recording.py"
METRICS = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "write_bytes", "skipped")
METRICS += ("loss_scale",)
"""The columns of metrics.jsonl that no clock decides."""
SLOT = re.compile(r"slots/([0-9a-f]{8}-\d+)")


def main() -> None:
    """Train, then plan, and print the facts as JSON."""
    tree, config, run_dir = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    sys.path.insert(0, tree)
    from swaptrain.cli import main as swaptrain

    recorder = load_recorder()([run_dir.parent])
    recorder.install()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = swaptrain(["--config", config])
        events = list(recorder.events)
        plan_code = swaptrain(["plan", "--config", config])
    least = re.search(r"least\s+that\s+works:\s+(\S+)", said.getvalue())
    facts: dict[str, Any] = {
        "exit codes": [code, plan_code],
        "least budget": least[1] if least else None,
        **metrics(run_dir),
        **contents(run_dir),
    }
    json.dump({"facts": facts, "order": order(events, run_dir)}, sys.stdout)


def load_recorder() -> Any:
    """Return the class that records file operations."""
    spec = importlib.util.spec_from_file_location("swaptrain_recording", RECORDER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Recorder


def metrics(run_dir: Path) -> dict[str, Any]:
    """Return the numbers of every step."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found |= {f"step {row['step']}: {key}": row[key] for key in METRICS if key in row}
    return found


def contents(run_dir: Path) -> dict[str, str]:
    """Return a digest of every file that the live store leads to, through its links."""
    found = {}
    folders = [run_dir / "store"]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir():
                folders.append(path)
            else:
                name = str(path.relative_to(run_dir))
                found[name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return found


def order(events: list[Any], run_dir: Path) -> list[str]:
    """Return every file operation in order, under names that no other run has otherwise.

    A slot is called after the link that made it live, and the how-manieth of that link it was.
    """
    root = str(run_dir.parent.resolve()) + "/"
    slots = published(events)
    seen: Counter[str] = Counter()
    labels = []
    for event in events:
        if event.kind == "begin":
            continue
        what = f"{event.other} ended" if event.kind == "end" else event.kind
        label = f"{what} {event.path.removeprefix(root)}"
        if event.kind in ("rename", "link", "symlink"):
            label += f" -> {event.other.removeprefix(root)}"
        if event.kind == "write":
            # A line of metrics is as long as the digits of its times.
            timed = event.path.endswith(".jsonl")
            label += "" if timed else f" at {event.offset}, {len(event.data)} bytes"
        label = SLOT.sub(lambda found: f"slots/{slots.get(found[1], 'unpublished')}", label)
        label = re.sub(r"[0-9a-f]{8,}", "*", label)
        seen[label] += 1
        labels.append(f"{label} #{seen[label]}")
    return labels


def published(events: list[Any]) -> dict[str, str]:
    """Return a name for each slot that a link led to: which link, and its how-manieth target."""
    targets: dict[str, str] = {}
    count: Counter[str] = Counter()
    found: dict[str, str] = {}
    for event in events:
        if event.kind == "symlink":
            targets[event.path] = event.other
        if event.kind == "rename" and event.path in targets:
            slot = SLOT.search(targets[event.path])
            link = Path(event.other).name
            if slot is not None and slot[1] not in found:
                count[link] += 1
                found[slot[1]] = f"({link}, {count[link]})"
    return found


if __name__ == "__main__":
    main()
