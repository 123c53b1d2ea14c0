"""Kill a run with SIGKILL at random moments, go on each time, and compare with one that was not.

    python scripts/proof/chaos.py --kills 50
    python scripts/proof/chaos.py --kills 500 --mode all --seed 1
    python scripts/proof/chaos.py --kills 20 --mode trees --keep

Each mode trains a small model to its end, again and again, until it was killed so many times; every
end is compared with that of an uninterrupted run: all chunks of the store bit for bit, and step,
loss, lr, grad_norm, tokens and eval_loss of every line of metrics.jsonl. With held-out data `eval`
is killed after each end as well, and has to give its loss all the same. The flushes are real. Most
processes are forked from one that has captured the model, with a pool of a random size; some are
new ones, with the import and the capture of their own. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chaos_runs import POSITIONS, ROOT, Result, Tormented
from rich import box
from rich.console import Console
from rich.table import Table

_GPT: dict[str, Any] = {
    # Tied weights, dropout, values that all later segments read.
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3, "dropout": 0.1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"host": "256MiB", "segment": "32KiB"},
}
_CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"host": "256MiB", "segment": "4KiB"},
}
_LORA: dict[str, Any] = {
    "model": {
        "hf": {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
            "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
        },
        "dtype": "bfloat16",
    },
    "lora": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "data": {"python": "tests.support.datasets:text"},
    "memory": {"host": "256MiB", "segment": "16KiB"},
}  # fmt: skip
_TEXT = {key: value for key, value in _LORA.items() if key != "lora"}
_PARTS: dict[str, Any] = {
    "memory": {"host": "256MiB", "segment": "200KiB"},
    "store": {"chunk": "8KiB"},
}
_CLIPPED = {"optimizer": {"clip_norm": 0.3}}
_WATCHED: dict[str, Any] = {
    "eval": {"python": "tests.support.datasets:tokens", "every": 1, "batches": "all"}
}
MODES: dict[str, dict[str, Any]] = {
    "fused": _GPT,
    "clipped": {**_GPT, **_CLIPPED},
    "trees": {**_GPT, "store": {"commit": {"every": 3}}},
    "batch-norm": _CNN,
    "batch-norm-clipped": {**_CNN, **_CLIPPED},
    "parts": {**_GPT, **_PARTS},
    "parts-8bit": {**_GPT, **_PARTS, "optimizer": {"state": "8bit"}},
    "8bit-clipped": {**_GPT, "optimizer": {"state": "8bit", "clip_norm": 0.3}},
    "bfloat16-state": {**_GPT, "optimizer": {"state": "bfloat16"}},
    "float16": {**_GPT, "model": {**_GPT["model"], "dtype": "float16"}},
    "no-master": {
        **_GPT,
        "model": {**_GPT["model"], "dtype": "bfloat16", "master": "none"},
        "optimizer": {"state": "8bit"},
    },
    "groups": {**_CNN, "optimizer": {"groups": [{"match": ["*bias"], "name": "sgd"}]}},
    "muon": {
        **_TEXT,
        "optimizer": {
            "name": "muon",
            "groups": [{"match": ["*norm*", "*embed*", "lm_head*"], "name": "adamw"}],
        },
    },
    "skip-ignored": {
        **_TEXT,
        "data": {"python": "tests.support.datasets:answers"},
        "train": {"skip_ignored": True},
    },
    "lag-2": {**_GPT, "store": {"commit": {"lag": 2, "unit": "segment"}}},
    "lora": _LORA,
    "lora-step": {**_LORA, "store": {"commit": {"unit": "step"}}},
    "lora-nf4": {**_LORA, "model": {**_LORA["model"], "base": "nf4"}},
    "eval": {**_GPT, **_WATCHED},
    "eval-clipped": {**_GPT, **_CLIPPED, **_WATCHED},
    "paths": {**_GPT, "store": {"paths": ["disk0", "disk1"]}},
}


def config_of(mode: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the config of a mode's small run; its disks are directories of `folder`."""
    tree: dict[str, Any] = {
        "data": {"micro_batch": 2, "micro_batches": 3, "shuffle": True},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        "train": {"steps": steps, "seed": 3, "threads": 1},
        "device": "cpu",
        "store": {"commit": {"lag": 1, "unit": "segment"}},
    }
    for section, fields in MODES[mode].items():
        tree[section] = {**tree.get(section, {}), **fields}
    if "paths" in tree.get("store", {}):
        tree["store"]["paths"] = [str(folder / name) for name in tree["store"]["paths"]]
    return tree


def tables(results: list[Result]) -> list[Table]:
    """Return the results; work is in units of all micro-batches of one segment."""
    names = ["kills", "new", "ends", "forward", "most", "backward", "most", "wrong"]
    again = _table("kills, and what was done again after each (mean, most)", names)
    where = _table("where the kills met the runs", list(POSITIONS))
    rows = [*results, Result.total(results)] if len(results) > 1 else results
    for result in rows:
        work = [n for kind in ("forward", "backward") for n in result.again_of(kind)]
        again.add_row(
            result.mode,
            str(result.kills),
            str(result.new_processes),
            str(result.runs),
            *(f"{number:.2f}" for number in work),
            str(len(result.mismatches)),
        )
        where.add_row(result.mode, *(str(result.positions[position]) for position in POSITIONS))
    return [again, where]


def _table(title: str, names: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the modes that are asked for; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="in all modes together")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="modes at the same time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="on a real disk")
    parser.add_argument("--keep", action="store_true", help="leave the runs there")
    options = parser.parse_args(arguments)
    console = Console()
    modes = list(MODES) if options.mode == "all" else [options.mode]
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.folder))
    shares = [
        options.kills // len(modes) + (number < options.kills % len(modes))
        for number in range(len(modes))
    ]

    def torment(name: str, kills: int) -> Result:
        tree = config_of(name, folder / name, options.steps)
        mode = Tormented(name, tree, folder / name, options.seed)
        try:
            result = mode.torment(kills)
        finally:
            mode.close()
        console.print(f"{name}: {result.kills} kills in {result.seconds:.0f} s")
        return result

    with console.status("killing"), ThreadPoolExecutor(options.jobs) as threads:
        results = list(threads.map(torment, modes, shares))
    for shown in tables(results):
        console.print(shown)
    failed = [(result.mode, text) for result in results for text in result.mismatches]
    for name, text in failed:
        console.print(f"{name}: {text}")
    if options.keep or failed:
        console.print(f"the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
