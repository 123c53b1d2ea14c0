"""Follows the tensors of a micro-batch through one forward on fake tensors, operation by operation.

Each tensor that a forward makes has a `Lineage`: from which keys of the batch it comes, and how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FailedCalls", "Follower", "Lineage", "MixedProductError"]

_aten = torch.ops.aten
_MOVES = frozenset({
    _aten.clone, _aten.cat, _aten.stack, _aten.constant_pad_nd, _aten.reflection_pad1d,
    _aten.reflection_pad2d, _aten.replication_pad1d, _aten.replication_pad2d, _aten._to_copy,
    _aten.flip, _aten.roll, _aten.repeat, _aten.index, _aten.index_select, _aten.gather,
    _aten.im2col, _aten.native_dropout, _aten.copy, _aten._unsafe_view, _aten._reshape_copy,
})  # fmt: skip
"""Operations that move elements and compute nothing, beside views."""
_SHAPES = frozenset({
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like,
    _aten.randn_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full,
})  # fmt: skip
"""Operations that read the shape of a tensor alone."""
_SCALES = frozenset({_aten.mul, _aten.mul_, _aten.div, _aten.div_})
"""With an operand that is neither data nor a parameter they keep relative precision."""
_PROMOTES = frozenset({
    _aten.cat, _aten.stack, _aten.where, _aten.copy_, _aten.copy, _aten.sum, _aten.mean,
    _aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss, _aten._to_copy,
})  # fmt: skip
"""Operations that take floating tensors of two dtypes, beside the elementwise ones."""
_STRICT = frozenset({_aten.prelu, _aten._prelu_kernel})


class MixedProductError(Exception):
    """An operation on data and a parameter of a narrower dtype; a Follower knows whose data."""


@dataclass(frozen=True)
class Lineage:
    """Where a tensor comes from."""

    parameter: bool = False
    """From parameters, and from nothing of the batch."""
    direct: frozenset[str] = frozenset()
    """Keys whose elements it holds, moved or scaled by constants at most."""
    trained: bool = False
    """From parameters and from the batch: an activation."""
    promoted: frozenset[str] = frozenset()
    """Keys that met something narrower in an operation that promotes: they made it wide."""
    met: frozenset[str] = frozenset()
    """Keys that met an activation, such as by a sum, with no parameter's operation after it."""
    computed: frozenset[str] = frozenset()
    """Keys from which other numbers were computed before any activation or parameter met them."""
    keys: frozenset[str] = frozenset()
    """All keys that it depends on."""


_NOTHING = Lineage()


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, knows the lineage of each tensor.

    Raises MixedProductError at the first operation that gets wide data and a narrower parameter
    and is not one that promotes; `mixed` then holds the lineages of the wide tensors. `last` has
    the tensors of an operation that raises anything else.
    """

    def __init__(self, narrow: torch.dtype) -> None:
        """Know nothing yet but the dtype of the computation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._narrow = narrow
        self.last: tuple[torch.Tensor, ...] = ()
        self.mixed: tuple[Lineage, ...] = ()
        self.where = ""
        self._known: dict[int, Lineage] = {}
        self._alive: list[torch.Tensor] = []

    def begin(self, batch: Mapping[str, torch.Tensor], owned: Mapping[str, torch.Tensor]) -> None:
        """Name the keys of the batch and the parameters."""
        for key, tensor in batch.items():
            one = frozenset({key})
            self._know(tensor, Lineage(direct=one, keys=one))
        for tensor in owned.values():
            self._know(tensor, Lineage(parameter=True))

    def of(self, tensor: torch.Tensor) -> Lineage:
        """Return the lineage of a tensor; an empty one for a constant."""
        return self._known.get(id(tensor), _NOTHING)

    def wide_keys(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the keys that a floating tensor comes from, none for a narrow one."""
        return self.of(tensor).keys if self.is_wide(tensor) else frozenset()

    def is_wide(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is floating and not in the dtype of the computation."""
        return tensor.is_floating_point() and tensor.dtype is not self._narrow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = self.last = _tensors((args, kwargs))
        lineages = [self.of(t) for t in tensors]
        self.check(func, tensors, promotes=_promotes(func))
        owned = [
            t for t, one in zip(tensors, lineages, strict=True) if one.parameter or one.trained
        ]
        narrow = any(t.dtype is self._narrow for t in owned)
        result = func(*args, **(kwargs or {}))
        made = _joined(func, lineages, narrow)
        for tensor in _tensors(result):
            self._know(tensor, made)
        self.last = ()
        return result

    def check(self, func: Any, tensors: tuple[torch.Tensor, ...], *, promotes: bool) -> None:
        """Raise MixedProductError for a narrow parameter beside wide data."""
        narrow = any(self.of(t).parameter and t.dtype is self._narrow for t in tensors)
        wide = tuple(self.of(t) for t in tensors if self.wide_keys(t))
        if wide and narrow and not promotes:
            self.mixed, self.where = wide, str(func)
            raise MixedProductError

    def _know(self, tensor: torch.Tensor, lineage: Lineage) -> None:
        self._known[id(tensor)] = lineage
        self._alive.append(tensor)  # ids are not used again while the forward runs


class FailedCalls(TorchFunctionMode):
    """Finds the operands of what torch refuses before it is an operation that a Follower sees."""

    def __init__(self, follower: Follower) -> None:
        """Tell a follower that is entered too."""
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:  # MixedProductError is none
            if not self._follower.last:
                self._follower.last = _tensors((args, kwargs))
                self._follower.check(
                    getattr(func, "__name__", func), self._follower.last, promotes=False
                )
            raise


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def _joined(func: Any, lineages: list[Lineage], narrow: bool) -> Lineage:
    """Return the lineage of what an operation makes of tensors with these.

    `narrow` says whether a parameter or an activation among them is narrow.
    """
    if _packet(func) in _SHAPES:
        return _NOTHING
    parameters = any(one.parameter for one in lineages)
    keys = _union(one.keys for one in lineages)
    if not keys:
        return Lineage(parameter=parameters)
    direct = _union(one.direct for one in lineages)
    same = Lineage(
        direct=direct,
        trained=parameters or any(one.trained for one in lineages),
        promoted=_union(one.promoted for one in lineages),
        met=_union(one.met for one in lineages),
        computed=_union(one.computed for one in lineages),
        keys=keys,
    )
    promoted = same.promoted | (direct if narrow else frozenset())
    if _moves(func):
        return same
    if parameters:
        return replace(same, direct=frozenset(), promoted=promoted, met=frozenset())
    if _packet(func) in _SCALES and sum(bool(one.keys) for one in lineages) == 1:
        return same
    apart = _union(one.direct for one in lineages if not one.trained)
    if not same.trained or apart != direct:
        return replace(same, direct=frozenset(), computed=same.computed | direct)
    return replace(same, direct=frozenset(), promoted=promoted, met=same.met | direct)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _packet(func: Any) -> Any:
    """Return an operation without its overload; None for one that calls other functions."""
    return getattr(func, "overloadpacket", None)


def _moves(func: Any) -> bool:
    return bool(getattr(func, "is_view", False)) or _packet(func) in _MOVES


def _promotes(func: Any) -> bool:
    packet = _packet(func)
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) and packet not in _STRICT
    return packet is None or _moves(func) or pointwise or packet in _PROMOTES
