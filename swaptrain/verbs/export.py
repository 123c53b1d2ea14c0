"""The weights of a run's last step: a file, an adapter, or a merged model; also while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.format.origin import read_origin
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.safetensors import StreamedTensor, write_safetensors
from swaptrain.units import format_size, how_many
from swaptrain.verbs.exports.adapter import adapter_of, merged_tensors, write_adapter
from swaptrain.verbs.exports.model_directory import (
    MOST_SHARD_BYTES,
    DirectoryFacts,
    check_model_directory,
    write_model_directory,
)
from swaptrain.verbs.stored_step import StoredStep, live_store, with_step

if TYPE_CHECKING:
    from swaptrain.models.hub_names import HubNames

__all__ = ["SUFFIX", "Form", "export_weights"]

Form = Literal["all", "adapter", "merged"]
SUFFIX = ".safetensors"
"""Of the name of a file of weights; a name without it is a directory's."""


def export_weights(
    run: Path,
    to: Path,
    dtype: str | None,
    *,
    form: Form = "all",
    from_step: int | None = None,
    shard_bytes: int = MOST_SHARD_BYTES,
    state: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> int:
    """Write the weights and buffers of one step to `to`, a few chunks in memory at a time.

    The forms `all`, and `merged` of a run with adapters: to a file, by the names that the run has,
    or to a directory as the hub has it, by the names there, with config and tokenizer, in files of
    at most `shard_bytes`. `adapter`: to a directory as PEFT writes it. With `state` what the
    optimizer holds of each parameter is written too, and the step.

    Returns the step, of which `note` hears too.

    Of a run that trains: of the end of the step in progress, where the trainer waits until they are
    read. Of any other: of its last commit. With `from_step`: of the snapshot of that step, which
    lets a trainer go on. Parameters keep the dtype that they were trained in, in a directory that
    of the checkpoint the run began from, unless `dtype` says otherwise; `float32` joins the two
    halves of split masters. Tied weights are written once, under their first name. Raises
    ConfigError when `run` is not a run or has no store yet, or `to` cannot be a file; RunError when
    the run was stopped inside a step, or the disk is full; DamagedStoreError.
    """
    if state and form != "all":
        raise ConfigError(f"--state belongs to the run's own weights, and not to --{form}")
    to = to.resolve()  # a link stays one
    option = "--adapter" if form == "adapter" else "--to"
    if not to.parent.is_dir():
        raise ConfigError(f"{option} {to}: there is no directory {to.parent}")
    if to.is_dir() and to.suffix == SUFFIX:
        raise ConfigError(f"{option} {to} is a directory: name a file in it")
    is_taken = to.exists() and (not to.is_dir() or any(to.iterdir()))
    if to.suffix != SUFFIX and (os.path.ismount(to) or not os.access(to.parent, os.W_OK)):
        raise ConfigError(
            f"{option} {to}: it is written beside that and renamed, which cannot be done there: "
            "name a new directory in it, or elsewhere"
        )
    if is_taken and (form == "adapter" or to.suffix != SUFFIX):
        raise ConfigError(f"{option} {to}: it exists and is not empty: name a new directory")
    store = live_store(run)
    write = _writer(run, to, dtype, form, store.root, shard_bytes, note, state=state)
    return with_step(run, from_step, write, note)


def _writer(
    run: Path,
    to: Path,
    dtype: str | None,
    form: Form,
    root: RootRecord,
    shard_bytes: int,
    note: Callable[[str], None],
    *,
    state: bool,
) -> Callable[[StoredStep], int]:
    """Return what writes a form of one step and returns the step. Raises ConfigError.

    What is wrong about the request is found before anything is read.
    """
    adapter = None if form == "all" else adapter_of(run, root.adapter, f"--{form}")
    is_directory = form != "adapter" and to.suffix != SUFFIX
    if is_directory and form == "all" and root.adapter is not None:
        raise ConfigError(
            f"--to {to}: {run} trains adapters: give --merged --to DIR for a model with them in "
            "it, or --adapter DIR for the adapter alone"
        )
    config, names = None, None
    if form == "adapter":
        _check_base(run, note)
    if is_directory:
        config = load_config(RunPaths(run).config)
        check_model_directory(to, config)
        names = _hub_names(run, config, root)
        if form == "all":
            dtype = dtype or names.dtype
        dtype = dtype or config.model.dtype

    def write(view: StoredStep) -> int:
        def tensors(dtype: str | None) -> dict[str, StreamedTensor]:
            return {tensor.name: tensor for tensor in view.tensors(dtype)}

        if form == "adapter":
            assert adapter is not None
            count, size_bytes = (
                len(adapter.names),
                write_adapter(to, adapter, lambda: tensors(dtype or "float32")),
            )
        else:
            if adapter is not None:
                found = merged_tensors(adapter, tensors, dtype)
            else:
                found = list(tensors(dtype).values())
            of_optimizer = list(view.optimizer()) if state else []
            count = len(found) + len(of_optimizer)
            if config is None or names is None:
                named = [
                    replace(tensor, name=f"optimizer.{tensor.name}") for tensor in of_optimizer
                ]
                size_bytes = write_safetensors(to, found + named)
            else:
                assert dtype is not None
                vocabulary = None
                if config.model.resize_to_tokenizer:
                    vocabulary = names.grown_vocabulary(found)
                found = names.as_on_hub(found, dtype)
                described = DirectoryFacts(config, root.choices.model, vocabulary, names.untied)
                size_bytes = write_model_directory(to, found, described, shard_bytes, of_optimizer)
        note(
            f"wrote {to}: {how_many(count, 'tensor')}, {format_size(size_bytes)}, as they are "
            f"after step {view.step}"
        )
        return view.step

    return write


def _check_base(run: Path, note: Callable[[str], None]) -> None:
    """Say where the base of an adapter is not what it was: the adapter belongs to what it was."""
    from swaptrain.models.hub_names import is_other_base

    config = load_config(RunPaths(run).config)
    if is_other_base(config, read_origin(run)):
        note(
            f"the weights in {config.model.hf} are not those that the run began from: the adapter "
            "belongs to those"
        )


def _hub_names(run: Path, config: Config, root: RootRecord) -> HubNames:
    from swaptrain.models.hub_names import HubNames

    if root.choices.model is None:
        raise ConfigError(
            "the run does not say which class of transformers it trains: write its tensors with "
            "--to FILE.safetensors"
        )
    is_untied = root.adapter is not None and root.adapter.untied is not None
    return HubNames(config, root.choices.model, read_origin(run), is_untied=is_untied)
