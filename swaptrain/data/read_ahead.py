"""Micro-batches of a Python dataset made before they are asked for, by processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swaptrain.data.batches import Batches
from swaptrain.data.python_dataset import load_collate, load_dataset
from swaptrain.data.seeded import CONSTRUCTION_SEED, seeded
from swaptrain.errors import RunError, SwaptrainError
from swaptrain.processes import NEEDS_GUARD, process_pool

__all__ = ["AheadSettings", "BatchesAhead"]


@dataclass(frozen=True)
class AheadSettings:
    """What makes the same batches in another process."""

    target: str
    kwargs: Mapping[str, Any]
    collate: str | None
    key: str
    name: str
    seed: int
    shuffle: bool
    micro_batch: int
    micro_batches: int

    def open(self) -> Batches:
        """Return the batches; raises ConfigError where the functions fail here."""
        with seeded(CONSTRUCTION_SEED):
            dataset = load_dataset(self.target, self.kwargs, key=self.key)
        return Batches(
            dataset,
            name=self.name,
            digest="",
            seed=self.seed,
            shuffle=self.shuffle,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            draws=True,
            collate=load_collate(self.collate),
        )


@dataclass(frozen=True)
class _Flattened:
    """A tensor on its way between processes; torch would send an open file of shared memory."""

    content: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Flattened:
        flat = tensor.contiguous().reshape(-1)
        return _Flattened(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


class BatchesAhead:
    """Gives micro-batches in any order, and has the next ones made by `processes` meanwhile.

    They are functions of step and micro-batch, so that their bits do not depend on who makes them.
    As many are made ahead as there are processes, and one more.
    """

    def __init__(self, settings: AheadSettings, processes: int) -> None:
        self._settings, self._ahead = settings, processes + 1
        own = (settings.target, settings.collate or "")
        script = any(name.startswith("__main__:") for name in own)
        self._pool = process_pool(processes, _begin, settings, imports_script=script)
        self._made: dict[tuple[int, int], Future[dict[str, _Flattened]]] = {}

    def batch(self, step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return one micro-batch; raises RunError as `Batches.batch` does."""
        wanted = [(step, micro_batch), *self._following(step, micro_batch)]
        for place in self._made.keys() - set(wanted):
            self._made.pop(place).cancel()
        for place in wanted:
            if place not in self._made:
                self._made[place] = self._pool.submit(_make, place)
        try:
            found = self._made.pop(wanted[0]).result()
        except BrokenProcessPool as error:
            raise RunError(
                f"a process that makes micro-batches of {self._settings.name} has died: does it "
                "need more memory than there is? Lower data.workers, and run the command again. "
                f"{NEEDS_GUARD}"
            ) from error
        return {key: sent.tensor() for key, sent in found.items()}

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _following(self, step: int, micro_batch: int) -> list[tuple[int, int]]:
        count = self._settings.micro_batches
        first = step * count + micro_batch + 1
        return [divmod(number, count) for number in range(first, first + self._ahead)]


_batches: Batches | SwaptrainError | None = None
"""Of this process, one of the pool's: or why there are none."""


def _begin(settings: AheadSettings) -> None:
    """Make this process ready."""
    global _batches
    torch.set_num_threads(1)
    try:
        _batches = settings.open()
    except SwaptrainError as error:  # said by the first batch: a pool only says that it is broken
        _batches = error


def _make(place: tuple[int, int]) -> dict[str, _Flattened]:
    if not isinstance(_batches, Batches):
        raise RunError(f"a process of data.workers cannot begin: {_batches}")
    return {key: _Flattened.of(value) for key, value in _batches.batch(*place).items()}
