"""Which tensors of a micro-batch take the dtype of the computation, and which keep their own.

A run in bfloat16 has bfloat16 parameters. What a data set gives in float32 stays float32: targets,
times, coordinates and masks lose digits otherwise (1001 becomes 1000). Where the forward fails
for that, those keys are cast that a parameter's operation reads first (a convolution, a product).
"""

from __future__ import annotations

import contextlib
import traceback
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

from swaptrain.capture.checks.batch_values import BatchValues
from swaptrain.capture.checks.questions import answered_questions
from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.inputs.lineage import FailedCalls, Follower, MixedProductError
from swaptrain.errors import CaptureError
from swaptrain.generators import generators_restored
from swaptrain.program.model import ModelSpec

__all__ = ["batch_dtypes", "cast_as_captured", "cast_batch", "describe_casts"]

_TABLES = (dict, set, OrderedDict)
"""In these modules keep hooks, parameters, submodules, and counts of their own."""


def cast_batch(batch: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the micro-batch with each tensor in the dtype that `batch_dtypes` gave its key."""
    return {key: value.to(dtypes[key]) for key, value in batch.items()}


def cast_as_captured(batch: Mapping[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    """Return a micro-batch with its tensors in the dtypes that the model was captured with."""
    return cast_batch(
        batch,
        {key: getattr(torch, model.values[f"batch.{key}"].tensor.dtype) for key in batch},
    )


def batch_dtypes(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    dtype: torch.dtype,
    fake_mode: FakeTensorMode | None = None,
) -> dict[str, torch.dtype]:
    """Return the dtype in which the model reads each key of a micro-batch.

    In float32 every floating tensor is read in float32. In bfloat16 float64 becomes float32, and
    the rest keeps its dtype, but for what a parameter's operation has to read in bfloat16.
    `module` has its parameters in the dtypes of the computation; with `fake_mode` they are its
    fakes. Nothing of the module changes. Raises CaptureError, naming the keys, where a key would
    have to be cast that something else reads too.
    """
    dtypes = {key: _own(value, dtype) for key, value in batch.items()}
    if dtype is torch.float32:
        return dtypes
    if all(d is dtype or not d.is_floating_point for d in dtypes.values()):
        return dtypes
    cast: frozenset[str] = frozenset()
    while more := _needed(module, cast_batch(batch, dtypes), cast, fake_mode, dtype) - cast:
        cast |= more
        dtypes.update(dict.fromkeys(more, dtype))
    return dtypes


def describe_casts(
    batch: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], dtype: torch.dtype
) -> str | None:
    """Return what a start says of the floating tensors of the batch; None where there are none.

    In float32 only what loses digits is worth a word.
    """
    floating = {key: value for key, value in batch.items() if value.is_floating_point()}
    narrowed = [
        f"{key} ({_name(value.dtype)} to {_name(dtypes[key])})"
        for key, value in floating.items()
        if dtypes[key].itemsize < value.dtype.itemsize
    ]
    if not narrowed and (dtype is torch.float32 or not floating):
        return None
    kept = [
        f"{key} ({_name(dtypes[key])})" for key in floating if dtypes[key] is floating[key].dtype
    ]
    said = []
    if narrowed:
        said.append("cast: " + ", ".join(narrowed))
    if kept:
        said.append("as they are: " + ", ".join(kept))
    return "floating tensors of a micro-batch, " + "; ".join(said) if said else None


def _own(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has before anything is found out of the model."""
    if not value.is_floating_point():
        return value.dtype
    if dtype is torch.float32 or value.dtype is torch.float64:
        return torch.float32
    return value.dtype


def _needed(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    cast: frozenset[str],
    fake_mode: FakeTensorMode | None,
    dtype: torch.dtype,
) -> frozenset[str]:
    """Run one forward on fakes; return the keys that have to be cast for it, none where it works.

    `cast` are those that `batch` has in the `dtype` of the computation already. Raises
    CaptureError.
    """
    follower, narrow = Follower(dtype), _name(dtype)
    try:
        result = _forward(module, batch, fake_mode, follower)
    except MixedProductError:
        return _castable(follower, batch, narrow)
    except Exception as error:
        if "dtype" in str(error) and _refused_by_layer(error, follower):
            return _castable(follower, batch, narrow)
        # Other failures are the capture's to explain, once it meets them in its own forward.
        wide = {key for tensor in follower.last for key in follower.wide_keys(tensor)}
        if "dtype" not in str(error) or not wide:
            return frozenset()
        raise CaptureError(
            f"model.dtype is {narrow}, and the forward fails with the batch's own dtypes: {error}. "
            + _cure(wide, narrow)
        ) from error
    loss = loss_of(result, module, batch.keys())
    read = follower.of(loss)
    if read_twice := cast & (read.computed | read.met | read.direct):
        raise CaptureError(
            f"model.dtype is {narrow}: {_listed(read_twice)} would be cast to {narrow} for a "
            "parameter's operation, but other operations, such as the loss, read it too and would "
            "get the rounded numbers. " + _cure(read_twice, narrow)
        )
    return frozenset()


def _refused_by_layer(error: Exception, follower: Follower) -> bool:
    """Whether a layer of torch compared its input with its weights itself, as recurrent ones do."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    layer, tensors = frame.f_locals.get("self"), list(frame.f_locals.values())
    if not isinstance(layer, nn.Module) or not any(True for _ in layer.parameters(recurse=False)):
        return False
    follower.mixed = tuple(
        follower.of(t) for t in tensors if isinstance(t, Tensor) and follower.wide_keys(t)
    )
    follower.where = type(layer).__name__
    return bool(follower.mixed)


def _castable(follower: Follower, batch: Mapping[str, Tensor], narrow: str) -> frozenset[str]:
    """Return the keys that a product with a parameter needs in its dtype; raises CaptureError."""
    found = frozenset().union(*(one.direct | one.promoted for one in follower.mixed))
    found = frozenset(key for key in found if follower.is_wide(batch[key]))
    if found:
        return found
    wrong = frozenset().union(*(one.computed or one.keys for one in follower.mixed))
    raise CaptureError(
        f"model.dtype is {narrow}: {follower.where} reads what the forward computes from "
        f"{_listed(wrong)} in float32 beside a {narrow} parameter. Casting {_listed(wrong)} would "
        f"round the numbers that it is computed from. {_cure(wrong, narrow)}"
    )


def _cure(keys: Collection[str], narrow: str) -> str:
    return (
        f"Cast in the forward what is computed from {_listed(keys)}, such as with "
        f".to(self.layer.weight.dtype), or let the items have {_listed(keys)} in {narrow} where "
        "rounding it is meant, or set model.dtype to float32"
    )


def _listed(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _forward(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    fake_mode: FakeTensorMode | None,
    follower: Follower,
) -> object:
    """Call the module on fakes of everything that it owns; nothing of it changes.

    What it asks of its batch in Python is answered, as while it is captured.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake_mode is None else fake_mode

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    parameters = {n: fake(p) for n, p in module.named_parameters()}
    buffers = {n: fake(b) for n, b in module.named_buffers()}
    inputs = {key: mode.from_tensor(value) for key, value in batch.items()}
    follower.begin(inputs, parameters)
    values = BatchValues(mode)
    for key, value in inputs.items():
        values.know(value, batch[key])
    with (
        _as_it_was(module),
        mode,
        answered_questions(values),
        torch.enable_grad(),
        follower,
        FailedCalls(follower),
    ):
        return functional_call(module, {**parameters, **buffers}, kwargs=inputs)


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back the attributes, hooks and lists of modules, and the generators.

    All of them: a forward that registers hooks once notes that in an attribute, and would register
    them again if only the attribute were put back.
    """
    owners = [(vars(m), dict(vars(m))) for m in module.modules()]
    held = [value for _, values in owners for value in values.values()]
    lists = [(value, value[:]) for value in held if type(value) is list]
    tables = [(value, value.copy()) for value in held if type(value) in _TABLES]
    try:
        with generators_restored():
            yield
    finally:
        for found, before in lists:
            found[:] = before
        for found, before in (*owners, *tables):
            found.clear()
            found.update(before)
