"""An evaluation as a list of instructions: forwards without gradients, each batch once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of, Operation
from swaptrain.program.model import SegmentSpec, ValueSpec
from swaptrain.program.objects import Objects
from swaptrain.program.roles import Role
from swaptrain.program.sharing import share

__all__ = ["EvaluationSpec", "evaluation", "value_prefix"]


@dataclass(frozen=True)
class EvaluationSpec:
    """The graph of one batch size in evaluation mode, cut into slices."""

    number: int
    """Among the graphs of an evaluation: the last, smaller batch has one of its own."""
    batches: int
    """How many batches of this size an evaluation has."""
    slices: tuple[SegmentSpec, ...]
    """In the order of the forward. They own nothing: they read what training's segments own."""
    values: Mapping[str, ValueSpec]
    given: str
    """The value of the last slice: a vector that begins with the loss."""


def value_prefix(number: int) -> str:
    """Return how the names of a graph's values begin: those of two graphs lie side by side."""
    return f"eval{number}."


def evaluation(
    graphs: Sequence[EvaluationSpec], objects: Objects, *, together: int
) -> list[Instruction]:
    """Return the forward of all batches of all graphs; nothing is freed yet.

    `together` batches pass the slices at a time in each rank. Batches are numbered through all
    graphs. The last, smaller one passes with those before it where its slices read the weights that
    theirs read. A rank that has none left of a pass brings its weights all the same.
    """
    program: list[Instruction] = []
    ranks = objects.ranks
    for every in _passes(graphs, objects, together * ranks.count):
        first, last = ranks.rank * together, (ranks.rank + 1) * together
        members = every[first : last if ranks.rank + 1 < ranks.count else None]
        program += [_load(graphs[number], m) for number, m in members]
        longest = max((graphs[number] for number, _ in every), key=lambda g: len(g.slices))
        for index in range(1, len(longest.slices) + 1):
            shared = share(longest.slices[index - 1], objects, graph=longest.number)
            program += [] if shared is None else [shared]
            for number, m in members:
                if index <= len(graphs[number].slices):
                    program.append(_evaluate(graphs[number], index, m, objects))
    return program


def _passes(
    graphs: Sequence[EvaluationSpec], objects: Objects, together: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield (graph, batch) of the batches that pass the slices together."""
    begun = 0
    pending: list[tuple[int, int]] = []
    for graph in graphs:
        if pending and not _alike(graphs[graph.number - 1], graph, objects):
            yield pending
            pending = []
        for first in range(begun, begun + graph.batches, together):
            last = min(first + together, begun + graph.batches)
            members = [(graph.number, m) for m in range(first, last)]
            if pending and pending[-1][0] == graph.number:
                yield pending
                pending = []
            pending = [*pending, *members]
        begun += graph.batches
    if pending:
        yield pending


def _alike(left: EvaluationSpec, right: EvaluationSpec, objects: Objects) -> bool:
    """Whether the slices of two graphs read the same state, one by one."""
    return [_state(s, objects) for s in left.slices] == [_state(s, objects) for s in right.slices]


def _state(part: SegmentSpec, objects: Objects) -> tuple[ObjectKey, ...]:
    """Return the arrays of weights and of buffers that a slice reads, whoever owns them."""
    model = objects.model
    buffers = {
        ObjectKey(
            Kind.STATE, Role.BUFFERS.array(model.buffers[name].tensor.dtype), model.owner[name]
        ): None
        for name in part.buffers
    }
    return (*objects.weights(part), *buffers)


def _load(graph: EvaluationSpec, m: int) -> Instruction:
    brought = [v.name for v in graph.values.values() if v.producer == 0 and v.readers]
    writes = _values(graph, brought, m)
    return Instruction(Operation.LOAD, 0, m, graph=graph.number, writes=writes)


def _evaluate(graph: EvaluationSpec, index: int, m: int, objects: Objects) -> Instruction:
    part = graph.slices[index - 1]
    outputs = [n for n in part.outputs if graph.values[n].readers]
    return Instruction(
        Operation.EVALUATE,
        index,
        m,
        graph=graph.number,
        reads=(*_state(part, objects), *_values(graph, part.inputs, m)),
        writes=_values(graph, outputs, m),
    )


def _values(graph: EvaluationSpec, names: Iterable[str], m: int) -> tuple[ObjectKey, ...]:
    return tuple(
        ObjectKey(Kind.VALUE, name, graph.values[name].producer, m, of=Of.EVALUATION)
        for name in names
    )
