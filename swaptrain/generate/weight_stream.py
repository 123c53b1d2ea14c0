"""Weights come from the store to the module that is called, and leave when it returns.

As much as fits stays in memory: a sweep over more than fits finds nothing in a cache that drops the
oldest, so what stays is chosen once. The rest is read ahead by a thread, in the order in which the
modules were called the last time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swaptrain.errors import ConfigError
from swaptrain.store.read.safetensors import StreamedTensor
from swaptrain.units import format_size

__all__ = ["WeightStream"]

_MOST_AHEAD = 4
"""Modules that are read ahead; one keeps the disk at work, more help where they are small."""


_SEEN = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_meta", "grad"),
    *(
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
        "grad_fn",
    ),
    *("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex"),
    *("is_contiguous", "nelement", "__len__", "__hash__", "requires_grad_"),
}
"""What can be asked of a weight that is not there."""


class _Awaited(Tensor):
    """Stands for a weight while it is not there: has its shape and dtype, and no memory.

    An operation on it, of a module that reads weights of its parts without calling them, gets the
    weight from the store.
    """

    bring: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _SEEN:
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map(_brought, (args, kwargs or {}))
            return func(*args, **kwargs)


def _brought(found: Any) -> Any:
    return found.bring() if isinstance(found, _Awaited) else found


@dataclass
class _Unit:
    """Modules whose parameters come and go together."""

    number: int
    owner: nn.Module
    """The outermost one, whose call brings them."""
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    """Module, attribute, and the name that the store has for the parameter."""
    held: bool = False
    """Whether they stay where they are computed with."""
    held_on_host: bool = False
    """Whether they stay in RAM, from where they are copied to a device at each call."""

    @cached_property
    def names(self) -> list[str]:
        """Of the parameters, tied ones once."""
        return list(dict.fromkeys(name for _, _, name in self.places))


class WeightStream:
    """Gives a module its weights, whose fake parameters are replaced.

    `stored`: for each dtype of a parameter, its tensors by name. `budget_bytes` are for weights
    alone; on a device that has memory of its own `device_bytes` there. Raises ConfigError where the
    store has other tensors than the module, or the budget is too small. A context: the thread ends
    with it.
    """

    def __init__(
        self,
        module: nn.Module,
        stored: Mapping[str, Mapping[str, StreamedTensor]],
        *,
        budget_bytes: int,
        device: torch.device,
        device_bytes: int = 0,
    ) -> None:
        self._device = device
        self._sources = _sources(module, stored)
        self._placeholders: dict[str, Any] = {}
        self._borrowed: tuple[str, Tensor] | None = None
        self._units = list(_units(module))
        self._following = {unit.number: unit.number + 1 for unit in self._units}
        self._following[self._units[-1].number] = 0
        self._last: int | None = None
        self._held: dict[str, nn.Parameter] = {}
        self._on_host: dict[str, Tensor] = {}
        self._ahead: dict[int, Future[dict[str, Tensor]]] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.waited_s = 0.0
        """How long modules waited for their weights."""
        self.read_bytes = 0
        self.total_bytes = sum(source.nbytes for source in self._sources.values())
        self.held_bytes = self._choose(budget_bytes, device_bytes)
        """Of all weights those that stay in memory."""
        passing = [self._nbytes(unit) for unit in self._units if not unit.held]
        self._ahead_bytes = max(passing, default=0) or max(map(self._nbytes, self._units))
        self._replace()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)

    def _choose(self, budget_bytes: int, device_bytes: int) -> int:
        """Decide what stays, from the first module on, and return its bytes."""
        if self._device.type == "cpu":
            return self._hold("memory.host", budget_bytes, "held")
        held_bytes = self._hold("memory.device", device_bytes, "held")
        return held_bytes + self._hold("memory.host", budget_bytes, "held_on_host")

    def _hold(self, key: str, room: int, mark: str) -> int:
        units = [unit for unit in self._units if not unit.held]
        names = {name for unit in units for name in unit.names}
        largest_bytes = max((self._nbytes(unit) for unit in units), default=0)
        if sum(self._sources[name].nbytes for name in names) > room:
            if room < 2 * largest_bytes:  # the one that computes, and the next one
                raise ConfigError(
                    f"{key}: {format_size(max(room, 0))} are left for weights, and one module's of "
                    f"{format_size(largest_bytes)} have to be there twice, while the next is read: "
                    "raise it, or give fewer prompts or tokens"
                )
            room -= 2 * largest_bytes
        held: set[str] = set()
        for unit in units:
            added = sum(self._sources[name].nbytes for name in unit.names if name not in held)
            if added <= room:
                setattr(unit, mark, True)
                held.update(unit.names)
                room -= added
        return sum(self._sources[name].nbytes for name in held)

    def _replace(self) -> None:
        for unit in self._units:
            for module, attribute, name in unit.places:
                fake = module._parameters[attribute]
                assert fake is not None
                if name not in self._placeholders:
                    value = torch.nan if fake.dtype.is_floating_point else 0
                    nothing = torch.full((), value, dtype=fake.dtype, device=self._device)
                    absent = nothing.expand(fake.shape).as_subclass(_Awaited)
                    absent.bring = partial(self._bring, name)
                    self._placeholders[name] = absent
                module._parameters[attribute] = self._placeholders[name]
            unit.owner.register_forward_pre_hook(partial(self._enter, unit), prepend=True)
            unit.owner.register_forward_hook(partial(self._leave, unit), always_call=True)

    def _enter(self, unit: _Unit, *_: object) -> None:
        if self._last is not None:
            self._following[self._last] = unit.number
        self._last = unit.number
        waiting = self._ahead.pop(unit.number, None)
        if not self._is_here(unit) and waiting is None:
            waiting = self._loader.submit(self._load, unit)
        self._read_ahead(unit)
        parameters = dict(self._held)
        if waiting is not None:
            begun = time.perf_counter()
            found = waiting.result()
            self.waited_s += time.perf_counter() - begun
            for name, tensor in found.items():
                # It requires gradients though none are taken: where it does not, torch computes a
                # product with a slice as one of batches, with a copy of the weight for each.
                parameters[name] = nn.Parameter(tensor.to(self._device))
        if unit.held:
            self._held = parameters
        for module, attribute, name in unit.places:
            module._parameters[attribute] = parameters[name]

    def _is_here(self, unit: _Unit) -> bool:
        return all(name in self._held for name in unit.names)

    def _leave(self, unit: _Unit, *_: object) -> None:
        if not unit.held:
            for module, attribute, name in unit.places:
                module._parameters[attribute] = self._placeholders[name]

    def _bring(self, name: str) -> Tensor:
        """Return a weight that is read while its module is not called; the last one stays."""
        if name in self._held:
            return self._held[name]
        if self._borrowed is None or self._borrowed[0] != name:
            begun = time.perf_counter()
            self._borrowed = None
            source = self._sources[name]
            found = self._on_host.get(name)
            if found is None:
                found = self._loader.submit(self._tensor, source).result()
            self._borrowed = name, found.to(self._device)
            self.waited_s += time.perf_counter() - begun
        return self._borrowed[1]

    def _read_ahead(self, unit: _Unit) -> None:
        """Have the next units read that do not stay, one largest unit's bytes at most."""
        if len(self._held) == len(self._sources):
            return
        coming: list[_Unit] = []
        number, room = unit.number, self._ahead_bytes
        for _ in self._units:
            number = self._following[number]
            following = self._units[number]
            if following is unit or len(coming) == _MOST_AHEAD:
                break
            if self._is_here(following) or following in coming:
                continue
            room -= self._nbytes(following)
            if room < 0:
                break
            coming.append(following)
        wanted = {one.number for one in coming}
        for stale in self._ahead.keys() - wanted:
            self._ahead.pop(stale).cancel()
        for one in coming:
            if one.number not in self._ahead:
                self._ahead[one.number] = self._loader.submit(self._load, one)

    def _load(self, unit: _Unit) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in unit.names:
            if name in self._held:
                continue
            if name in self._on_host:
                found[name] = self._on_host[name]
                continue
            found[name] = self._tensor(self._sources[name])
            if unit.held_on_host:
                self._on_host[name] = found[name]
        return found

    def _tensor(self, source: StreamedTensor) -> Tensor:
        dtype = getattr(torch, source.dtype)
        pieces = (_bytes_of(piece) for piece in source.pieces)
        first = next(pieces, np.empty(0, np.uint8))
        self.read_bytes += source.nbytes
        if len(first) == source.nbytes and first.flags.writeable:
            return torch.from_numpy(first).view(dtype).reshape(source.shape)
        tensor = torch.empty(source.shape, dtype=dtype)
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        end = 0
        for content in chain([first], pieces):
            flat[end : end + len(content)] = content
            end += len(content)
        return tensor

    def _nbytes(self, unit: _Unit) -> int:
        return sum(self._sources[name].nbytes for name in unit.names)


