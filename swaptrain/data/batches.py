"""Micro-batches as a function of step number: no loader state, so nothing to save or restore."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch

from swaptrain.data.permutation import permuted
from swaptrain.data.seeded import item_seed, seeded
from swaptrain.errors import ConfigError, RunError, SwaptrainError
from swaptrain.units import how_many

__all__ = ["Batches", "Dataset", "token_count"]

_OBJECT_BYTES = 400
"""Of a tensor beside its elements, at the least: 415 with torch 2.13, and 500 for its dict."""

_AHEAD = 64
"""Items that are expected beyond a micro-batch, or a whole one where that has more."""

_CHECKED, _CHECK_S = 256, 2.0
"""Items whose layouts are compared at a start, and the seconds after which no further one is."""

# The shape and dtype of each tensor of an item, by key.
_ItemLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]


_TOKENS = ("input_ids", "ids", "tokens", "token_ids")
"""What a tensor of whole numbers is called that holds tokens."""


def token_count(layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> int | None:
    """Return the tokens of an item or a batch by its tensors, padding included; None without any.

    They are the elements of the first tensor of whole numbers, of one dimension or more, that is
    called input_ids, ids, tokens or token_ids.
    """
    for name in _TOKENS:
        shape, dtype = layout.get(name, ((), torch.float32))
        if shape and not dtype.is_floating_point and not dtype.is_complex:
            return prod(shape)
    return None


class Dataset(Protocol):
    """A map-style dataset: item i is a dict of tensors, a function of i and of seeded draws."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return one item; numbers and NumPy arrays are taken as tensors."""


