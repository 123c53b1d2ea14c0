"""Runs swaptrain in this process and plain PyTorch beside it, and compares bits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.data import open_data, open_eval
from swaptrain.data.batches import Batches
from swaptrain.models.build import model_factory
from swaptrain.models.freeze import freeze
from swaptrain.models.quantized_base import quantizable, round_weights
from swaptrain.reference import ReferenceResult, train_reference
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
        "train": {"steps": 5, "seed": 3, "threads": 1},
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


def norms(run_dir: Path) -> list[float]:
    """Return the norms of the gradients of all steps."""
    return [row["grad_norm"] for row in rows(run_dir)]


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return the masters of the last commit, by name."""
    from safetensors.torch import load_file

    to = run_dir / "weights.safetensors"
    export_weights(run_dir, to, "float32")
    tensors = load_file(to)
    to.unlink()
    return tensors


def reference(config: Config) -> ReferenceResult:
    """Train the same model on the same batches in plain PyTorch."""
    torch.set_num_threads(config.train.threads or 1)
    factory = model_factory(config)
    data: Batches = open_data(
        config.data,
        seed=config.train.seed,
        run_dir=config.run.dir.with_name(config.run.dir.name + "-reference"),
        model_vocabulary=factory.vocabulary,
    )
    optimizer = config.resolved().optimizer
    held_out: list[dict[str, Tensor]] = []
    if config.eval is not None:
        held_out_dir = config.run.dir.with_name(config.run.dir.name + "-reference")
        held_out_data = open_eval(
            config.eval, config.data, run_dir=held_out_dir, model_vocabulary=factory.vocabulary
        )
        held_out = [held_out_data.batch(1, m) for m in range(held_out_data.micro_batches)]
    make = factory.make
    if config.model.base is not None:
        make = partial(quantized, make, config)
    if config.lora is not None:
        make = partial(adapted, make, config.lora.fields(), config.train.seed)
    return train_reference(
        make,
        data.batch,
        steps=config.train.steps,
        micro_batches=config.data.micro_batches,
        seed=config.train.seed,
        dtype=getattr(torch, config.model.dtype),
        optimizer=optimizer.name,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        arguments=optimizer.arguments,
        schedule=optimizer.schedule,
        clip_norm=optimizer.clip_norm,
        loss_weighting=config.train.loss_weighting,
        held_out=held_out,
        every=config.eval.every if config.eval is not None else 1,
        freeze=config.train.freeze or (),
        state=optimizer.state,
        master=config.model.master,
        groups=[{**group.model_dump(), **group.arguments} for group in optimizer.groups or ()],
    )


def adapted(make: Callable[[], nn.Module], fields: dict[str, Any], seed: int) -> nn.Module:
    """Return a base with adapters as a user of PEFT makes them."""
    import peft

    module = make()
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):
        found: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(**fields), module)
    return found


def quantized(make: Callable[[], nn.Module], config: Config) -> nn.Module:
    """Return a base whose frozen weights are what is left of them behind their codes."""
    module, form = make(), config.model.base
    assert form is not None
    names = quantizable(module, config.model.base_except or ())
    if config.lora is None:
        frozen = deepcopy(module)
        freeze(frozen, config.train.freeze or ())
        names -= {name for name, p in frozen.named_parameters() if p.requires_grad}
    round_weights(module, names, form, getattr(torch, config.model.dtype))
    return module


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
