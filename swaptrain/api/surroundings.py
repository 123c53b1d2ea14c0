"""What a run sets for its process, and that a script gets back as it was."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["restored"]


@contextmanager
def restored() -> Iterator[None]:
    """Give back threads, environment, import path, random states and torch's modes.

    The allocator's settings stay, which change when memory is returned to the system and nothing
    else. Signal handlers are given back by the run itself.
    """
    environment, path = dict(os.environ), list(sys.path)
    set_up_torch()
    import numpy as np
    import torch

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        gc.collect()