class Maker(Protocol):
    """Makes the micro-batches of steps elsewhere."""

    def batch(self, step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch: step from 1, micro-batch from 0."""

    def close(self) -> None:
        """End what makes them."""


class Batches:
    """Hands out the micro-batches of each step; safe to call from several threads.

    Step s counts from 1, micro-batch m from 0. The running position of a micro-batch's first item
    is p = ((s - 1) * micro_batches + m) * micro_batch. Without shuffling, item p modulo the length
    comes first and its neighbours follow; with it, epoch e = p // length and the item is
    permutation(seed, e)[p % length], for each of the positions. With `draws` the global generators
    are seeded from seed, epoch and item around each read. A dataset that has `set_epoch` is told
    the epoch, from 0, before each read.

    Raises ConfigError if item 0 is not a dict of tensors.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        name: str,
        digest: str,
        seed: int,
        shuffle: bool,
        micro_batch: int,
        micro_batches: int,
        expect: Callable[[int], None] | None = None,
        draws: bool = False,
        once: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        ahead: Maker | None = None,
    ) -> None:
        """Take a dataset; `expect` hears of items that will be asked for, some time before.

        `collate` makes a micro-batch of a list of items, each as the dataset gives it; without it
        tensors are stacked. `ahead` makes the micro-batches of steps elsewhere, the same ones.

        With `once` there is no second epoch: the last micro-batch has what is left of the items.
        """
        self.digest = digest
        """Names the data: equal digests, equal items."""
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        self._dataset, self._name = dataset, name
        self._seed, self._shuffle, self._draws = seed, shuffle, draws
        self._expect, self._expected = expect, 0
        self._once = once
        self._length = len(dataset)
        set_epoch = getattr(dataset, "set_epoch", None)
        self._set_epoch: Callable[[int], object] | None = set_epoch if callable(set_epoch) else None
        self._epoch_lock = Lock()
        """Held while a dataset that is told the epoch reads an item of it."""
        if self._length < 1:
            raise ConfigError(f"{name} has no items: give it data to train on")
        self._function, self._ahead = collate, ahead
        self.layout: _ItemLayout = {}
        """The shape and dtype of each tensor of an item, by key; of what is collated without the
        first dimension, that of the items."""
        if collate is None:
            self.layout = _layout(self.item(0))
        else:
            self.layout = _without_items(self._collated(self._places(1, 0), ConfigError))
        tokens = token_count(self.layout)
        self.counts_tokens = tokens is not None
        """Whether `tokens_per_micro_batch` are tokens, or items of data that has none."""
        self.tokens_per_micro_batch = micro_batch * (1 if tokens is None else tokens)

    @property
    def item_bytes(self) -> int:
        """What an item takes, at the least, while its micro-batch is put together."""
        return sum(_OBJECT_BYTES + prod(s) * d.itemsize for s, d in self.layout.values())

    @property
    def name(self) -> str:
        """What messages call the data."""
        return self._name

    def __len__(self) -> int:
        """Return the number of items in one epoch."""
        return self._length

    def items(self, step: int, micro_batch_index: int) -> list[int]:
        """Return the indices of the items of one micro-batch (step from 1, micro-batch from 0)."""
        return [index for _, index in self._places(step, micro_batch_index)]

    def batch(self, step: int, micro_batch_index: int) -> dict[str, torch.Tensor]:
        """Return one micro-batch: each key's tensors stacked to [micro_batch, ...], on the CPU.

        Raises RunError, naming the item, where reading fails or an item's keys, shapes or dtypes
        are not those of item 0.
        """
        if self._ahead is not None:
            return self._ahead.batch(step, micro_batch_index)
        self._expect_after(self._first(step, micro_batch_index))
        return self._collate(self._places(step, micro_batch_index), RunError)

    def close(self) -> None:
        """End what makes micro-batches ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def example(self) -> dict[str, torch.Tensor]:
        """Return the first micro-batch, batch(1, 0); what is wrong with it is a ConfigError."""
        return self._collate(self._places(1, 0), ConfigError)

    def item(self, index: int, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return one item as it is read in an epoch, collated alone; raises ConfigError."""
        if self._function is not None:
            return self._collate([(epoch, index)], ConfigError)
        return self._item(index, epoch, ConfigError)

    def check_layouts(self) -> None:
        """Read items over the whole length, for a moment; raises ConfigError where one differs.

        A run would find it when that item comes, perhaps after days.
        """
        began = time.monotonic()
        count = min(_CHECKED, self._length)
        for number in range(count):
            index = number * (self._length - 1) // max(1, count - 1)
            self._collate([(0, index)], ConfigError)
            if time.monotonic() - began > _CHECK_S:
                break

    def _places(self, step: int, micro_batch_index: int) -> list[tuple[int, int]]:
        """Return epoch and index of each item of one micro-batch."""
        first = self._first(step, micro_batch_index)
        positions = range(first, self._last(first + self.micro_batch))
        return [(position // self._length, self._index(position)) for position in positions]

    def _first(self, step: int, micro_batch_index: int) -> int:
        """Return the running position of a micro-batch's first item."""
        if step < 1 or not 0 <= micro_batch_index < self.micro_batches:
            raise IndexError(f"no micro-batch {micro_batch_index} in step {step}")
        return ((step - 1) * self.micro_batches + micro_batch_index) * self.micro_batch

    def _expect_after(self, first: int) -> None:
        """Say that the micro-batch at a position is asked for, and what comes after it.

        Its items are read one by one, and on a disk that a step keeps busy each would wait.
        """
        if self._expect is None:
            return
        end = first + self.micro_batch + max(self.micro_batch, _AHEAD)
        begin = self._expected if first <= self._expected <= end else first
        self._expected = end
        for position in range(begin, self._last(end)):
            self._expect(self._index(position))

    def _last(self, end: int) -> int:
        """Return where a range of positions ends that would end at `end`."""
        return min(end, self._length) if self._once else end

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self._length)
        if not self._shuffle:
            return offset
        return permuted(offset, self._length, seed=self._seed, epoch=epoch)

    def _collate(
        self, places: list[tuple[int, int]], error: type[SwaptrainError]
    ) -> dict[str, torch.Tensor]:
        if self._function is not None:
            batch = self._collated(places, error)
            if _without_items(batch) != self.layout:
                raise error(
                    f"data.collate gives {_describe(_layout(batch))} for the items "
                    f"{[index for _, index in places]} of {self._name}, and for others "
                    f"{_describe(self.layout)} an item: the captured model takes one shape (pad to "
                    "a fixed length)"
                )
            return batch
        items = []
        for epoch, index in places:
            item = self._item(index, epoch, error)
            layout = _layout(item)
            if layout != self.layout:
                raise error(
                    f"item {index} of {self._name} has {_describe(layout)}, item 0 has"
                    f" {_describe(self.layout)}: every item must have the same keys, shapes and"
                    " dtypes (pad or crop them in the dataset)"
                )
            items.append(item)
        return {key: torch.stack([item[key] for item in items]) for key in self.layout}

    def _read(self, epoch: int, index: int) -> Any:
        """Return an item as the dataset gives it, told the epoch where it has `set_epoch`."""
        if self._set_epoch is None:
            return self._dataset[index]
        with self._epoch_lock:
            self._set_epoch(epoch)
            return self._dataset[index]

    def _collated(
        self, places: list[tuple[int, int]], error: type[SwaptrainError]
    ) -> dict[str, torch.Tensor]:
        """Return what `data.collate` makes of items; its draws are seeded as the first item's."""
        assert self._function is not None
        items = [self._raw(index, epoch, error) for epoch, index in places]
        numbers = [index for _, index in places]
        name = f"what data.collate makes of the items {numbers} of {self._name}"
        try:
            with seeded(item_seed(self._seed, *places[0])) if self._draws else nullcontext():
                found = self._function(items)
        except SwaptrainError:
            raise
        except Exception as cause:  # the dataset and the function are the user's
            raise error(f"{name}: {type(cause).__name__}: {cause}") from cause
        batch = _tensors(found, name, error)
        for key, tensor in batch.items():
            if not tensor.ndim or tensor.shape[0] != len(items):
                raise error(
                    f"{name} has {list(tensor.shape)} under {key!r}: the first dimension is "
                    f"that of the {how_many(len(items), 'item')}"
                )
        return batch

    def _raw(self, index: int, epoch: int, error: type[SwaptrainError]) -> Any:
        """Return an item as the dataset gives it."""
        seed = item_seed(self._seed, epoch, index)
        try:
            with seeded(seed) if self._draws else nullcontext():
                return self._read(epoch, index)
        except SwaptrainError:
            raise
        except Exception as cause:  # the dataset and the function are the user's
            raise error(
                f"item {index} of {self._name} cannot be read: {type(cause).__name__}: {cause}"
            ) from cause

    def _item(self, index: int, epoch: int, error: type[SwaptrainError]) -> dict[str, torch.Tensor]:
        return _tensors(self._raw(index, epoch, error), f"item {index} of {self._name}", error)


def _tensors(found: Any, name: str, error: type[SwaptrainError]) -> dict[str, torch.Tensor]:
    """Return a dict of tensors; raises the error where it is none."""
    if not isinstance(found, Mapping) or not found:
        raise error(
            f"{name} is {_kind(found)}: return a dict of tensors, whose keys are the arguments of"
            " the model's forward"
        )
    tensors = {}
    for key, value in found.items():
        tensor = _tensor(value) if isinstance(key, str) else None
        if tensor is None:
            raise error(
                f"{name} has {_kind(value)} under {key!r}: keys must be text, values tensors or"
                " numbers"
            )
        tensors[key] = tensor
    return tensors


def _tensor(value: object) -> torch.Tensor | None:
    """Return a tensor, number or numeric NumPy array as a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        # A copy: torch takes neither arrays that are read-only nor reversed ones.
        return torch.tensor(np.array(value))
    return None


def _layout(item: Mapping[str, torch.Tensor]) -> _ItemLayout:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in sorted(item.items())}


def _without_items(batch: Mapping[str, torch.Tensor]) -> _ItemLayout:
    return {key: (shape[1:], dtype) for key, (shape, dtype) in _layout(batch).items()}


def _describe(layout: _ItemLayout) -> str:
    return ", ".join(
        f"{key} {str(dtype).removeprefix('torch.')}{list(shape)}"
        for key, (shape, dtype) in layout.items()
    )


def _kind(value: object) -> str:
    if isinstance(value, Mapping) and not value:
        return "an empty dict"
    return f"a value of type {type(value).__name__}"
