"""Random draws keyed by what draws them: (seed, step, micro-batch, operation in the graph).

The same draw comes out whatever was executed before it: in a recomputation, in another order of
micro-batches, after an interruption. The graph of a segment calls `reseed(i)` before its i-th
random operation; the executor says with `draws(...)` whose draws these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import xxhash

__all__ = ["draws", "reseed"]

_active: list[tuple[str, Sequence[str]]] = []


@contextlib.contextmanager
def draws(seed: int, step: int, micro_batch: int, operations: Sequence[str]) -> Iterator[None]:
    """Key the draws made inside the block; `operations` names the segment's random operations."""
    _active.append((f"{seed}/{step}/{micro_batch}", operations))
    try:
        yield
    finally:
        _active.pop()


def reseed(index: int) -> None:
    """Set torch's default generators for the segment's random operation `index`.

    Outside `draws` (a dry run) it leaves them alone.
    """
    if not _active:
        return
    key, operations = _active[-1]
    value = xxhash.xxh3_64_intdigest(f"{key}/{operations[index]}".encode()) >> 1
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
