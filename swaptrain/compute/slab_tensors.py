"""The tensors that lie in an instruction's slabs, where they are computed with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.object_tensors import object_view, views
from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Instruction, Kind, ObjectKey
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["SlabTensors", "Slabs"]

Slabs = Mapping[ObjectKey, Slab]


class SlabTensors:
    """Views of slabs on the host, and the device's own tensors of them.

    On a CPU the two are one.
    """

    def __init__(self, layouts: Layouts, device: ComputeDevice) -> None:
        self._layouts, self._device = layouts, device

    def views(self, key: ObjectKey, slabs: Slabs) -> dict[str, Tensor]:
        """Return the tensors of an array on the host, by name."""
        return views(self._layouts.array(key), slabs[key])

    def view(self, key: ObjectKey, slabs: Slabs) -> Tensor:
        """Return an object that is one tensor on the host."""
        return object_view(self._layouts, key, slabs[key])

    def named(self, key: ObjectKey, slabs: Slabs, *, read: bool = True) -> dict[str, Tensor]:
        """Return the tensors of an array on the device; without `read` they hold anything."""
        return self.fetched(key, self.views(key, slabs), read=read)

    def fetched(
        self, key: ObjectKey, hosts: Mapping[str, Tensor], *, read: bool = True
    ) -> dict[str, Tensor]:
        """Return the device's tensors of an array whose `views` are known."""
        return {n: self._device.fetch(key, n, host, read=read) for n, host in hosts.items()}

    def fetch(self, key: ObjectKey, slabs: Slabs) -> Tensor:
        """Return an object that is one tensor on the device."""
        return self._device.fetch(key, "", self.view(key, slabs))

    def accumulators(
        self, instruction: Instruction, slabs: Slabs, *, read: bool
    ) -> dict[str, Tensor]:
        """Return the sums of gradients that an instruction touches, on the device."""
        for key in instruction.touches:
            if key.kind is Kind.ACCUMULATOR:
                return self.named(key, slabs, read=read)
        return {}

    def saved(self, keys: Iterable[ObjectKey], slabs: Slabs, *, read: bool = True) -> Tensor | None:
        """Return the memory of what autograd saves, where there is any among `keys`; uint8."""
        for key in keys:
            if key.kind is Kind.SAVED:
                return self._device.fetch(key, "", self.view(key, slabs), read=read)
        return None
