"""oneDNN's caches, kept small where each micro-batch brings products of shapes not seen before."""

from __future__ import annotations

import os

__all__ = ["limit_primitive_caches"]

_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN itself, and of ideep, through which torch calls it."""
_PRIMITIVES = "64"


def limit_primitive_caches() -> None:
    """Let oneDNN keep 64 compiled products, for a model whose router decides on their rows.

    By default each of two caches keeps 1,024, of some 0.3 MiB. They fill within two steps of 64
    experts, to 350 MiB, and their small blocks lie in the holes that large gradients leave, which
    then fit nothing: of a budget of 2,560 MiB one step took 2,813, and 2,474 with this. A product
    is compiled again instead: of 64 experts with 32 rows each, forward and backward took 1.13 times
    as long. Both read these variables when they are first used; one that the user set stays.
    """
    for name in _CAPACITIES:
        os.environ.setdefault(name, _PRIMITIVES)
