"""From a config to a captured model: the constructor, one micro-batch, the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from swaptrain.capture.capture import capture
from swaptrain.capture.evaluation.graph import UncutEvaluation, capture_evaluation
from swaptrain.capture.fingerprint import content_digest
from swaptrain.capture.forward.channels_last import use_channels_last
from swaptrain.capture.forward.constants import bind_constants
from swaptrain.capture.forward.loss import NoLossError
from swaptrain.capture.init.construct import Addition, Construction, construct
from swaptrain.capture.inputs.casts import batch_dtypes, cast_batch, describe_casts
from swaptrain.capture.precision import lower_parameters
from swaptrain.capture.uncut import Uncut
from swaptrain.config.model import ModelConfig
from swaptrain.config.schema import Config
from swaptrain.data import HeldOut
from swaptrain.models.adapters.files import AdapterFiles
from swaptrain.models.adapters.lora import (
    adapter_config,
    check_saved,
    inject,
    saved_names,
    task_type,
)
from swaptrain.models.adapters.merge import merge_records, plain_names, untied_names
from swaptrain.models.factory import Factory, python_factory
from swaptrain.models.freeze import freeze
from swaptrain.models.initial_weights import InitialWeights
from swaptrain.models.quantized_base import QuantizedBase
from swaptrain.models.stored.checkpoint import Checkpoint
from swaptrain.models.stored.pretrained import Pretrained
from swaptrain.models.thaw import thaw, thawed_by_loading
from swaptrain.models.trained import Trained, trained_parameters
from swaptrain.models.transformers_model import hugging_face_factory, job_of
from swaptrain.store.disk.durable_files import existing_parent
from swaptrain.store.format.root import AdapterRecord

__all__ = ["BuiltModel", "additions", "build", "model_factory"]

_LEARNED = (".original_module.", ".base_layer.")
"""Parts of names of what PEFT leaves beside a module that it trains in full, and below adapters."""


@dataclass(frozen=True)
class BuiltModel:
    """A captured model with what its initial weights are made from."""

    uncut: Uncut
    initial: InitialWeights
    content: str
    """Of the graph and its constants: what of a capture no random number may have changed."""
    trained: Trained
    """How much of the model is trained, and what is not."""
    description: str = ""
    """Class of transformers, or the function that made the model."""
    evaluations: tuple[UncutEvaluation, ...] = ()
    """The model in evaluation mode, for each size of held-out batches."""
    adapter: AdapterRecord | None = None
    """What is known of the adapters of a run that begins."""
    thawed: tuple[str, ...] = ()
    """Parameters that the constructor froze, and that are trained as `from_pretrained` has it."""


def model_factory(
    config: Config,
    example: Mapping[str, torch.Tensor] | None = None,
    *,
    asks: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> Factory:
    """Return the constructor that the config names; nothing is built yet.

    `example` is a micro-batch, where it is known; `asks` whether a class is asked what it sees.
    Raises ConfigError when the directory, the architecture or the function does not exist.
    """
    if config.model.python is not None:
        found = python_factory(config.model)
    else:
        job = replace(job_of(config, example), asks=asks, note=note)
        found = hugging_face_factory(config, job)
    constants, by_channels = dict(config.model.constants), config.train.channels_last

    def make() -> nn.Module:
        module = use_channels_last(found.make()) if by_channels else found.make()
        return bind_constants(module, constants)

    return replace(found, make=make)


def build(
    config: Config,
    factory: Factory,
    batch: Mapping[str, torch.Tensor],
    *,
    draw: bool = True,
    held_out: HeldOut | None = None,
    buffers: Mapping[str, NDArray[Any]] | None = None,
    thawed: Collection[str] = (),
    adapter: Mapping[str, Any] | None = None,
    is_whole: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> BuiltModel:
    """Construct the model with fake parameters and capture it on a micro-batch like `batch`.

    With `held_out` in evaluation mode too, for the batches of such data.

    Without `draw` no random numbers are drawn, which takes half a minute for billions of weights:
    for those who need none of their values. Nor are they where a checkpoint has all of them.
    `buffers` are those that never change of a run that goes on: it needs the checkpoint that it
    began from no more; `thawed` are its `BuiltModel.thawed`. `note` hears what of a checkpoint is
    not used or missing. `adapter` are the fields of PEFT's LoraConfig, if there are adapters. Where
    the model is not `is_whole`, patterns of `train.freeze` may match nothing.

    The constructor runs in float32 (torch's default dtype), so that the masters are the plain
    constructor's weights; then floating parameters take the dtype of the computation.
    """
    checkpoint = factory.checkpoint() if buffers is None else None
    source = None
    if config.lora is not None and buffers is None and is_whole:
        source = config.lora.source
    base = QuantizedBase(config.model, is_whole=is_whole)
    initial = _initial_weights(config, factory, checkpoint, adapter, source, note, base, draw=draw)
    if buffers is None:
        base.check_seen(adapter, None if checkpoint is None else initial.missing)
    module, construction = initial.module, initial.construction
    if checkpoint is not None and adapter is None and factory.own_names is None:
        thawed = thawed_by_loading(module, initial.missing)
    _load_buffers(module, buffers or {})
    thaw(module, thawed)
    record = None
    if adapter is not None and buffers is None:
        record = _adapter_record(module, adapter, config, factory.description)
        if config.lora is not None and config.lora.source is None and is_whole:
            check_saved(module, config.lora.modules_to_save or ())
        for remark in _stuck(module, initial, construction.base_names):
            note(remark)
    by_constructor = {name for name, p in module.named_parameters() if not p.requires_grad}
    freeze(module, config.train.freeze or (), all_match=is_whole)
    if config.model.dtype != "float32":
        dtype = getattr(torch, config.model.dtype)
        lower_parameters(module, construction.fake_mode, dtype)
    masters = {n: _master(p, config.model) for n, p in module.named_parameters()}
    dtype = getattr(torch, config.model.dtype)
    try:
        dtypes = batch_dtypes(module, batch, dtype, construction.fake_mode)
        if said := describe_casts(batch, dtypes, dtype):
            note(said)
        uncut = capture(module, construction.fake_mode, cast_batch(batch, dtypes), masters)
        parameters = base.quantized(module, uncut.parameters, construction.base_names)
        uncut = replace(uncut, parameters=parameters)
    except NoLossError as error:
        raise NoLossError(f"{error}. {factory.classes()}".removesuffix(". ")) from error
    evaluations = []
    for size, count in held_out.sizes(config.data.micro_batch) if held_out is not None else ():
        assert held_out is not None
        some = cast_batch({key: t[:size] for key, t in held_out.example.items()}, dtypes)
        evaluations.append(
            capture_evaluation(module, construction.fake_mode, some, uncut, batches=count)
        )
    made_by = "the constructor" if config.model.python is None else config.model.python
    made_by = "lora" if adapter is not None else made_by
    trained = trained_parameters(module, uncut.parameters, made_by, by_constructor)
    return BuiltModel(
        uncut=uncut,
        initial=initial,
        content=content_digest(uncut),
        trained=trained,
        description=factory.description,
        evaluations=tuple(evaluations),
        adapter=record,
        thawed=tuple(thawed),
    )


def _stuck(module: nn.Module, initial: InitialWeights, bases: Mapping[str, str]) -> Iterator[str]:
    """Say which modules no checkpoint has and no adapter learns: they stay as they are drawn."""
    modules = [path for path, _ in module.named_modules()]
    drawn = [
        str(bases.get(name)).rpartition(".")[0]
        for name, parameter in module.named_parameters()
        if bases.get(name) in initial.missing
        and not parameter.requires_grad
        and not any(part in name for part in _LEARNED)
    ]
    for path in filter(None, dict.fromkeys(drawn)):
        parts = path.split(".")
        ends = [".".join(parts[n:]) for n in reversed(range(len(parts)))]
        # PEFT goes by the ends of names: the shortest one that is this module's alone.
        end = next((e for e in ends if sum(m.endswith(e) for m in modules) == 1), path)
        yield (
            f"{path} is not in the checkpoint, and lora leaves it as the constructor draws it: to "
            f"train it, name it, lora.modules_to_save: [{end}]"
        )


def _adapter_record(
    module: nn.Module, adapter: Mapping[str, Any], config: Config, description: str
) -> AdapterRecord:
    assert config.lora is not None
    base = _directory(config)
    return AdapterRecord(
        fields=dict(adapter),
        config=adapter_config(module, base, task_type(config.lora, description)),
        names=saved_names(module, base),
        plain=plain_names(module),
        untied=untied_names(module),
        merges=tuple(merge_records(module)),
    )


def _directory(config: Config) -> str | None:
    """Return where the base lies; None where it is said in the config itself, or by a function."""
    return config.model.hf if isinstance(config.model.hf, str) else None


def _master(parameter: nn.Parameter, model: ModelConfig) -> str:
    """Return the dtype of a parameter's master: `model.master` where 16 bits train as such."""
    own = str(parameter.dtype).removeprefix("torch.")
    narrow = own == model.dtype != "float32"
    return model.master if narrow and parameter.requires_grad else own


def additions(
    factory: Factory, adapter: Mapping[str, Any] | None
) -> list[Callable[[nn.Module], None]]:
    """Return what is added to a constructed model, each under the seed again: rows, adapters."""
    added = [] if factory.grow is None else [factory.grow]
    if adapter is not None:
        added.append(partial(inject, fields=adapter))
    return added


def _initial_weights(
    config: Config,
    factory: Factory,
    checkpoint: Checkpoint | None,
    adapter: Mapping[str, Any] | None,
    source: Path | None,
    note: Callable[[str], None],
    base: QuantizedBase,
    *,
    draw: bool,
) -> InitialWeights:
    """Construct the module, new rows and adapters too, and open the files that it begins from.

    The constructor draws where nothing else has its values. `source` is the directory of the
    adapter to go on with.
    """
    found: Pretrained | None = None
    added = additions(factory, adapter)

    def stored(module: nn.Module) -> Mapping[str, Callable[[], torch.Tensor]]:
        nonlocal found
        base.look_at(module)
        if checkpoint is not None:
            found = Pretrained(module, checkpoint, factory.own_names)
        return base.as_seen(found.values()) if found is not None and draw else {}

    def constructed(*, draw_base: bool) -> Construction:
        return construct(
            factory.make,
            seed=config.train.seed,
            scratch_dir=existing_parent(config.run.dir),  # its files have no names: nothing is left
            draw=draw_base,
            addition=Addition(added, stored, draw=draw) if added else None,
        )

    construction = constructed(draw_base=draw and checkpoint is None)
    if not added:
        stored(construction.module)
    if found is not None and found.missing and draw:
        construction = constructed(draw_base=True)
        if not added:
            stored(construction.module)
    for remark in found.remarks if found is not None else ():
        note(remark)
    if found is not None and draw:
        found.load()
    files = None
    if source is not None:
        names = saved_names(construction.module, _directory(config))
        files = AdapterFiles(source, construction.module, names)
        if draw:
            files.load_buffers(construction.module)
    return InitialWeights(construction, found, files)


def _load_buffers(module: nn.Module, buffers: Mapping[str, NDArray[Any]]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in buffers and not torch.equal(buffer, found := torch.tensor(buffers[name])):
                buffer.copy_(found)
