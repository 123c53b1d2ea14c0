"""What helps where one trained parameter decides a budget: fewer tokens do not."""

from __future__ import annotations

from swaptrain.program.model import ModelSpec, ParameterSpec
from swaptrain.program.row_ranges import RangeSizes

__all__ = ["remedy_of"]


def remedy_of(model: ModelSpec, instruction_bytes: int, said: RangeSizes) -> str | None:
    """Return what helps where a parameter is most of the largest instruction; else None.

    To stand behind a number that is enough. `said` is what the config says of sizes of ranges.
    """
    decides = _deciding(model, instruction_bytes)
    if decides is None:
        return None
    name = decides.name
    if decides.rows is not None:
        key = "experts" if len(decides.tensor.shape) == 3 else "rows"
        if (most := getattr(said, key)) is not None:
            return f", or memory.{key}, which is {most}, to less, or to null"
        name = decides.rows.whole
    return (
        f", which {name} alone decides: as a part of a base that stays as it is (lora, or "
        "train.freeze) it takes about a third"
    )


def _deciding(model: ModelSpec, instruction_bytes: int) -> ParameterSpec | None:
    """Return the trained parameter that is most of an instruction, with gradient and state.

    An update has the state beside it, as much again as both, or a part of it.
    """
    # A head comes last, and is not divided where the embedding may be.
    trained = (p for p in reversed(list(model.parameters.values())) if p.trainable)
    largest = max(trained, key=lambda p: p.tensor.numel, default=None)
    if largest is None:
        return None
    own_bytes = largest.tensor.nbytes + 4 * largest.tensor.numel
    return largest if 3 * own_bytes > instruction_bytes else None
