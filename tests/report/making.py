"""Run directories made of their files alone, for the report to read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.runs import config_of

__all__ = ["changed_config", "full_run", "memory_file", "metrics_rows", "new_run"]
__all__ += ["start_line", "trace_events", "write_lines", "write_trace"]

BEGAN = 1_750_000_000.0
MIB = 1 << 20


def new_run(folder: Path, rows: Iterable[dict[str, Any]] = (), **sections: Any) -> Path:
    """Return a directory with a config and metrics, whose store was never made."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        **sections,
    }
    config = config_of(folder, tree)
    folder.mkdir()
    (folder / "config.yaml").write_text(config.resolved_yaml())
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write objects as lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def metrics_rows(count: int, *, spike: int = 0, offset: float = 0.0) -> list[dict[str, Any]]:
    """Return rows as a run writes them; the loss of step `spike` is far above the others."""
    rows = []
    for step in range(1, count + 1):
        loss = 2 + 3 * math.exp(-3 * step / count) + 0.1 * math.sin(step) + offset
        row: dict[str, Any] = {
            "step": step,
            "loss": 40.0 if step == spike else loss,
            "lr": 1e-3 * min(1.0, step / 10),
            "grad_norm": 1.0 + 0.5 * math.cos(step),
            "tokens": 1024,
            "step_s": 2.0 + 0.2 * math.sin(step / 7),
            "epoch": step / 100,
            "ended_at": BEGAN + 2.0 * step,
            "compute_s": 1.2,
            "update_s": 0.25,
            "io_wait_s": 0.2 + 0.1 * math.sin(step / 5),
            "data_wait_s": 0.01,
            "read_bytes": 300 * MIB + step,
            "write_bytes": 200 * MIB + step,
            "cache_hit_fraction": 0.4 + 0.05 * math.sin(step / 3),
            "peak_host_bytes": 240 * MIB,
            "peak_device_bytes": None,
            "roofline_fraction": 0.85 + 0.05 * math.sin(step / 9),
        }
        if step % max(1, count // 10) == 0:
            row |= {"eval_loss": loss + 0.2, "eval_accuracy": 0.3}
        rows.append(row)
    return rows


def start_line(time: float, first_step: int, **forecast: Any) -> dict[str, Any]:
    """Return a line of starts.jsonl."""
    expected = {
        "step_s": 1.9,
        "compute_s": 1.4,
        "read_bytes": 310 * MIB,
        "write_bytes": 205 * MIB,
        "least_traffic_bytes": 480.0 * MIB,
        "host_bytes": 256 * MIB,
        "base_bytes": 500 * MIB,
        "pool_bytes": 180 * MIB,
        "arena_bytes": 60 * MIB,
        "peak_host_bytes": 240 * MIB,
        "segments_saving": 1,
    }
    return {
        "time": time,
        "host": "workstation",
        "pid": 4711,
        "versions": {"swaptrain": "0.1.0", "torch": "2.9", "python": "3.11.9"},
        "machine": {"processor": "A Processor", "device": "cpu"},
        "device": "cpu",
        "threads": 2,
        "parameters": 1000,
        "segments": 3,
        "first_step": first_step,
        "last_step": 100,
        "forecast": {**expected, **forecast},
    }


def trace_events(steps: int, segments: int = 4, micro_batches: int = 2) -> list[dict[str, Any]]:
    """Return events as TraceFile writes them: odd segments are read, even ones found in RAM."""
    threads = ("MainThread", "swaptrain-read_0", "swaptrain-write_0", "swaptrain-commit_0")
    found: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(threads, 1)
    ]
    now = 0.0

    def add(name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        found.append(event | ({"args": args} if args else {}))

    for step in range(1, steps + 1):
        begin = now
        for way, order in (
            ("forward", range(1, segments + 1)),
            ("backward", range(segments, 0, -1)),
        ):
            for k in order:
                key = f"state/{k:03d}/weights"
                if k % 2:
                    add("ask for", 1, now, 0.0, of=key, bytes=3 * MIB)
                    add("read", 2, now, 4000.0, of="slots/x/weights/c/0", bytes=3 * MIB)
                    add("wait for a read", 1, now, 1500.0)
                    now += 1500.0
                for m in range(micro_batches):
                    add("need", 1, now, 0.0, of=key, bytes=3 * MIB)
                    name = "turn" if way == "backward" and k == segments else way
                    add(name, 1, now, 9000.0, of=f"{name}({k}, {m})")
                    now += 9500.0
                if way == "backward":
                    add("need", 1, now, 0.0, of=key, bytes=3 * MIB)
                    add("update", 1, now, 3000.0, of=f"update({k})")
                    now += 3000.0
                    add("write", 3, now, 5000.0, of="slots/x/weights/c/0", bytes=3 * MIB)
                    add("commit", 4, now, 6000.0, of=f"segment {k}")
        add(f"step {step}", 1, begin, now - begin)
        now += 100.0
    return found


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a trace as a run does: a list, one event a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")


def memory_file(count: int) -> dict[str, Any]:
    """Return a memory.json of so many instructions."""
    rows = []
    for position in range(count):
        held = {"weights": 20 * MIB, "state": 40 * MIB, "values": position * MIB // 4}
        rows.append(
            {
                "position": position,
                "operation": "FORWARD",
                "segment": 1 + position % 4,
                "micro_batch": 0,
                "held": held,
                "torch": {"allocated": 30 * MIB, "reserved": 40 * MIB},
                "resident_bytes": 500 * MIB + 90 * MIB + position * MIB // 4,
            }
        )
    return {
        "step": 3,
        "budget_bytes": 256 * MIB,
        "base_bytes": 500 * MIB,
        "instructions": rows,
    }


def full_run(folder: Path, count: int = 60) -> Path:
    """Return a run that has everything that a report shows, with an interruption."""
    rows = metrics_rows(count)
    half = count // 2
    for row in rows[half:]:
        row["ended_at"] += 4000.0
    rows[half]["resumed"] = True
    run = new_run(folder, rows, train={"steps": count, "seed": 3, "threads": 1})
    starts = [
        start_line(BEGAN - 5, 1),
        start_line(rows[half]["ended_at"] - 3, half + 1, step_s=2.5),
    ]
    write_lines(run / "starts.jsonl", starts)
    write_trace(run / "trace.json", trace_events(3))
    (run / "memory.json").write_text(json.dumps(memory_file(40)))
    samples = [
        {"step": step, "samples": [{"prompt": "Once", "text": f"upon a time {step}"}]}
        for step in (half, count)
    ]
    write_lines(run / "samples.jsonl", samples)
    return run


def changed_config(run: Path, **sections: Any) -> None:
    """Set keys of the recorded config."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for section, fields in sections.items():
        tree[section] = {**tree[section], **fields}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
