"""A config's job in plain PyTorch: model, data and optimizer as a user of torch makes them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.data import open_data, open_eval
from swaptrain.errors import ConfigError
from swaptrain.models.build import additions, model_factory
from swaptrain.models.freeze import freeze
from swaptrain.models.quantized_base import quantizable, round_weights
from swaptrain.planning.check_capture.eager import NotComparable, plain_model
from swaptrain.planning.prepare import Prepared
from swaptrain.reference import ReferenceResult, train_reference

__all__ = ["adapted", "begins_from_files", "loaded_model", "plain_run", "quantized"]


def plain_run(
    config: Config,
    data_dir: Path,
    *,
    make: Callable[[], nn.Module] | None = None,
    vocabulary: int | None = None,
    watch: Callable[[int, int], None] = lambda *_: None,
    ranks: int | Callable[[int], int] = 1,
) -> ReferenceResult:
    """Train the model of a config on its batches in plain PyTorch.

    `data_dir` takes the tokens. `make` constructs the model with adapters and coded weights; None:
    the constructor of the config does, PEFT adds adapters, and no checkpoint is read. `vocabulary`
    is its size, where `make` is given. `watch` is called with step and micro-batch before each. The
    sums are those of so many `ranks`, which may be a function of the step.
    """
    torch.set_num_threads(config.train.threads or len(os.sched_getaffinity(0)))
    if make is None:
        factory = model_factory(config)
        make, vocabulary = _constructed(config, factory.make), factory.vocabulary
    data = open_data(
        config.data, seed=config.train.seed, run_dir=data_dir, model_vocabulary=vocabulary
    )

    def batch(step: int, micro_batch: int) -> Mapping[str, Tensor]:
        watch(step, micro_batch)
        return data.batch(step, micro_batch)

    optimizer = config.resolved().optimizer
    return train_reference(
        make,
        batch,
        steps=config.train.last_step,
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
        held_out=_held_out(config, data_dir, vocabulary),
        every=config.eval.every if config.eval is not None else 1,
        freeze=config.train.freeze or (),
        state=optimizer.state,
        master=config.model.master,
        ranks=ranks,
        groups=[{**group.model_dump(), **group.arguments} for group in optimizer.groups or ()],
    )


def begins_from_files(config: Config) -> bool:
    """Whether files may hold weights that a run begins from: a checkpoint, an adapter."""
    names_adapter = config.lora is not None and config.lora.source is not None
    return isinstance(config.model.hf, str) or config.model.weights is not None or names_adapter


def loaded_model(config: Config, prepared: Prepared) -> Callable[[], nn.Module] | None:
    """Return what constructs a model that begins from files, with the values that the run reads.

    None where it begins from its constructor alone. Raises ConfigError where plain PyTorch cannot
    have the model.
    """
    factory, built = prepared.factory, prepared.built
    if built.initial.origin is None and factory.grow is None:
        return None

    def make() -> nn.Module:
        try:
            module = plain_model(
                factory.make,
                config.train.seed,
                built.initial,
                built.thawed,
                (),
                additions(factory, prepared.adapter),
            )
        except NotComparable as error:
            raise ConfigError(f"this job cannot be compared: {error}") from error
        if config.model.base is not None:
            parameters = prepared.plan.captured.model.parameters
            coded = [name for name, p in parameters.items() if p.quantized is not None]
            dtype = getattr(torch, config.model.dtype)
            round_weights(module, coded, config.model.base, dtype)
        return module

    return make


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
    names = quantizable(module, config.model.base_except or (), form=form)
    if config.lora is None:
        frozen = deepcopy(module)
        freeze(frozen, config.train.freeze or ())
        names -= {name for name, p in frozen.named_parameters() if p.requires_grad}
    round_weights(module, names, form, getattr(torch, config.model.dtype))
    return module


def _constructed(config: Config, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if config.model.base is not None:
        make = partial(quantized, make, config)
    if config.lora is not None:
        make = partial(adapted, make, config.lora.fields(), config.train.seed)
    return make


def _held_out(config: Config, data_dir: Path, vocabulary: int | None) -> list[Mapping[str, Tensor]]:
    if config.eval is None:
        return []
    held_out = open_eval(config.eval, config.data, run_dir=data_dir, model_vocabulary=vocabulary)
    return [held_out.batch(1, m) for m in range(held_out.micro_batches)]
