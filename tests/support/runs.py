"""Runs swaptrain in this process and plain PyTorch beside it, and compares bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.reference import ReferenceResult
from swaptrain.verbs.comparison.plain_run import adapted, plain_run, quantized
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.train import train

__all__ = [
    "adapted",
    "assert_same_bits",
    "assert_same_state",
    "config_of",
    "losses",
    "norms",
    "quantized",
    "reference",
    "rows",
    "trained",
    "weights",
]


def config_of(run_dir: Path, tree: dict[str, Any]) -> Config:
    """Return the config of a small run; `tree` overrides sections of the defaults."""
    base: dict[str, Any] = {
        "data": {"micro_batch": 2, "micro_batches": 3, "shuffle": False},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        # null would choose by the speed of the machine, and rehearse steps for that
        "train": {"steps": 5, "seed": 3, "threads": 1, "recompute": True},
        "device": "cpu",
        "memory": {"host": "256MiB"},
        "store": {"commit": {"lag": 1}},  # null would choose by the speed of the machine
        "run": {"dir": str(run_dir)},
    }
    for section, fields in tree.items():
        base[section] = {**base.get(section, {}), **fields} if isinstance(fields, dict) else fields
    commit = base["store"].get("commit", {})
    if commit.get("every", 1) == 1:  # null would choose by the model's size
        base["store"] = {**base["store"], "commit": {"unit": "segment", **commit}}
    path = run_dir.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(base))
    return load_config(path)


def trained(config: Config, **options: Any) -> Path:
    """Train and return the run directory."""
    train(config, **options)
    return config.run.dir


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """Return the losses of all steps."""
    return [row["loss"] for row in rows(run_dir)]


def step_write_bytes(run_dir: Path) -> float:
    """Return what a step wrote, by the mean of all rows.

    One row alone has another amount: what is on its way to the disk when a step ends is counted
    in the row of the next step.
    """
    written = [row["write_bytes"] for row in rows(run_dir)]
    mean: float = sum(written) / len(written)
    assert all(0.5 * mean < number < 1.5 * mean for number in written), written
    return mean


def norms(run_dir: Path) -> list[float]:
    """Return the norms of the gradients of all steps."""
    return [row["grad_norm"] for row in rows(run_dir)]


def weights(run_dir: Path, *, state: bool = False) -> dict[str, Tensor]:
    """Return the masters of the last commit, by name; with `state` what `export --state` adds."""
    from safetensors.torch import load_file

    to = run_dir / "weights.safetensors"
    export_weights(run_dir, to, "float32", state=state)
    tensors = load_file(to)
    to.unlink()
    return tensors


def reference(config: Config, *, ranks: int | Callable[[int], int] = 1) -> ReferenceResult:
    """Train the same model on the same batches in plain PyTorch, as so many ranks add them.

    `ranks` may be a function of the step.
    """
    directory = config.run.dir.with_name(config.run.dir.name + "-reference")
    return plain_run(config, directory, ranks=ranks)


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Assert that two sets of tensors have the same names and the same bits."""
    different = [
        name for name in left if name in right and not torch.equal(left[name], right[name])
    ]
    assert not different, f"{len(different)} of {len(left)} tensors differ: {different[:5]}"
    assert set(left) == set(right)


def assert_same_state(
    stored: dict[str, Tensor], plain: ReferenceResult, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Assert that a run's weights and the buffers of its state dict have plain PyTorch's bits.

    What is frozen is stored in the `dtype` that is computed with.
    """
    buffers = {name: value for name, value in plain.buffers.items() if name in stored}
    rounded = {name: plain.parameters[name].to(dtype).float() for name in plain.rounded}
    assert_same_bits(stored, plain.parameters | rounded | buffers)
