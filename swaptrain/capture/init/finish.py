"""After a construction: parameters become fake, everything else real."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from swaptrain.capture.init.exchange import FakeTwins, become
from swaptrain.capture.init.filebacked import ScratchFiles, drop_pages, is_file_backed
from swaptrain.capture.init.operations import storages
from swaptrain.capture.init.record import OperationRecorder
from swaptrain.capture.init.replay import Window, copied, storage_key
from swaptrain.capture.parameters.kinds import check_memory
from swaptrain.errors import CaptureError

__all__ = ["check_parameters", "fake_parameters", "real_others", "unfile_buffers"]

_KEPT_IN_MEMORY_BYTES = 1 << 20


def check_parameters(module: nn.Module) -> None:
    """Raise CaptureError where a parameter has no value that a construction could give it."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise CaptureError(
                f"parameter {name} is not initialised yet (a lazy module): let the factory run one "
                "forward before it returns the model"
            )
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            raise CaptureError(
                f"parameter {name} is on {parameter.device} with layout {parameter.layout}: the "
                "factory has to build the model on the CPU with dense parameters"
            )
        check_memory(name, parameter)


def real_others(module: nn.Module, recorder: OperationRecorder, fake_mode: FakeTensorMode) -> None:
    """Give real values to all fake tensors of `fake_mode` that are no parameters of `module`.

    Buffers always become real. Other tensors stay fake if they show a parameter's storage, or were
    computed from one with gradients (`weight_norm` sets them anew in each forward).
    """
    parameters = list(module.parameters())
    parameter_objects = {id(parameter) for parameter in parameters}
    parameter_storages = storages(parameters).keys()
    buffers = [buffer for buffer in module.buffers() if isinstance(buffer, FakeTensor)]
    chosen: dict[int, torch.Tensor] = {id(buffer): buffer for buffer in buffers}
    gc.collect()
    for thing in gc.get_objects():
        # type() and not isinstance: proxies in other libraries may import things when asked.
        if type(thing) is not FakeTensor or thing.fake_mode is not fake_mode:
            continue
        shown = storage_key(thing) in parameter_storages
        if thing.is_leaf and not shown and id(thing) not in parameter_objects:
            chosen[id(thing)] = thing
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in chosen.values():
        by_storage.setdefault(storage_key(tensor), []).append(tensor)
    for group in by_storage.values():
        for tensor, value in zip(group, recorder.values(group), strict=True):
            become(tensor, _like(tensor, value))


def fake_parameters(
    module: nn.Module, fake_mode: FakeTensorMode, files: ScratchFiles
) -> dict[int, torch.Tensor]:
    """Make the real parameters of `module` fake, in place; return their values by `id`.

    Objects, tying, strides and flags stay. Large values go to scratch files. Attributes that show a
    parameter's memory become fake with it.
    """
    check_parameters(module)
    twins = FakeTwins(fake_mode)
    parameters = [p for p in module.parameters() if not isinstance(p, FakeTensor)]
    shared = storages(parameters).keys()
    buffers = {id(buffer) for buffer in module.buffers()}
    aliases = {
        id(tensor): tensor
        for tensor in _attributes(module)
        if not isinstance(tensor, (FakeTensor, nn.Parameter))
        and id(tensor) not in buffers
        and tensor.is_leaf
        and storages([tensor]).keys() & shared
    }
    # All twins first: a storage's key is its address, which is free again once it is dropped.
    pairs = [
        (tensor, twins.of(Window.of(tensor), tensor.untyped_storage().nbytes()))
        for tensor in (*parameters, *aliases.values())
    ]
    values: dict[int, torch.Tensor] = {}
    for tensor, twin in pairs:
        if isinstance(tensor, nn.Parameter):
            values[id(tensor)] = _kept(tensor, files)
        become(tensor, _like(tensor, twin))
    return values


def unfile_buffers(module: nn.Module) -> None:
    """Move the buffers of `module` from scratch files into memory, in place."""
    copies: dict[int, torch.UntypedStorage] = {}
    filed = [b for b in module.buffers() if storages([b]) and is_file_backed(b.untyped_storage())]
    old = storages(filed)
    for key, storage in old.items():
        copies[key] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        copies[key].copy_(storage)
    for buffer in filed:
        become(buffer, _like(buffer, Window.of(buffer).on(copies[storage_key(buffer)])))


def _like(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return `content` as a parameter if `tensor` is one, with its flag for gradients."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(content, tensor.requires_grad)
    return content.requires_grad_(tensor.requires_grad)


def _kept(parameter: torch.Tensor, files: ScratchFiles) -> torch.Tensor:
    """Return a tensor with the values of `parameter` that nothing else writes to."""
    storage = parameter.untyped_storage()
    if storage.nbytes() < _KEPT_IN_MEMORY_BYTES:
        return copied(parameter)
    if not is_file_backed(storage):
        filed = files.allocate(storage.nbytes())
        filed.copy_(storage)
        storage = filed
    drop_pages(storage)
    return Window.of(parameter).on(storage)


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules hold in plain attributes, lists, tuples and dicts."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors_in(value)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        items: Iterable[object] = value.values() if isinstance(value, dict) else value
        for item in items:
            if isinstance(item, torch.Tensor):
                yield item
