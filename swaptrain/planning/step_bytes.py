"""What a step has to read and write of a plan's state, and what crosses between its segments."""

from __future__ import annotations

from swaptrain.config.schema import Config
from swaptrain.planning.planner import Plan
from swaptrain.program.cost import StateBytes, least_traffic_bytes
from swaptrain.program.roles import Role
from swaptrain.store.format.root import RootRecord

__all__ = ["boundary_bytes", "least_bytes", "state_bytes", "with_commit_unit"]


def state_bytes(made: Plan) -> StateBytes:
    """Return the bytes of a model's state by how often a step needs them."""
    weights = rest = frozen = below = 0
    for layout in made.layouts.state.values():
        for array in layout.arrays:
            if array.role is Role.WEIGHTS:
                weights += array.nbytes
            else:
                rest += array.nbytes
    for k, layout in made.layouts.frozen.items():
        if made.builder.objects.learns(made.captured.model.segment(k)):
            frozen += layout.nbytes
        else:
            below += layout.nbytes
    owns = made.builder.ranks.owns
    gradients = sum(a.nbytes for k, a in made.layouts.accumulators.items() if owns(k))
    return StateBytes(weights, rest, gradients if made.builder.deferred else 0, frozen, below)


def boundary_bytes(made: Plan) -> int:
    """Return the bytes of a step's values that cross from one segment to another."""
    values = made.captured.model.values.values()
    crossing = sum(v.tensor.nbytes for v in values if v.producer and v.readers)
    return crossing * made.builder.micro_batches


def least_bytes(made: Plan, config: Config) -> float:
    """Return the lower bound of a step's traffic, with the pool of the plan as the cache."""
    return least_traffic_bytes(
        state_bytes(made),
        boundary_bytes(made),
        made.pool_bytes,
        commit_every=config.store.commit.every,
        unit="step" if config.store.commit.is_whole else "segment",
    )


def with_commit_unit(config: Config, made: Plan, root: RootRecord | None) -> Config:
    """Return the config with `store.commit.unit` written out: as recorded, or as it is best.

    To commit inside a step is to write what crosses between its segments, twice; to commit the
    whole is to hold the state twice, and to do a step again after a kill. So the whole where the
    state is the smaller of the two.
    """
    commit = config.store.commit
    if root is not None:
        unit = root.unit
    elif commit.unit is not None:
        unit = commit.unit
    else:
        small = state_bytes(made).write_bytes < boundary_bytes(made)
        unit = "step" if small or commit.every > 1 else "segment"
    commit = commit.model_copy(update={"unit": unit})
    store = config.store.model_copy(update={"commit": commit})
    return config.model_copy(update={"store": store})
