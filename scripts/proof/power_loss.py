"""Cuts the power at every moment of small training runs, and opens what the disk may show.

Each mode is trained once while everything that it does to its disks is recorded. Then, for every
prefix of that recording, states are made in which the unflushed changes are there, missing, torn or
out of order; each distinct one is opened and judged, a sample is trained to its end, and another
sample's recovery is recorded and cut in its turn. So is that of a run that was killed, with what it
had not flushed still in the hands of the kernel. Prints a table, and what is wrong; exit 1 then.

    python scripts/proof/power_loss.py
    python scripts/proof/power_loss.py --modes fused,trees --width 8 --stride 3
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from swaptrain.store.disk import durable_files as files
from tests.support.recording_check import Known
from tests.support.recording_disk import Blobs, Disk
from tests.support.recording_replay import Bench, Report
from tests.support.recording_runs import End, Job, Recording
from tests.support.recording_sabotage import SABOTAGES
from tests.support.recording_states import Shelf

GPT: dict[str, Any] = {
    "model": {
        "python": "tests.support.models:gpt",
        "kwargs": {"layers": 1, "dropout": 0.1},
    },
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 2},
    "memory": {"segment": "64KiB"},
    "train": {"steps": 2},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels", "micro_batches": 2},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 2},
}
TEXT: dict[str, Any] = {
    "model": {"python": "tests.support.models:language"},
    "data": {
        "text": ["{folder}/corpus/*.txt"],
        "tokenizer": "bytes",
        "sequence_length": 16,
        "micro_batches": 2,
        "cache": "{folder}/disk3/cache",
    },
    "memory": {"segment": "64KiB"},
    "train": {"steps": 1},
}
LORA: dict[str, Any] = {
    "model": {
        "hf": {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
            "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
        },
    },
    "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    "data": {"python": "tests.support.datasets:text", "micro_batches": 2},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 2},
}  # fmt: skip
CLIPPED = {"optimizer": {"clip_norm": 0.3}}
DISKS = {"paths": ["{folder}/disk1/slots", "{folder}/disk2"]}
KEEP = {"keep": {"every": 1, "last": 2}}
PARTS = {"memory": {"segment": "200KiB"}, "store": {"chunk": "8KiB"}}
MODES: dict[str, dict[str, Any]] = {
    "fused": GPT,
    "clipped": {**GPT, **CLIPPED},
    "lag-2": {**GPT, "store": {"commit": {"lag": 2}}},
    "lora": LORA,
    "lora-step": {**LORA, "store": {"commit": {"unit": "step"}}},
    "parts": {**GPT, **PARTS},
    "parts-clipped": {**GPT, **PARTS, **CLIPPED},
    "parts-8bit": {**GPT, **PARTS, "optimizer": {"state": "8bit"}},
    "8bit-clipped": {**GPT, "optimizer": {"state": "8bit", "clip_norm": 0.3}},
    "bfloat16-state": {**GPT, "optimizer": {"state": "bfloat16"}},
    "float16": {**GPT, "model": {**GPT["model"], "dtype": "float16"}},
    "no-master": {
        **GPT,
        "model": {**GPT["model"], "dtype": "bfloat16", "master": "none"},
        "optimizer": {"state": "8bit"},
    },
    "muon": {
        **{key: value for key, value in LORA.items() if key != "lora"},
        "optimizer": {
            "name": "muon",
            "groups": [{"match": ["*norm*", "*embed*", "lm_head*"], "name": "adamw"}],
        },
    },
    "batch-norm": CNN,
    "batch-norm-clipped": {**CNN, **CLIPPED},
    "trees": {**GPT, "store": {"commit": {"every": 3}}, "train": {"steps": 4}},
    "trees-clipped": {**CNN, **CLIPPED, "store": {"commit": {"every": 3}}, "train": {"steps": 4}},
    "two-disks": {**GPT, "store": DISKS},
    "frozen": {
        "model": {"python": "tests.support.models:part_frozen"},
        "data": {"python": "tests.support.datasets:vectors", "micro_batches": 2},
        "memory": {"segment": "4KiB"},
        "train": {"steps": 1},
    },
    "text": TEXT,
    "longer": {**GPT, "store": DISKS, "train": {"steps": 2}},
    "fresh": {**GPT, "store": DISKS, "train": {"steps": 1}},
    "snapshots": {**GPT, "store": KEEP, "train": {"steps": 3}},
    "back": {**GPT, "store": KEEP, "train": {"steps": 3}},
    "trees-back": {**GPT, "store": {**KEEP, "commit": {"every": 2}}, "train": {"steps": 3}},
}
"""What is trained. Before that `longer` trains a step less, `fresh` and `back` train all steps."""


def main() -> int:
    """Run the modes that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--width", type=int, default=16, help="random combinations per moment")
    parser.add_argument("--stride", type=int, default=1, help="moments between two power failures")
    parser.add_argument("--resume", type=int, default=3, help="states resumed, for each position")
    parser.add_argument(
        "--again", type=int, default=2, help="recoveries that are cut in their turn"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sabotage", choices=SABOTAGES, help="leave something out, to be found out"
    )
    parser.add_argument(
        "--file-by-file",
        action="store_true",
        help="on disks whose syncfs reaches nothing, as behind FUSE",
    )
    parser.add_argument("--json", action="store_true", help="print a report per line, no table")
    arguments = parser.parse_args()
    if arguments.file_by_file:
        files.syncfs_reaches_disk = lambda _: False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing may stay in the RAM disk
    memory = Path("/dev/shm")
    base = str(memory) if memory.is_dir() else None
    total = Report()
    if not arguments.json:
        print(
            "| mode | operations | moments | states | distinct | resumed | recoveries cut | wrong |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for mode in arguments.modes.split(","):
        begun = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="power-loss-", dir=base))
        try:
            report = cut(mode, folder, arguments)
        finally:
            shutil.rmtree(folder)
        total.add(report)
        if arguments.json:
            print(json.dumps({"mode": mode, **vars(report)}), flush=True)
        else:
            _row(mode, report)
            print(f"{mode}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    if not arguments.json:
        _row("all", total)
        print("\n".join(total.violations))
    return 1 if total.violation_count else 0


def _row(mode: str, report: Report) -> None:
    counts = (report.operations, report.moments, report.states, report.distinct)
    cells = [*counts, report.resumed, report.recoveries, report.violation_count]
    print(f"| {mode} | " + " | ".join(f"{cell:,}" for cell in cells) + " |", flush=True)


def cut(mode: str, folder: Path, arguments: argparse.Namespace) -> Report:
    """Record one mode and cut it everywhere."""
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("It was a dark and stormy night; the rain fell. " * 4)
    (corpus / "b.txt").write_text("The power went out, and came back. " * 3)
    job = Job(folder, MODES[mode])
    blobs = Blobs()
    steps = job.config.train.steps
    Shelf(job.disks, blobs)
    begun = [job.record(steps=steps - 1)] if mode == "longer" else []
    if mode in ("fresh", "back", "trees-back"):
        begun = [job.record()]
    options: dict[str, Any] = {"fresh": True} if mode == "fresh" else {}
    if "back" in mode:
        options = {"from_step": 2}
    recording = job.record(sabotage=arguments.sabotage, **options)
    end, known = _known(job, [*begun, recording])
    Shelf(job.disks, blobs)
    disk = Disk(job.disks, blobs)
    bench = Bench(job, known, end, seed=arguments.seed)
    events = [event for part in [*begun, recording] for event in part.events]
    width, stride = arguments.width, arguments.stride
    promised = bench.promises()
    report, crashes, kills = bench.replay(
        disk,
        events,
        promised,
        width=width,
        stride=stride,
        keep=arguments.resume,
        kills=arguments.again,
    )
    if not (promised.created and promised.data and promised.line == steps):
        raise RuntimeError("the recording does not say when what was done: nothing is proven")
    report.add(bench.resume(crashes, disk))
    again = random.Random(arguments.seed).sample(crashes, min(arguments.again, len(crashes)))
    report.add(bench.again(again, disk, width=width // 2, stride=stride))
    report.add(bench.after_kills(kills, width=width // 2, stride=stride))
    return report


def _known(job: Job, recordings: list[Recording]) -> tuple[End, Known]:
    """Return what the uninterrupted run ends with, and all that it wrote on its way."""
    for recording in recordings:
        if recording.error:
            raise RuntimeError(recording.error)
    end = job.end()
    events = [event for recording in recordings for event in recording.events]
    return end, Known(events, end.lines, end.data)


if __name__ == "__main__":
    sys.exit(main())
