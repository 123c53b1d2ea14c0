"""The items of a data set in the order in which one process of the Trainer takes them.

An epoch of the Trainer ends with a smaller batch, and with fewer batches in its last step, where
the items do not go up. Here every micro-batch and every step is of one size: what lacks is filled
with rows whose labels are all -100, which a loss that counts tokens does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, Protocol

import torch

from swaptrain.errors import ConfigError
from swaptrain.units import how_many

__all__ = ["EpochShape", "InOrder", "MapStyle", "Placed", "collator", "sampler_order"]

_NOT_TRAINED = -100
"""The label that transformers' losses leave out."""


class MapStyle(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one item."""


@dataclass(frozen=True)
class EpochShape:
    """How an epoch of so many items is cut into batches and steps."""

    items: int
    batch: int
    """MapStyle of a batch: per_device_train_batch_size."""
    batches_per_step: int
    """gradient_accumulation_steps."""
    drop_last: bool

    def __post_init__(self) -> None:
        if self.batches == 0:
            raise ConfigError(
                f"train_dataset has {how_many(self.items, 'item')}, too few for one batch"
                + (f" of {self.batch} (dataloader_drop_last)" if self.items else "")
                + ": give more items"
            )

    @property
    def batches(self) -> int:
        """Batches of an epoch; the last one may be smaller."""
        return self.items // self.batch if self.drop_last else ceil(self.items / self.batch)

    @property
    def taken(self) -> int:
        """MapStyle that an epoch takes."""
        return min(self.items, self.batches * self.batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the last one may have fewer batches."""
        return ceil(self.batches / self.batches_per_step)

    @property
    def places(self) -> int:
        """Rows of an epoch with those that fill its last step."""
        return self.steps * self.batches_per_step * self.batch

    @property
    def whole_steps(self) -> int:
        """Steps of an epoch that need no filling."""
        return self.taken // (self.batches_per_step * self.batch)

    def epoch_of(self, step: int) -> float:
        """Return the Trainer's `epoch` after a step (from 1): parts are of batches."""
        epoch, inside = divmod(step, self.steps)
        return epoch + min(inside * self.batches_per_step, self.batches) / self.batches


@dataclass(frozen=True)
class Placed:
    """An item, and whether it counts or only fills a step."""

    item: Any
    counts: bool = True


@lru_cache(maxsize=2)
def sampler_order(items: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch's items, int64 [items]: that of accelerate's seedable sampler.

    The Trainer's sampler is torch's RandomSampler, whose generator accelerate seeds with the sum of
    seed and epoch.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(items, generator=generator)


class InOrder:
    """A data set whose item at a place of an epoch is the one that the Trainer takes there."""

    def __init__(self, dataset: MapStyle, shape: EpochShape, seed: int | None) -> None:
        """Take a data set; a `seed` of None: in its own order."""
        self._dataset, self._shape, self._seed = dataset, shape, seed
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self._shape.places

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, from 0; a data set that has `set_epoch` is told so too."""
        self._epoch = epoch
        inner = getattr(self._dataset, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def __getitem__(self, place: int) -> Placed:
        """Return the row at a place of the epoch."""
        counts = place < self._shape.taken
        index = place if counts else 0
        if self._seed is not None:
            index = int(sampler_order(self._shape.items, self._seed, self._epoch)[index])
        return Placed(self._dataset[index], counts)


def collator(
    collate: Callable[[list[Any]], Any], columns: frozenset[str] | None
) -> Callable[[list[Placed]], dict[str, Any]]:
    """Return what makes a batch of rows with a collator of transformers; fillings get no labels.

    `columns`: the keys of an item that the model takes; None: all. It raises ConfigError where rows
    have to be left out, and the batch has no `labels`.
    """

    def collated(rows: list[Placed]) -> dict[str, Any]:
        batch = dict(collate([_kept(row.item, columns) for row in rows]))
        filling = [number for number, row in enumerate(rows) if not row.counts]
        if not filling:
            return batch
        if "labels" not in batch:
            raise ConfigError(
                "the last step of an epoch has fewer items, and the batch has no labels by which "
                "rows can be left out: set dataloader_drop_last, and gradient_accumulation_steps "
                "to a divisor of the batches of an epoch"
            )
        labels = torch.as_tensor(batch["labels"]).clone()
        labels[filling] = _NOT_TRAINED
        return {**batch, "labels": labels}

    return collated


def _kept(item: Any, columns: frozenset[str] | None) -> Any:
    if columns is None or not isinstance(item, Mapping):
        return item
    return {key: value for key, value in item.items() if key in columns}
