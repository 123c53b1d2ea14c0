"""The small runs that are enumerated."""

from __future__ import annotations

from swaptrain.program.model import BufferSpec, ModelSpec, ParameterSpec, ValueSpec
from swaptrain.program.state_arrays import segment_arrays
from swaptrain.program.step import StepBuilder
from tests.program.models import moments, segment, tensor
from tests.protocol.run import Scenario

__all__ = ["LARGE", "SMALL", "network"]


def network(
    segments: int,
    *,
    tied: bool = False,
    skip: bool = False,
    buffers: tuple[int, ...] = (),
    frozen: tuple[int, ...] = (),
) -> ModelSpec:
    """Return a chain of segments with a parameter and a value each.

    `tied`: the last two segments read the first one's parameter as well; `skip`: all later segments
    read the first one's value; `buffers` and `frozen`: the segments whose forward mutates a buffer,
    and those whose parameter is not trained.
    """
    numbers = range(1, segments + 1)
    parameters = {
        f"p{k}": ParameterSpec(tensor(f"p{k}", 4, dtype="bfloat16"), "float32", k not in frozen)
        for k in numbers
    }
    readers = {k: (k + 1,) for k in range(segments)} | {segments: ()}
    if skip:
        readers[1] = tuple(range(2, segments + 1))
    names = ["batch.x", *(f"v{k}" for k in range(1, segments)), "loss"]
    learning = min(k for k in numbers if k not in frozen)
    values = {
        name: ValueSpec(tensor(name, 1), k, readers[k], k >= learning)
        for k, name in enumerate(names)
    }
    specs = tuple(
        segment(
            k,
            owns=(f"p{k}",),
            parameters=(f"p{k}", "p1") if tied and k >= max(2, segments - 1) else (f"p{k}",),
            buffers=(f"b{k}",) if k in buffers else (),
            inputs=tuple(name for j, name in enumerate(names) if k in readers[j]),
            outputs=(names[k],),
        )
        for k in numbers
    )
    mutated = {f"b{k}": BufferSpec(tensor(f"b{k}", 2)) for k in buffers}
    return ModelSpec(parameters, mutated, values, specs, "loss", "-")


def _steps(model: ModelSpec, *, micro_batches: int = 1, deferred: bool = False) -> StepBuilder:
    arrays = {s.index: list(segment_arrays(model, s, "bfloat16", moments)) for s in model.segments}
    return StepBuilder(model, "bfloat16", arrays, micro_batches, deferred)


_SHARED = {"tied": True, "skip": True}
SMALL = [
    Scenario("fused, two disks", _steps(network(3)), disks=2),
    Scenario(
        "fused, tied, several readers",
        _steps(network(4, **_SHARED)),
        steps=1,
        free_slots=2,
        disks=3,
    ),
    Scenario(
        "fused, tied, several readers, spilled",
        _steps(network(4, **_SHARED)),
        steps=1,
        free_slots=2,
        spills=True,
    ),
    Scenario(
        "fused, frozen below a buffer",
        _steps(network(3, buffers=(1, 2), frozen=(1,)), micro_batches=2),
        alike=False,
    ),
    Scenario(
        "fused, nothing learns in the first two",
        _steps(network(4, frozen=(1, 2)), micro_batches=2),
        spills=True,
        alike=False,
    ),
    Scenario(
        "deferred, nothing learns below a buffer",
        _steps(network(3, buffers=(1, 2), frozen=(1, 2)), deferred=True),
        alike=False,
    ),
    Scenario(
        "fused, readers without a commit between them",
        _steps(network(4, skip=True, frozen=(3,))),
        steps=1,
    ),
    Scenario(
        "fused, two repeated",
        _steps(network(4, tied=True, buffers=(2,)), micro_batches=2),
        steps=1,
        free_slots=2,
        lag=2,
        spills=True,
    ),
    Scenario("deferred, two repeated", _steps(network(3), deferred=True), steps=1, lag=2),
    Scenario(
        "deferred, tied, two disks", _steps(network(3, tied=True), deferred=True), steps=1, disks=2
    ),
    Scenario(
        "deferred, buffers, spilled", _steps(network(2, buffers=(2,)), deferred=True), spills=True
    ),
    Scenario(
        "deferred, 2 micro-batches",
        _steps(network(2, buffers=(1,)), micro_batches=2, deferred=True),
        steps=1,
        spills=True,
    ),
    Scenario("deferred, evaluated", _steps(network(2), deferred=True), spills=True, flushes=True),
    Scenario(
        "values, buffers", _steps(network(2, buffers=(1,)), deferred=True), steps=1, values=True
    ),
    Scenario("values, several readers", _steps(network(3, skip=True)), steps=1, values=True),
    Scenario("trees", _steps(network(2, buffers=(2,))), steps=4, commit_every=2, spills=True),
    Scenario(
        "trees, each step",
        _steps(network(3, buffers=(2,), frozen=(1,)), micro_batches=2),
        whole=True,
        spills=True,
    ),
    Scenario(
        "trees, deferred, each step",
        _steps(network(2), deferred=True),
        whole=True,
        spills=True,
    ),
    Scenario(
        "trees, deferred", _steps(network(2), deferred=True), steps=3, commit_every=2, spills=True
    ),
]
"""A second or less each; together they need every rule."""

LARGE = [
    Scenario("fused, 4 segments, 3 steps", _steps(network(4)), steps=3, free_slots=2, disks=2),
    Scenario(
        "fused, tied, several readers, 2 micro-batches",
        _steps(network(4, **_SHARED), micro_batches=2),
        free_slots=2,
        disks=3,
    ),
    Scenario(
        "fused, tied, several readers, 2 micro-batches, spilled",
        _steps(network(3, **_SHARED), micro_batches=2),
        steps=3,
        spills=True,
    ),
    Scenario("deferred, 3 segments", _steps(network(3, buffers=(2,)), deferred=True), disks=2),
    Scenario(
        "deferred, 3 segments, spilled",
        _steps(network(3, buffers=(2,)), deferred=True),
        spills=True,
    ),
    Scenario(
        "deferred, tied, 2 micro-batches",
        _steps(network(2, tied=True, buffers=(1,)), micro_batches=2, deferred=True),
        steps=3,
        spills=True,
    ),
    Scenario(
        "values, deferred",
        _steps(network(3, buffers=(2,)), deferred=True),
        values=True,
    ),
    Scenario(
        "values, several readers, buffers",
        _steps(network(3, skip=True, buffers=(2,))),
        values=True,
    ),
    Scenario(
        "values, deferred, spilled",
        _steps(network(2, buffers=(1,)), micro_batches=2, deferred=True),
        steps=1,
        spills=True,
        values=True,
    ),
    Scenario(
        "values, 2 micro-batches",
        _steps(network(3, buffers=(1,)), micro_batches=2),
        values=True,
    ),
    Scenario(
        "deferred, 3 segments, evaluated",
        _steps(network(3), deferred=True),
        spills=True,
        flushes=True,
        free_slots=2,
    ),
    Scenario(
        "trees, 3 segments",
        _steps(network(3, buffers=(1, 3)), micro_batches=2),
        steps=5,
        commit_every=2,
        spills=True,
    ),
]
"""Up to minutes each."""
