"""Where on the disk the objects of a step lie, but for the slots."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.program.double_buffer import buffer_index
from swaptrain.program.forwards import recoverable
from swaptrain.program.instructions import Kind, ObjectKey, Operation
from tests.protocol.disk import Place
from tests.protocol.rules import Rule
from tests.protocol.run import Scenario

__all__ = ["Places"]


@dataclass(frozen=True)
class Places:
    """The spill of a scenario."""

    scenario: Scenario
    rules: frozenset[Rule]

    def row(self, key: ObjectKey) -> Place:
        """Return the row of a gradient's file."""
        buffer = (
            buffer_index(self.scenario.builder.model, key)
            if Rule.DOUBLE_BUFFERED_HANDOFF in self.rules
            else 0
        )
        return ("gradients", key.label, buffer, key.micro_batch)

    def all(self) -> list[Place]:
        """Return all of them."""
        if self.scenario.is_whole:
            return []
        step = self.scenario.builder.step()
        places: dict[Place, None] = {}
        for instruction in step:
            for key in instruction.writes:
                if key.kind is Kind.GRADIENT:
                    places[self.row(key)] = None
            if instruction.operation is Operation.NORMS:
                places["finished", instruction.segment, "record"] = None
                places.update(dict.fromkeys(map(self.finished_place, instruction.reads)))
        if self.scenario.values:
            places.update(dict.fromkeys(map(self.value_place, recoverable(step))))
        return list(places)

    def finished_place(self, key: ObjectKey) -> Place:
        """Return where a finished gradient, or its buffers, lie beside their slot."""
        return ("finished", key.segment, key.name)

    def value_place(self, key: ObjectKey) -> Place:
        """Return where a value, or buffers, lie on the disk between forward and backward."""
        return ("values", key.label, key.segment, key.micro_batch)
