"""Knows, while a model is exported, the first micro-batch's real value of what depends on it alone.

A forward may read values of its batch in Python: `grid.tolist()`, `if mask.any():`, the positions
of image tokens. An export on fake tensors has none. Here each operation on tensors that depend on
the batch and on constants alone is computed for real as well, so that a question for a value, or
for a shape that depends on values, is answered with the first micro-batch's. Every answer becomes a
check on all micro-batches (`split.take_checks`); what depends on parameters is not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["BatchValues"]

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class BatchValues(TorchDispatchMode):
    """Answers what is asked of tensors whose real values are known; sits above a fake mode."""

    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._known: Any = WeakIdKeyDictionary()
        self._spoiled: dict[int, Tensor] = {}
        """By storage: real tensors into which something unknown was written."""
        self.answers = 0
        """Questions answered so far."""

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Take `real` as the value of `fake`; what the forward writes goes into a copy."""
        with _disable_current_modes():
            self._known[fake] = real.detach().clone()

    def real(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor; None where it is not known."""
        if isinstance(tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            return None
        found: Tensor | None
        found = self._known.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return None if found is None or _storage(found) in self._spoiled else found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation on fake tensors, and for real where its inputs are known."""
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self._fake_mode = tensor.fake_mode  # an export may have one of its own
                break
        known = all(self.real(tensor) is not None for tensor in tensors) and not any(
            isinstance(leaf, _NUMBERS) for leaf in leaves
        )
        known = known and torch.Tag.nondeterministic_seeded not in func.tags
        if known and torch.Tag.data_dependent_output in func.tags:
            self.answers += 1
            return self._compute(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            if known:
                self.answers += 1
                found = self._compute(func, args, kwargs)
                return pytree.tree_map_only(Tensor, self._fake_of, found)
            with_sizes = self._with_known_sizes(func, args)
            if with_sizes is not None:
                self.answers += func is not _aten._ctc_loss.Tensor  # whose sizes nothing else reads
                return with_sizes()
        result = func(*args, **kwargs)
        if known:
            self._note(result, self._compute(func, args, kwargs))
        else:
            self._spoil(func, args, kwargs)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = pytree.tree_map_only(Tensor, self.real, (args, kwargs))
        with _disable_current_modes(), torch._C._DisableFuncTorch(), torch.no_grad():
            return func(*real_args, **real_kwargs)

    def _note(self, result: Any, real: Any) -> None:
        fakes, reals = pytree.tree_leaves(result), pytree.tree_leaves(real)
        for fake, value in zip(fakes, reals, strict=True):
            if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
                self._known[fake] = value

    def _spoil(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget what something unknown is written into, with everything that shares its memory."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(given):
                if isinstance(tensor, FakeTensor) and tensor in self._known:
                    real = self._known[tensor]
                    self._spoiled[_storage(real)] = real

    def _fake_of(self, real: Tensor) -> Tensor:
        """Return a fake tensor with the layout of a real one, whose value it is."""
        with _disable_current_modes(), self._fake_mode:
            fake = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=real.device
            )
        self._known[fake] = real
        return fake

    def _with_known_sizes(self, func: Any, args: Any) -> Callable[[], Any] | None:
        """Return the operation on fakes where the sizes of its result are known all the same."""
        if func in _INDEXED:
            masks = [m for m in args[1] if m is not None and m.dtype in (torch.bool, torch.uint8)]
            if any(self.real(mask) is None for mask in masks):
                return None
            indices = [part for index in args[1] for part in self._positions(index)]
            return lambda: func(args[0], indices)
        if func is _aten.masked_select.default and (mask := self.real(args[1])) is not None:
            with _disable_current_modes():
                count = int((mask & torch.ones(args[0].shape, dtype=torch.bool)).sum())
            return lambda: args[0].new_empty(count)
        if func is _aten._ctc_loss.Tensor:
            lengths = [self.real(length) for length in args[2:4]]
            if lengths[0] is not None and lengths[1] is not None:
                with _disable_current_modes():
                    longest = int(lengths[1].max())
                steps, batch, _ = args[0].shape  # [T, B, classes]
                shapes = ([batch], [batch, steps, 2 * longest + 1])
                return lambda: tuple(args[0].new_empty(shape) for shape in shapes)
        return None

    def _positions(self, index: Tensor | None) -> list[Tensor | None]:
        """Return an index by positions in the place of one by a mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        with _disable_current_modes():
            real = self.real(index)
            assert real is not None
            found = real.nonzero().unbind(1)
        return [self._fake_of(positions) for positions in found]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
