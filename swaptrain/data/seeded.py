"""Random items of a Python dataset are functions of the seed, the epoch and the item.

A dataset that draws random numbers when an item is read would give other items after a resume,
or where items are read ahead. So the global generators are seeded around each read, and what
cannot be seeded so is found at the start and refused.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from swaptrain.errors import ConfigError
from swaptrain.generators import generators_restored

__all__ = ["CONSTRUCTION_SEED", "check_repeatable", "item_seed", "seeded"]

_GENERATORS = threading.RLock()
"""The generators are the process's: one item is read at a time."""
CONSTRUCTION_SEED = 0
"""Under which a dataset is made: a random choice of items is the same one at every start."""
_CHECKED_ITEMS = 8
_CHECK_S = 3.0
"""Seconds after which no further item is read for the check; two are read in any case."""
_OWN = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
_DEPTH = 3


def item_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed that is given to torch, numpy (its lower 32 bits) and Python's `random`."""
    return xxhash.xxh3_64_intdigest(f"{seed} {epoch} {index}".encode())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU, and put back what they were; one thread at a time."""
    with _GENERATORS, generators_restored():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield


def check_repeatable(
    dataset: object,
    read: Callable[[int], Mapping[str, torch.Tensor]],
    length: int,
    name: str,
) -> None:
    """Read a few items twice under the same seeds; raises ConfigError where one differs.

    `read` seeds the generators. Items come once upwards and once downwards, so that one that
    depends on what was read before it shows too.
    """
    own = _own_generators(dataset)
    before = {path: _state(generator) for path, generator in own.items()}
    chosen = sorted(
        {number * (length - 1) // (_CHECKED_ITEMS - 1) for number in range(_CHECKED_ITEMS)}
    )
    first: dict[int, Mapping[str, torch.Tensor]] = {}
    began = time.monotonic()
    for index in chosen:
        first[index] = read(index)
        if len(first) > 1 and time.monotonic() - began > _CHECK_S:
            break
    drawn = [path for path, generator in own.items() if before[path] != _state(generator)]
    if drawn:
        raise _not_repeatable(
            name,
            min(first),
            f"its {drawn[0]} is a generator of its own, which reading items moves on",
        )
    for index in reversed(first):
        again = read(index)
        different = [key for key in first[index] if not _equal(first[index][key], again.get(key))]
        if different:
            raise _not_repeatable(
                name, index, f"{different[0]!r} differs when the item is read twice"
            )


def _not_repeatable(name: str, index: int, why: str) -> ConfigError:
    return ConfigError(
        f"item {index} of {name} is no function of its index: {why}. A run that is resumed would "
        "get other items. Draw from the global generators of torch, numpy or Python's random, "
        "which are seeded for each item and epoch, or from a generator that __getitem__ makes of "
        "the index; keep no counters or iterators"
    )


def _equal(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    """Compare two tensors, NaN equal to NaN."""
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _own_generators(root: object) -> dict[str, Any]:
    """Return the generators that a dataset holds in attributes, lists and dicts, by path."""
    found: dict[str, Any] = {}
    shared = {id(torch.default_generator), id(np.random.mtrand._rand)}
    seen: set[int] = set()

    def walk(value: object, path: str, depth: int) -> None:
        if isinstance(value, _OWN):
            if id(value) not in shared and not isinstance(value, random.SystemRandom):
                found[path] = value
            return
        if depth > _DEPTH or id(value) in seen or isinstance(value, torch.Tensor | np.ndarray):
            return
        seen.add(id(value))
        inner: Mapping[Any, object] = {}
        if isinstance(value, Mapping):
            inner = value if len(value) < 1000 else {}
        elif isinstance(value, list | tuple):
            inner = dict(enumerate(value)) if len(value) < 1000 else {}
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            inner = vars(value)
        for key, part in list(inner.items()):
            walk(part, f"{path}.{key}" if path else str(key), depth + 1)

    walk(root, "", 0)
    return found


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        name, keys, *rest = generator.get_state(legacy=True)
        return name, np.asarray(keys).tolist(), rest
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return generator.getstate()