def _bytes_of(piece: NDArray[Any]) -> NDArray[np.uint8]:
    flat: NDArray[Any] = np.ascontiguousarray(piece).reshape(-1)
    return flat.view(np.uint8)


def _sources(
    module: nn.Module, stored: Mapping[str, Mapping[str, StreamedTensor]]
) -> dict[str, StreamedTensor]:
    """Return the store's tensor of each parameter, tied ones once."""
    found = {}
    for name, parameter in module.named_parameters():
        source = stored[str(parameter.dtype).removeprefix("torch.")].get(name)
        if source is None or tuple(source.shape) != tuple(parameter.shape):
            has = "has no such weight" if source is None else f"has it as {list(source.shape)}"
            raise ConfigError(
                f"the config's model has {name} of the shape {list(parameter.shape)}, and the run "
                f"{has}: give the config that the run was trained with"
            )
        found[name] = source
    return found


def _units(module: nn.Module) -> Iterator[_Unit]:
    """Yield the modules that own parameters, in the order of their definition."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    number = 0
    inner: set[nn.Module] = set()
    for owner in module.modules():
        if owner in inner:
            continue
        parts = [owner]
        if _reads_parts(owner):
            parts = list(owner.modules())
            inner.update(parts)
        unit = _Unit(number, owner)
        for part in parts:
            for attribute, parameter in part._parameters.items():
                if parameter is not None:
                    unit.places.append((part, attribute, first[id(parameter)]))
        if unit.places:
            yield unit
            number += 1


def _reads_parts(module: nn.Module) -> bool:
    """Whether a module reads parameters of its parts without calling these."""
    return isinstance(module, nn.MultiheadAttention) or hasattr(module, "lora_magnitude_vector")
