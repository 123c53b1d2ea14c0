"""What a device with memory of its own is sent while it computes: what comes next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from swaptrain.capture.captured import Captured
from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.object_tensors import object_view, views
from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["Ahead", "needed_bytes"]

_KINDS = {Kind.STATE, Kind.VALUE, Kind.GRADIENT, Kind.SAVED}
"""What may be copied to the device before the instruction that reads it."""


class Ahead:
    """Copies to the device what later instructions read, after the operands of the one that runs.

    An instruction is waited for with the copies that were begun beside it. So state that is needed
    several instructions later is spread over these: all of it at once would take longer than one
    micro-batch computes.
    """

    def __init__(self, captured: Captured, layouts: Layouts, device: ComputeDevice) -> None:
        self._captured, self._layouts, self._device = captured, layouts, device
        self._coming: Iterable[Instruction] = ()
        self._ready: Callable[[ObjectKey], Slab | None] = lambda _: None
        self._beside: Sequence[Instruction] = ()

    def expect(
        self,
        coming: Iterable[Instruction],
        ready: Callable[[ObjectKey], Slab | None],
        *,
        beside: Sequence[Instruction],
    ) -> None:
        """Say what comes after the next instruction that is executed, and what is under way.

        `ready` gives the slab of an object that is in memory, which nobody writes to meanwhile.
        """
        self._coming, self._ready, self._beside = coming, ready, beside

    def has_room(self, pair: Sequence[Instruction]) -> bool:
        """Whether the device has the memory for two instructions under way."""
        return needed_bytes(pair, self._captured, self._layouts) <= self._device.ahead_bytes

    def fetch(self, instruction: Instruction) -> None:
        """Begin to copy what comes after an instruction whose own operands are on their way.

        State up to the first instruction of the segment that comes next, and all that the next
        instruction reads, as far as the device has room; not what changes until then.
        """
        coming, self._coming = self._coming, ()
        room = self._device.ahead_bytes
        if not room:
            return
        room -= needed_bytes([*self._beside, instruction], self._captured, self._layouts)
        known = set(instruction.touches)
        for distance, later in enumerate(coming):
            slabs: dict[ObjectKey, Slab] = {}
            for key in later.needs:
                if key in known or key.kind not in _KINDS or key.of is Of.BUFFERS_BEFORE:
                    continue
                if distance and key.kind is not Kind.STATE:
                    continue
                known.add(key)
                slab = self._ready(key)
                room -= self._layouts.size_bytes(key)
                if slab is None or room < 0:
                    self._copy(later.segment, slabs, distance + 1)
                    return
                slabs[key] = slab
            room_left = self._copy(later.segment, slabs, distance + 1)
            if later.segment != instruction.segment or not room_left:
                return
            known.update(later.changes, later.writes)

    def _copy(self, segment: int, slabs: dict[ObjectKey, Slab], instructions: int) -> bool:
        """Begin to copy the part of these objects that falls to one of so many instructions.

        False where the device has no room for it.
        """
        missing = [  # `host` in the tensor's shape; of what autograd saved uint8, [n]
            (key, name, host)
            for key, slab in slabs.items()
            for name, host in (
                views(self._layouts.array(key), slab)
                if key.kind is Kind.STATE
                else {"": object_view(self._layouts, key, slab)}
            ).items()
            if not self._device.has(segment, key, name)
        ]
        share = sum(host.nbytes for *_, host in missing) / instructions
        for key, name, host in missing:
            if share <= 0:
                return True
            if not self._device.fetch_ahead(segment, key, name, host):
                return False
            share -= host.nbytes
        return True


def needed_bytes(
    instructions: Collection[Instruction], captured: Captured, layouts: Layouts
) -> int:
    """Return what instructions take on the device at most, one after the other.

    From the graph's own sizes: the objects that they touch, which may be on their way until the
    last has ended, and every tensor that the segment of one computes, decoded weights among them.
    """
    computed = [captured.computed_by(i) for i in instructions if i.segment and not i.is_exchange]
    held = sum(layouts.size_bytes(key) for key in {k for i in instructions for k in i.touches})
    most = max(
        (s.at_once_bytes + captured.model.decoded_bytes(s.parameters) for s in computed),
        default=0,
    )
    return held + most
