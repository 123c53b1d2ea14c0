"""Prices a step: bytes of disk traffic at the least, and the least seconds they take."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from swaptrain.program.model import ModelSpec

__all__ = ["Disk", "IOWork", "StateBytes", "break_even_tokens", "floor_s"]
__all__ += ["least_traffic_bytes", "useful_fraction"]

_RECOMPUTED = 4
"""Forward, recomputation, and a backward that costs two forwards."""
_SAVED = 3
"""The same without the recomputation."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes of a model's state, by how often a step needs them."""

    weights: int
    """Read by forward and by backward: 2 a parameter in bfloat16, 4 in float32."""
    rest: int
    """Read and written by the update alone: remainders and moments."""
    gradients: int = 0
    """Gradients that are spilled until the global norm is known; 0 for a fused update."""


def least_traffic_bytes(
    state: StateBytes,
    boundary_bytes: int,
    cache_bytes: int,
    *,
    commit_every: int = 1,
    keeps_values: bool = False,
) -> float:
    """Return the least bytes that a step reads and writes with a RAM cache of `cache_bytes`.

    Source: docs/design.md ("The cost of a step"). For Adam with a split master, P parameters,
    weights 2 P and the rest 10 P, m = commit_every, K = boundary_bytes and C = cache_bytes it is

        26 P - (3 - 1/m) min(C, 2 P) - (2 - 1/m) max(0, min(C, 12 P) - 2 P) + 2 K (+ K if m = 1)

    where what is left of C saves 2 bytes for each byte of K, or 1 where `keeps_values`: activations
    are written whether they stay in memory or not, for a resume. Spilled gradients are written once
    and read once more. A bound for layer-major order; no schedule moves less.
    """
    written = 1 / commit_every
    all_state = state.weights + state.rest
    cached_weights = min(cache_bytes, state.weights)
    cached_rest = max(0, min(cache_bytes, all_state) - state.weights)
    left = max(0, cache_bytes - all_state)
    cached_boundary = min(left, boundary_bytes)
    handoff_bytes = boundary_bytes if commit_every == 1 else 0
    return (
        3 * state.weights
        + 2 * state.rest
        - (3 - written) * cached_weights
        - (2 - written) * cached_rest
        + 2 * boundary_bytes
        - (1 if keeps_values else 2) * cached_boundary
        + handoff_bytes
        + 2 * state.gradients
    )


@dataclass(frozen=True)
class Disk:
    """The measured speed of a disk, with several requests in flight."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Reads and writes together, half of the bytes each."""

    def seconds(self, read_bytes: int, write_bytes: int) -> float:
        """Return the time that the disk needs for these bytes, at their mix.

        The time of a byte is taken to be linear in the mix between the three that were measured.
        """
        total = read_bytes + write_bytes
        if not total:
            return 0.0
        fraction = read_bytes / total
        near = 2 * abs(fraction - 0.5)
        pure = self.read_bytes_per_s if fraction > 0.5 else self.write_bytes_per_s
        return total * (near / pure + (1 - near) / self.mixed_bytes_per_s)


@dataclass(frozen=True)
class IOWork:
    """The seconds of a processor that I/O takes from computing."""

    request_s: float = 0.0
    """Of a request of no bytes: Python, system calls."""
    byte_s: float = 0.0
    """Of a byte that is moved: pages that are held for it, or copied."""
    checksum_byte_s: float = 0.0
    """Of a byte whose checksum is made."""
    commit_s: float = 0.0
    """Of a commit's record and its switch."""

    def seconds(self, requests: int, nbytes: int, *, checksum: bool) -> float:
        """Return the seconds for an array of `nbytes` that is moved in so many requests."""
        byte_s = self.byte_s + checksum * self.checksum_byte_s
        return requests * self.request_s + nbytes * byte_s


def floor_s(io_s: float, compute_s: float, sigma: float) -> float:
    """Return the least time of a step: max(I/O, compute + sigma * I/O).

    Source: docs/design.md ("The cost of a step").

    `compute_s` is what the step computes with no I/O running; a second of I/O slows it by sigma.
    """
    return max(io_s, compute_s + sigma * io_s)


def useful_fraction(model: ModelSpec, saves: Container[int]) -> float:
    """Return the part of a step's forward, recomputation and backward that is no recomputation.

    By the flops of matrix products: a backward costs two forwards, and every segment recomputes
    its forward but those that it `saves` and the last one, where the step turns.
    """
    useful = done = 0
    for segment in model.segments:
        flops = max(1, segment.flops)
        turns = segment.index == len(model.segments)
        useful += _SAVED * flops
        done += (_SAVED if turns or segment.index in saves else _RECOMPUTED) * flops
    return useful / done


def break_even_tokens(
    state: StateBytes, parameters: int, flops_per_s: float, disk: Disk, *, read_fraction: float
) -> float:
    """Return the tokens a step above which computing hides the disk: T* = b F / (8 BW).

    b is the traffic of the state a parameter (26 with a split master), 8 the flops a parameter and
    token with recomputation, F flop/s, BW byte/s at the step's mix.
    """
    traffic = 3 * state.weights + 2 * state.rest + 2 * state.gradients
    read_bytes = round(traffic * read_fraction)
    return disk.seconds(read_bytes, traffic - read_bytes) * flops_per_s / (8 * max(1, parameters))
