"""The global generators of the process: torch's of the CPU, numpy's and Python's `random`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["generators_restored", "noted_generators", "seed_generators"]


def seed_generators(seed: int) -> None:
    """Seed all of them, as before a model is constructed; those of devices too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def noted_generators() -> Callable[[], None]:
    """Return what puts them back where they stand now."""
    python, numpy, states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(states)

    return restore


@contextmanager
def generators_restored() -> Iterator[None]:
    """Put them back where they stood before the block."""
    restore = noted_generators()
    try:
        yield
    finally:
        restore()
