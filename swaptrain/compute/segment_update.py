"""What an update does to the parameters that a segment owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.device_prefetch import Ahead
from swaptrain.compute.gradient_norms import GradientNorms
from swaptrain.compute.slab_tensors import Slabs, SlabTensors
from swaptrain.compute.split_master import storage_order
from swaptrain.compute.state_codecs import scales_of
from swaptrain.compute.update import Rules
from swaptrain.program.instructions import Instruction, Kind, ObjectKey
from swaptrain.program.model import ModelSpec, ParameterSpec
from swaptrain.program.roles import role_of
from swaptrain.program.state_arrays import array_of
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["SegmentUpdate"]


@dataclass(frozen=True)
class _Arrays:
    """The state that an instruction changes, by array and parameter, and its sums of gradients."""

    keys: dict[str, ObjectKey]
    hosts: dict[str, dict[str, Tensor]]
    tensors: dict[str, dict[str, Tensor]]
    """On the device."""
    sums: dict[str, Tensor]
    """Of gradients, by parameter, in its shape."""

    def piece(self, array: str, parameter: ParameterSpec, piece: slice | None) -> Tensor:
        """Return an array's tensor of a parameter, or what of it belongs to a piece, [n]."""
        tensor = self.tensors[array][parameter.name]
        if piece is None or self.keys[array].part >= 0:
            return tensor
        return _piece_of(tensor, piece, parameter.tensor.numel)


class SegmentUpdate:
    """Updates a segment on its slabs, or the part of it that an instruction has."""

    def __init__(
        self,
        model: ModelSpec,
        layouts: Layouts,
        rules: Rules,
        device: ComputeDevice,
        ahead: Ahead,
    ) -> None:
        self.rules = rules
        self._model, self._layouts = model, layouts
        self._device, self._ahead = device, ahead
        self._tensors = SlabTensors(layouts, device)
        self._bring_back = device.bring_back if device.overlaps else None
        self._norms: GradientNorms
        """Of the gradients that the update which is under way has come to."""

    def norms(
        self, instruction: Instruction, slabs: Slabs, step: int, scale: float | None
    ) -> GradientNorms:
        """As `Operations.norms`."""
        self._device.begin(instruction.segment)
        norms = self._new_norms(instruction, step, scale)
        for name, gradient in self._tensors.accumulators(instruction, slabs, read=True).items():
            norms.add(name, gradient)
        norms.send()
        return norms

    def update(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        rate: Callable[[float], float],
        coefficient: Tensor | None,
        skipped: int,
    ) -> GradientNorms | None:
        """As `Operations.update`."""
        k = instruction.segment
        self._device.begin(k)
        arrays = self._arrays(instruction, slabs)
        self._ahead.fetch(instruction)
        pieces = self._pieces(arrays.keys.values())
        whole = self._layouts.undivided[k].parameters if pieces is not None else frozenset()
        if not instruction.part:
            self._norms = self._new_norms(instruction, step)
        norms = self._norms if coefficient is None else None
        for name in self._model.segment(k).owns:
            parameter = self._model.parameters[name]
            piece = None if pieces is None else pieces.get(name)
            elsewhere = pieces is not None and piece is None
            if elsewhere and (instruction.part or name not in whole):
                continue
            if parameter.trainable:
                self._update(
                    parameter,
                    arrays,
                    piece,
                    norms,
                    rate=rate,
                    coefficient=coefficient,
                    updates_before=step - 1 - skipped,
                )
        for array, tensors in arrays.tensors.items():
            for name, tensor in tensors.items() if role_of(array).is_for_updates else ():
                self._device.put(arrays.hosts[array][name], tensor)
        if norms is not None:
            norms.send()
        return norms

    def _update(
        self,
        parameter: ParameterSpec,
        arrays: _Arrays,
        piece: slice | None,
        norms: GradientNorms | None,
        *,
        rate: Callable[[float], float],
        coefficient: Tensor | None,
        updates_before: int,
    ) -> None:
        """Update one parameter, or a piece of it: a slice of its elements in storage order."""
        name = parameter.name
        array = array_of(parameter, self._layouts.compute_dtype)
        host, weights = arrays.hosts[array][name], arrays.tensors[array][name]
        gradient = arrays.sums[name]
        rule = self.rules(name)
        state = {
            stored: arrays.piece(stored, parameter, piece)
            for stored in rule.stored(parameter.tensor.shape)
        }
        if piece is not None:
            host, weights, gradient = (  # [n] each
                storage_order(tensor)[piece] for tensor in (host, weights, gradient)
            )
        named, first = parameter.place_of(0 if piece is None else piece.start)
        lr, decay = rate(rule.lr), parameter.decays or rule.decays_all
        if parameter.split or parameter.rounded:
            lower = arrays.piece(parameter.lower[0], parameter, piece) if parameter.split else None
            rule.update_split(
                weights, lower, gradient, state,
                coefficient=coefficient, updates_before=updates_before, lr=lr, decay=decay,
                look=None if norms is None else partial(norms.add, name),
                name=named, first=first,
            )  # fmt: skip
        else:
            if norms is not None and name not in norms:
                # Of the whole gradient: in this precision the norm has plain's bits.
                norms.add(name, arrays.sums[name])
            if coefficient is not None:
                gradient.mul_(coefficient)
            rule.update(
                weights, gradient, state,
                updates_before=updates_before, lr=lr, decay=decay, name=named, first=first,
            )  # fmt: skip
        self._device.put(host, weights)

    def _arrays(self, instruction: Instruction, slabs: Slabs) -> _Arrays:
        keys = {key.name: key for key in instruction.changes if key.kind is Kind.STATE}
        hosts = {name: self._tensors.views(key, slabs) for name, key in keys.items()}
        tensors = {name: self._tensors.fetched(key, hosts[name]) for name, key in keys.items()}
        sums = self._tensors.accumulators(instruction, slabs, read=True)
        return _Arrays(keys, hosts, tensors, sums)

    def _new_norms(
        self, instruction: Instruction, step: int, scale: float | None = None
    ) -> GradientNorms:
        return GradientNorms(
            segment=instruction.segment, step=step, bring_back=self._bring_back, scale=scale
        )

    def _pieces(self, keys: Iterable[ObjectKey]) -> dict[str, slice] | None:
        """Return which elements of each parameter's memory a part of an update has."""
        pieces: dict[str, slice] | None = None
        for key in keys:
            if key.part >= 0:
                entries = self._layouts.array(key).entries
                pieces = pieces or {}
                pieces |= {
                    e.tensor.name: slice(e.start, e.start + e.tensor.extent) for e in entries
                }
        return pieces


def _piece_of(state: Tensor, piece: slice, elements: int) -> Tensor:
    """Return what belongs to a piece of a parameter: of its elements, or of their scales."""
    flat = storage_order(state)  # [elements], or the scales of these
    if flat.numel() == elements:
        return flat[piece]
    return flat[scales_of(piece)]
