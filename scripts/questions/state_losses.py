"""Losses with the optimizer's state in float32, bfloat16 and 8 bits, and without masters.

    python scripts/questions/state_losses.py --steps 500
    python scripts/questions/state_losses.py --ways float32 8bit "torchao 8bit"

A byte-level Llama of 20 million parameters on the sources of the standard library, bfloat16. Beside
swaptrain's own runs: torchao's AdamW8bit on the same float32 masters, in plain PyTorch, and its
rounding of bfloat16 weights by chance (`pip install torchao`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch.amp import GradScaler

from swaptrain.compute.learning_rate import learning_rate
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.data import open_data, open_eval
from swaptrain.models.build import model_factory
from swaptrain.reference import Masters, evaluate, forward_backward
from swaptrain.verbs.train import train

WORK = Path(__file__).resolve().parents[2] / "runs"
"""On the disk."""
WAYS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"state": "bfloat16"},
    "8bit": {"state": "8bit"},
    "8bit, no master": {"state": "8bit", "master": "none"},
    "torchao 8bit": {},
    "torchao 8bit, no master": {"master": "none"},
}
MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 64,
    "initializer_range": 0.03,
}  # fmt: skip


def config_of(way: str, folder: Path, steps: int, *, seed: int, threads: int) -> Config:
    """Return the config of a way."""
    said = WAYS[way]
    tree = {
        "model": {"hf": MODEL, "dtype": "bfloat16", "master": said.get("master", "float32")},
        "data": {"text": ["{stdlib}/*.py"], "sequence_length": 64, "micro_batch": 8},
        "eval": {"text": ["{stdlib}/email/*.py"], "every": steps, "batches": 64},
        "optimizer": {
            "name": "adamw", "lr": 2e-3, "betas": [0.9, 0.98], "weight_decay": 0.1,
            "state": said.get("state", "float32"),
            "schedule": {"name": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
        },
        "train": {
            "steps": steps, "seed": seed, "threads": threads, "check_capture": False,
        },
        "memory": {"host": "1GiB"},
        "run": {"dir": str(folder / "run")},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path)


def by_swaptrain(config: Config) -> Iterator[float]:
    """Train; yield the losses of the steps and the held-out loss."""
    train(config)
    rows = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").open()]
    yield from (row["loss"] for row in rows)
    yield rows[-1]["eval_loss"]


def by_torchao(config: Config) -> Iterator[float]:
    """Train in plain PyTorch with torchao's optimizer; yield the same."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(config.train.threads or 1)
    factory = model_factory(config)
    data = open_data(
        config.data, seed=config.train.seed, run_dir=config.run.dir, model_vocabulary=257
    )
    assert config.eval is not None
    held = open_eval(config.eval, config.data, run_dir=config.run.dir, model_vocabulary=257)
    torch.manual_seed(config.train.seed)
    model = factory.make().train()
    optimizer, own = config.resolved().optimizer, config.model.master == "none"
    given: dict[str, Any] = {"lr": optimizer.lr, "betas": (0.9, 0.98)}
    masters = Masters(model.bfloat16() if own else model, torch.bfloat16, exact=not own)
    tensors = [*model.parameters()] if own else [*masters.trainable.values()]
    groups = [
        {"params": [p for p in tensors if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in tensors if p.ndim < 2], "weight_decay": 0.0},
    ]
    stepper = AdamW8bit(groups, bf16_stochastic_round=own, **given)
    scaler = GradScaler("cpu", enabled=False)
    for step in range(1, (config.train.steps or 0) + 1):
        if own:
            loss = model(**data.batch(step, 0)).loss
            loss.backward()
            yield float(loss.detach())
        else:
            yield forward_backward(
                model, masters, lambda m, s=step: data.batch(s, m), 1, None, scaler
            )
        for group in stepper.param_groups:
            lr = learning_rate(step, lr=optimizer.lr, schedule=optimizer.schedule)
            group["lr"].fill_(lr)  # torchao keeps it in a tensor
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        if not own:
            masters.to_model()
    yield evaluate(model, [held.batch(1, m) for m in range(held.micro_batches)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and chance")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    options = parser.parse_args()
    ends = [options.steps * part // 5 for part in range(1, 6)]
    columns = [f"steps to {end}" for end in ends]
    table = Table("", *columns, "held out", "minutes", title="mean loss")
    for way in options.ways:
        WORK.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            begun = time.monotonic()
            config = config_of(
                way, Path(folder), options.steps, seed=options.seed, threads=options.threads
            )
            found = [*(by_torchao if way.startswith("torchao") else by_swaptrain)(config)]
        means = [statistics.mean(found[:-1][end - options.steps // 5 : end]) for end in ends]
        minutes = (time.monotonic() - begun) / 60
        table.add_row(way, *(f"{mean:.4f}" for mean in (*means, found[-1])), f"{minutes:.1f}")
        print(way, [round(mean, 4) for mean in (*means, found[-1])], flush=True)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
