"""From a config to a captured model: the constructor, one micro-batch, the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from swaptrain.capture.capture import capture
from swaptrain.capture.evaluation.graph import UncutEvaluation, capture_evaluation
from swaptrain.capture.fingerprint import content_digest
from swaptrain.capture.forward.constants import bind_constants
from swaptrain.capture.forward.loss import NoLossError
from swaptrain.capture.init.construct import Construction, construct
from swaptrain.capture.inputs.casts import batch_dtypes, cast_batch, describe_casts
from swaptrain.capture.precision import lower_parameters
from swaptrain.capture.uncut import Uncut
from swaptrain.config.schema import Config
from swaptrain.data import HeldOut
from swaptrain.models.checkpoint import Checkpoint
from swaptrain.models.factory import Factory, python_factory
from swaptrain.models.pretrained import InitialWeights, Pretrained
from swaptrain.models.thaw import thaw, thawed_by_loading
from swaptrain.models.trained import Trained, trained_parameters
from swaptrain.models.transformers_model import hugging_face_factory, job_of
from swaptrain.store.disk.durable_files import existing_parent

__all__ = ["BuiltModel", "build", "model_factory"]


@dataclass(frozen=True)
class BuiltModel:
    """A captured model with what its initial weights are made from."""

    uncut: Uncut
    initial: InitialWeights
    content: str
    """Of the graph and its constants: what of a capture no random number may have changed."""
    trained: Trained
    """How much of the model is trained, and what is not."""
    evaluations: tuple[UncutEvaluation, ...] = ()
    """The model in evaluation mode, for each size of held-out batches."""
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
        found = python_factory(config.model.python, dict(config.model.kwargs))
    else:
        job = replace(job_of(config, example), asks=asks, note=note)
        found = hugging_face_factory(config, job)
    constants = dict(config.model.constants)
    return replace(found, make=lambda: bind_constants(found.make(), constants))


def build(
    config: Config,
    factory: Factory,
    batch: Mapping[str, torch.Tensor],
    *,
    draw: bool = True,
    held_out: HeldOut | None = None,
    buffers: Mapping[str, NDArray[Any]] | None = None,
    thawed: Collection[str] = (),
    note: Callable[[str], None] = lambda _: None,
) -> BuiltModel:
    """Construct the model with fake parameters and capture it on a micro-batch like `batch`.

    With `held_out` in evaluation mode too, for the batches of such data.

    Without `draw` no random numbers are drawn, which takes half a minute for billions of weights:
    for those who need none of their values. Nor are they where a checkpoint has all of them.
    `buffers` are those that never change of a run that goes on: it needs the checkpoint that it
    began from no more; `thawed` are its `BuiltModel.thawed`. `note` hears what of a checkpoint is
    not used or missing.

    The constructor runs in float32 (torch's default dtype), so that the masters are the plain
    constructor's weights; then floating parameters take the dtype of the computation.
    """
    initial: InitialWeights
    checkpoint = factory.checkpoint() if buffers is None else None
    if checkpoint is not None:
        found = _pretrained(config, factory, checkpoint, note, draw=draw)
        thawed, initial = thawed_by_loading(found.module, found.missing), found
    else:
        initial = InitialWeights(_construct(config, factory, draw=draw))
    module, construction = initial.module, initial.construction
    _load_buffers(module, buffers or {})
    thaw(module, thawed)
    masters = {
        name: _master(parameter, config.model.dtype)
        for name, parameter in module.named_parameters()
    }
    if config.model.dtype == "bfloat16":
        lower_parameters(module, construction.fake_mode, torch.bfloat16)
    dtype = getattr(torch, config.model.dtype)
    try:
        dtypes = batch_dtypes(module, batch, dtype, construction.fake_mode)
        if said := describe_casts(batch, dtypes, dtype):
            note(said)
        uncut = capture(module, construction.fake_mode, cast_batch(batch, dtypes), masters)
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
    trained = trained_parameters(module, uncut.parameters, made_by)
    return BuiltModel(
        uncut, initial, content_digest(uncut), trained, tuple(evaluations), tuple(thawed)
    )


def _master(parameter: nn.Parameter, dtype: str) -> str:
    """Return the dtype of a parameter's master: float32 where bfloat16 trains in a bfloat16 run."""
    own = str(parameter.dtype).removeprefix("torch.")
    return "float32" if own == dtype == "bfloat16" and parameter.requires_grad else own


def _construct(config: Config, factory: Factory, *, draw: bool) -> Construction:
    return construct(
        factory.make,
        seed=config.train.seed,
        scratch_dir=existing_parent(config.run.dir),  # its files have no names: nothing is left
        draw=draw,
    )


def _pretrained(
    config: Config,
    factory: Factory,
    checkpoint: Checkpoint,
    note: Callable[[str], None],
    *,
    draw: bool,
) -> Pretrained:
    """Return the weights of a checkpoint, and the constructor's for what it has not."""
    found = Pretrained(_construct(config, factory, draw=False), checkpoint)
    if found.missing and draw:
        found = Pretrained(_construct(config, factory, draw=True), checkpoint)
    for remark in found.remarks:
        note(remark)
    if draw:
        found.load()
    return found


def _load_buffers(module: nn.Module, buffers: Mapping[str, NDArray[Any]]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in buffers and not torch.equal(buffer, found := torch.tensor(buffers[name])):
                buffer.copy_(found)
