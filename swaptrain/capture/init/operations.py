"""What the recorder has to know about an operation before it runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from swaptrain.capture.init.replay import Window, storage_key

__all__ = [
    "base_name",
    "draws_by_shape",
    "fills_its_target",
    "generator_state",
    "has_known_layout",
    "is_strided",
    "promises_a_view",
    "reads_only_shapes",
    "storages",
    "windows_of_fakes",
    "written_tensors",
]

_ATEN = torch.ops.aten
_DRAWS_INTO_ITS_TARGET = frozenset(
    {
        _ATEN.bernoulli_.float,
        _ATEN.cauchy_.default,
        _ATEN.exponential_.default,
        _ATEN.geometric_.default,
        _ATEN.log_normal_.default,
        _ATEN.normal_.default,
        _ATEN.random_.default,
        _ATEN.random_.to,
        getattr(_ATEN.random_, "from"),
        _ATEN.uniform_.default,
    }
)
_WRITES_ITS_TARGET = frozenset(
    {_ATEN.copy_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default}
)
_TRUSTED_LAYOUT = frozenset({_ATEN.cat, _ATEN.clone, _ATEN.stack, _ATEN._to_copy})


def base_name(func: OpOverload) -> str:
    """Return `normal_` for `aten.normal_.default`."""
    return func._schema.name.split("::")[-1]


def fills_its_target(func: OpOverload) -> bool:
    """Whether `func` writes all of its first argument without reading it."""
    return func in _DRAWS_INTO_ITS_TARGET or func in _WRITES_ITS_TARGET


def draws_by_shape(func: OpOverload) -> bool:
    """Whether the draws of `func` depend on the layout of its tensors, not on their values."""
    return func in _DRAWS_INTO_ITS_TARGET or reads_only_shapes(func)


def reads_only_shapes(func: OpOverload) -> bool:
    """Whether `func` makes a new tensor shaped like its argument: `rand_like`, `new_zeros`, ..."""
    name = base_name(func)
    return func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_"))


def has_known_layout(func: OpOverload) -> bool:
    """Whether the strides that the fake kernel gives are those that the real one gives."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _TRUSTED_LAYOUT


def promises_a_view(func: OpOverload) -> bool:
    """Whether the schema says that a result shares storage with an argument it does not write."""
    return any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in func._schema.returns
    )


def is_strided(value: object) -> bool:
    """Whether `value` is a tensor that has a storage."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storages(values: Iterable[object]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors among `values`, by their keys."""
    return {
        storage_key(value): value.untyped_storage()
        for value in values
        if isinstance(value, torch.Tensor) and is_strided(value)
    }


def written_tensors(
    func: OpOverload, leaves: Sequence[object], structure: TreeSpec
) -> list[torch.Tensor]:
    """Return the arguments whose content `func` changes, by its schema.

    An operation that moves a tensor over its storage (`t_`, `set_`) changes no content.
    """
    if torch.Tag.inplace_view in func.tags:
        return []
    args, kwargs = tree_unflatten(leaves, structure)
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value: Any = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def generator_state(func: OpOverload, leaves: Iterable[object]) -> torch.Tensor | None:
    """Return the state of the generator that `func` draws from; None where it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    explicit = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    return (explicit[0] if explicit else torch.default_generator).get_state()


def windows_of_fakes(leaves: Iterable[object]) -> list[object]:
    """Return `leaves` with each fake tensor replaced by its window."""
    return [Window.of(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
