"""Prices a step: bytes of disk traffic at the least, and the least seconds they take."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from swaptrain.program.model import ModelSpec, SegmentSpec

__all__ = ["Disk", "IOWork", "StateBytes", "break_even_tokens", "floor_s"]
__all__ += ["least_traffic_bytes", "useful_fraction"]


@dataclass(frozen=True)
class StateBytes:
    """The bytes of a model's state, by how often a step needs them."""

    weights: int
    """Read by forward and by backward: 2 a parameter in bfloat16, 4 in float32."""
    rest: int
    """Read and written by the update alone: remainders and moments."""
    gradients: int = 0
    """Gradients that are spilled until the global norm is known; 0 for a fused update."""
    frozen: int = 0
    """Weights that never change, of segments that learn: read by forward and by backward."""
    frozen_below: int = 0
    """Weights that never change where nothing learns: read by the forward alone."""

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads without a cache, but for activations."""
        return 2 * (self.weights + self.frozen) + self.frozen_below + self.rest + self.gradients

    @property
    def write_bytes(self) -> int:
        """Bytes that a step which commits writes, but for activations."""
        return self.weights + self.rest + self.gradients


def least_traffic_bytes(
    state: StateBytes,
    boundary_bytes: int,
    cache_bytes: int,
    *,
    commit_every: int = 1,
    unit: Literal["segment", "step"] = "step",
) -> float:
    """Return the least bytes that a step reads and writes with a RAM cache of `cache_bytes`.

    Source: docs/design.md ("The cost of a step"). For Adam with a split master, P parameters,
    weights 2 P and the rest 10 P, m = commit_every, K = boundary_bytes and C = cache_bytes it is

        26 P - (3 - 1/m) min(C, 2 P) - (2 - 1/m) max(0, min(C, 12 P) - 2 P) + 2 K

    where what is left of C saves 2 bytes for each byte of K. With the unit `segment`, for a resume
    inside a step, it is K more for the hand-offs, and what is left of C saves 1: activations are
    written whether they stay in memory or not. Spilled gradients are written once
    and read once more. Frozen weights are read twice, or once below the lowest segment that learns,
    and a byte of them in memory saves as much. A bound for layer-major order; no schedule moves
    less.
    """
    written = 1 / commit_every
    saved = 0.0
    for nbytes, saves in (
        (state.weights, 3 - written),
        (state.frozen, 2),
        (state.rest, 2 - written),
        (boundary_bytes, 1 if unit == "segment" else 2),
        (state.frozen_below, 1),
    ):
        cached = min(cache_bytes, nbytes)
        saved += saves * cached
        cache_bytes -= cached
    handoff_bytes = boundary_bytes if unit == "segment" else 0
    moved = state.read_bytes + state.write_bytes + 2 * boundary_bytes + handoff_bytes
    return moved - saved


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


def useful_fraction(
    model: ModelSpec, saves: Container[int], learning: Container[int] | None = None
) -> float:
    """Return the part of a step's forward, recomputation and backward that is no recomputation.

    By the flops of matrix products: a backward costs a forward for the gradients of values and one
    for those of weights, as far as they are trained. Every segment recomputes its forward but those
    that it `saves`, the last one, where the step turns, and those that are not `learning`, which
    have no backward (None: all are).
    """
    useful = done = 0.0
    for segment in model.segments:
        flops = max(1, segment.flops)
        if learning is not None and segment.index not in learning:
            useful, done = useful + flops, done + flops
            continue
        turns = segment.index == len(model.segments)
        own = (2 + _trained_fraction(model, segment)) * flops
        useful += own
        done += own + (0 if turns or segment.index in saves else flops)
    return useful / done


def _trained_fraction(model: ModelSpec, segment: SegmentSpec) -> float:
    """Return the part of a segment's parameters that is trained; 1 where it has none."""
    sizes = [
        (p.tensor.numel, p.trainable) for n in segment.parameters for p in [model.parameters[n]]
    ]
    total = sum(size for size, _ in sizes)
    return sum(size for size, trained in sizes if trained) / total if total else 1.0


def break_even_tokens(
    state: StateBytes, flops_per_token: float, flops_per_s: float, disk: Disk
) -> float:
    """Return the tokens a step above which computing hides the disk: T* = b F / (f BW).

    b is the traffic of all state without a cache (26 bytes a parameter with a split master), f the
    flops a token (8 a parameter with recomputation), F flop/s, BW byte/s at the step's mix.
    """
    seconds = disk.seconds(state.read_bytes, state.write_bytes)
    return seconds * flops_per_s / max(1.0, flops_per_token)
