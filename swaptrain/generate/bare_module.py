"""The module of a run without memory for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from swaptrain.capture.init.construct import Addition, construct
from swaptrain.capture.precision import lower_parameters
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.adapters.lora import checked_fields
from swaptrain.models.build import additions, model_factory
from swaptrain.models.classes import Job
from swaptrain.models.transformers_model import hugging_face_factory
from swaptrain.store.disk.durable_files import existing_parent
from swaptrain.store.format.root import RootRecord

__all__ = ["bare_module"]


def bare_module(config: Config, root: RootRecord, buffers: Mapping[str, NDArray[Any]]) -> nn.Module:
    """Return the module in evaluation mode, its parameters fake, in the dtypes of the computation.

    `buffers` are those that the run has recorded. Raises ConfigError.
    """
    if config.model.python is not None:
        factory = model_factory(config, asks=False)
    else:
        factory = hugging_face_factory(config, Job("causal"), chosen=_class_of(root))
    adapter = None
    if root.adapter is not None:
        adapter = checked_fields(root.adapter.fields, f"the record of {config.run.dir}")
    added = additions(factory, adapter)
    construction = construct(
        factory.make,
        seed=config.train.seed,
        scratch_dir=existing_parent(config.run.dir),
        draw=False,
        addition=Addition(added, draw=False) if added else None,
    )
    module = construction.module
    construction.forget()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(torch.tensor(buffers[name]))
    if config.model.dtype != "float32":
        dtype = getattr(torch, config.model.dtype)
        lower_parameters(module, construction.fake_mode, dtype)
    return module.eval()


def _class_of(root: RootRecord) -> Any:
    import transformers

    cls = getattr(transformers, root.choices.model or "", None)
    if cls is None:
        raise ConfigError("the run does not say which class of transformers it trains")
    return cls
