"""Python's collector of garbage, held back while large libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage in a `with` block: what an import makes stays.

    Collections that go through all of it again and again take a sixth of importing torch and
    transformers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
