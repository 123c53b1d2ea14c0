"""What each instruction does to the slabs it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.compute.blocks import add_widened
from swaptrain.compute.device import ComputeDevice
from swaptrain.compute.device_prefetch import Ahead
from swaptrain.compute.gradient_norms import GradientNorms
from swaptrain.compute.object_tensors import clear_padding, copy_into, object_view, views
from swaptrain.compute.runner import Operands, Runner
from swaptrain.compute.saved_tensors import SavedTensors
from swaptrain.compute.split_master import storage_order
from swaptrain.compute.state_codecs import scales_of
from swaptrain.compute.update import Rules
from swaptrain.memory.slab import Slab
from swaptrain.models.quantization import decode
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.model import ParameterSpec
from swaptrain.program.roles import Role, role_of
from swaptrain.program.state_arrays import array_of, arrays_of
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["Operations", "Slabs"]

Slabs = Mapping[ObjectKey, Slab]


class Operations:
    """Computes on slabs; knows nothing of disk, commits or order.

    On a device that computes beside the host nothing is waited for: what is made is in the slabs
    after `device.wait`, and norms are read there.
    """

    def __init__(
        self,
        captured: Captured,
        layouts: Layouts,
        runner: Runner,
        rules: Rules,
        device: ComputeDevice,
    ) -> None:
        self._captured, self._layouts = captured, layouts
        self._model = captured.model
        self._runner, self.rules, self.device = runner, rules, device
        self._norms: GradientNorms
        """Of the gradients that the update which is under way has come to."""
        self.ahead = Ahead(captured, layouts, device)
        self._bring_back = device.bring_back if device.overlaps else None
        self._visit: tuple[int, int] | None = None
        self._decoded: dict[str, Tensor] = {}
        """Weights that lie as codes, for the segment whose micro-batches are computed."""
        self.decode = decode
        """The dry run puts another one in its place."""
        runner.move_to(device.device, self._bring_back)

    def forget(self, instruction: Instruction) -> None:
        """Drop the device's copies of what is dead, or belongs to one micro-batch.

        The next instruction is of another one: a visit of many needs no more memory than of one.
        The same for what belongs to one part of an update, and for what only an update reads.
        """
        passed = {
            key
            for key in instruction.touches
            if key.micro_batch >= 0
            or key.part >= 0
            or (key.kind is Kind.STATE and key.role.is_for_updates)
            or instruction.operation is Operation.COLLECT  # the sums of all are on the host
        }
        for key in passed.union(instruction.frees):
            self.device.forget(key)

    def load(self, instruction: Instruction, slabs: Slabs, batch: Mapping[str, Tensor]) -> None:
        """Put a micro-batch's tensors into their slabs."""
        for key in instruction.writes:
            copy_into(self._host_view(key, slabs), batch[key.name.partition("batch.")[2]])

    def forward(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        weights: StepWeights | None = None,
    ) -> None:
        """Run a forward; keep the buffers from before it when the segment mutates any."""
        self.device.begin(instruction.segment)
        self._keep_buffers(instruction, slabs)
        operands = self._operands(instruction, slabs)
        self.ahead.fetch(instruction)
        memory = self._saved(instruction.writes, slabs, read=False)
        outputs = self._runner.forward(
            instruction.segment, step, instruction.micro_batch, operands, memory, weights
        )
        self._put_saved(instruction, slabs, memory)
        self._put_buffers(instruction, slabs, operands)
        self._store_outputs(instruction, slabs, outputs)

    def measure_saved(self, instruction: Instruction, slabs: Slabs) -> SavedTensors:
        """Run a forward for nothing; return what autograd would save, counted but not kept."""
        self.device.begin(instruction.segment)
        return self._runner.measure_saved(instruction.segment, self._operands(instruction, slabs))

    def evaluate(
        self, instruction: Instruction, slabs: Slabs, *, weights: StepWeights | None = None
    ) -> Tensor | None:
        """Run a forward in evaluation mode; return what it gives where the segment makes that.

        A vector in float64, [n]: the loss, and the numbers beside it.
        """
        self.device.begin(instruction.segment)
        graph = instruction.graph
        operands = self._operands(instruction, slabs)
        outputs = self._runner.evaluate(
            graph, instruction.segment, instruction.micro_batch, operands, weights
        )
        self._store_outputs(instruction, slabs, outputs)
        return outputs.get(self._captured.evaluations[graph].spec.given)

    def backward(
        self,
        instruction: Instruction,
        slabs: Slabs,
        step: int,
        *,
        sums_stay: bool = False,
        weights: StepWeights | None = None,
        scale: float = 1.0,
    ) -> Tensor | None:
        """Propagate gradients, times `scale`; return the loss where the segment makes it.

        Parameter gradients are added to the segment's accumulator, in the order of the
        micro-batches; those of shared parameters become objects for their owner's backward. With
        `sums_stay` the device's copy of the accumulator alone is right afterwards: what comes next
        goes on with it there.
        """
        k, m = instruction.segment, instruction.micro_batch
        self.device.begin(k)
        segment = self._model.segment(k)
        operands = self._operands(instruction, slabs)
        gradients: dict[str, Tensor] = {}
        later: dict[str, Tensor] = {}
        for key in instruction.reads:
            if key.kind is Kind.GRADIENT:
                name = key.name.removeprefix("parameter.")
                incoming = name in segment.outputs and name == key.name
                (gradients if incoming else later)[name] = self._fetch(key, slabs)
        for key in instruction.writes:
            # The disk gets it, and records a checksum: a step made again has to give the same.
            clear_padding(self._layouts.array(key), slabs[key])
        first = any(key.kind is Kind.ACCUMULATOR for key in instruction.writes)
        sums = self._accumulators(instruction, slabs, read=not first)
        partial = {
            key.name.removeprefix("parameter."): key
            for key in instruction.writes
            if key.kind is Kind.GRADIENT and key.name.startswith("parameter.")
        }
        missing = set(sums) if first else set()
        hooks = self._runner.hooks
        memory = self._saved(instruction.reads, slabs)
        self.ahead.fetch(instruction)

        def sink(name: str, gradient: Tensor) -> None:
            if name in partial:
                self.device.store(self._host_view(partial[name], slabs), gradient)
            elif name in missing:
                sums[name].copy_(gradient)
                missing.discard(name)
            else:
                add_widened(sums[name], gradient)
            if name in hooks and name not in partial:
                hooks[name].run_accumulated(operands.parameters[name], sums[name])

        inputs, loss = self._runner.backward(
            k, step, m, operands, gradients, later, sink, memory, weights, scale
        )
        for name in missing:  # nothing flowed into it in this micro-batch
            sums[name].zero_()
        for key in () if sums_stay else instruction.touches:
            if key.kind is Kind.ACCUMULATOR:
                for name, host in self._views(key, slabs).items():
                    self.device.put(host, sums[name])
        if instruction.operation is Operation.TURN:
            self._put_buffers(instruction, slabs, operands)
        for key in instruction.writes:
            if key.kind is Kind.GRADIENT and key.name in inputs:
                gradient = inputs[key.name]
                target = self._host_view(key, slabs)
                if gradient is None:
                    target.zero_()
                else:
                    self.device.store(target, gradient)
        return loss

    def norms(
        self, instruction: Instruction, slabs: Slabs, step: int, scale: float | None = None
    ) -> GradientNorms:
        """Return the 2-norm of each parameter's gradient, for clipping, without its `scale`.

        Norms are taken of whole parameters in their own layout, as torch's clipping does.
        """
        self.device.begin(instruction.segment)
        norms = self._new_norms(instruction, step, scale)
        for name, gradient in self._accumulators(instruction, slabs, read=True).items():
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
        skipped: int = 0,
    ) -> GradientNorms | None:
        """Do update `step` on every parameter that the segment owns, in place on its slabs.

        So many updates of steps before it were `skipped`.

        `rate` gives the learning rate of the step, of the one that a rule has. Of a part of an
        update, on what lies in that part. Without a `coefficient`, which comes of
        norms, returns those of the gradients in this part and in those before it. Where one is not
        finite NotFiniteError is raised, here or when they are read: what the slabs hold then
        must not be kept.
        """
        k = instruction.segment
        self.end_visit()
        self.device.begin(k)
        state_keys = {key.name: key for key in instruction.changes if key.kind is Kind.STATE}
        hosts = {name: self._views(key, slabs) for name, key in state_keys.items()}
        arrays = {name: self._fetched(key, hosts[name]) for name, key in state_keys.items()}
        sums = self._accumulators(instruction, slabs, read=True)
        self.ahead.fetch(instruction)
        pieces = self._pieces(state_keys.values())
        whole = self._layouts.undivided[k].parameters if pieces is not None else frozenset()
        if not instruction.part:
            self._norms = self._new_norms(instruction, step)
        norms = self._norms if coefficient is None else None
        for name in self._model.segment(k).owns:
            parameter = self._model.parameters[name]
            piece = None
            if pieces is not None:
                piece = pieces.get(name)
                if piece is None and (instruction.part or name not in whole):
                    continue
            if not parameter.trainable:
                continue
            array = array_of(parameter, self._layouts.compute_dtype)
            host, weights, gradient = hosts[array][name], arrays[array][name], sums[name]
            rule = self.rules(name)
            state = {array: arrays[array][name] for array in rule.stored(parameter.tensor.shape)}
            if piece is not None:
                host, weights, gradient = (
                    storage_order(tensor)[piece] for tensor in (host, weights, gradient)
                )
                for array, tensor in state.items():
                    if state_keys[array].part < 0:
                        state[array] = _piece_of(tensor, piece, parameter.tensor.numel)
            named, first = parameter.place_of(0 if piece is None else piece.start)
            lr, decay = rate(rule.lr), parameter.decays or rule.decays_all
            halves = parameter.split or parameter.rounded
            if norms is not None and not halves and name not in norms:
                norms.add(name, sums[name])  # whole: in this precision the norm has plain's bits
            if halves:
                lower = None
                if parameter.split:
                    array, _ = parameter.lower
                    lower = arrays[array][name]
                    if piece is not None and state_keys[array].part < 0:
                        lower = _piece_of(lower, piece, parameter.tensor.numel)
                rule.update_split(
                    weights, lower, gradient, state,
                    coefficient=coefficient, updates_before=step - 1 - skipped, lr=lr, decay=decay,
                    look=None if norms is None else partial(norms.add, name),
                    name=named, first=first,
                )  # fmt: skip
            else:
                if coefficient is not None:
                    gradient.mul_(coefficient)
                rule.update(
                    weights, gradient, state,
                    updates_before=step - 1 - skipped, lr=lr, decay=decay, name=named, first=first,
                )  # fmt: skip
            self.device.put(host, weights)
        for array, tensors in arrays.items():
            for name, tensor in tensors.items() if role_of(array).is_for_updates else ():
                self.device.put(hosts[array][name], tensor)
        if norms is not None:
            norms.send()
        return norms

    def begin_visit(self, instruction: Instruction, slabs: Slabs) -> None:
        """Decode the weights of a segment; the instructions on it find them decoded."""
        self.device.begin(instruction.segment)
        self._operands(instruction, slabs)

    def end_visit(self) -> None:
        """Let go of decoded weights."""
        self._visit = None
        self._decoded.clear()

    def _new_norms(
        self, instruction: Instruction, step: int, scale: float | None = None
    ) -> GradientNorms:
        bring_back = self._bring_back
        return GradientNorms(
            segment=instruction.segment, step=step, bring_back=bring_back, scale=scale
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

    def _decode(self, parameter: ParameterSpec, codes: Tensor, scales: Tensor) -> Tensor:
        assert parameter.quantized is not None
        tensor = parameter.tensor
        weight = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=codes.device)
        self.decode(codes, scales, parameter.quantized, weight)
        return weight

    def _operands(self, instruction: Instruction, slabs: Slabs) -> Operands:
        segment = self._captured.computed_by(instruction)
        owner = self._model.owner
        parameters: dict[str, Tensor] = {}
        tables: dict[ObjectKey, dict[str, Tensor]] = {}
        if self._visit != (visit := (instruction.graph, instruction.segment)):
            self.end_visit()
            self._visit = visit
        for name in segment.parameters:
            if name in self._decoded:
                parameters[name] = self._decoded[name]
                continue
            spec, stored = self._model.parameters[name], []
            for array in arrays_of(spec, self._layouts.compute_dtype):
                key = ObjectKey(Kind.STATE, array, owner[name])
                if key not in slabs:  # another rank has the state, and has sent it
                    key = key._replace(kind=Kind.SHARED)
                if key not in tables:
                    tables[key] = self._views(key, slabs)
                stored.append(self.device.fetch(key, name, tables[key][name]))
            if spec.quantized is not None:
                stored = [self._decoded.setdefault(name, self._decode(spec, *stored))]
            (parameters[name],) = stored
        values = {
            key.name: self._fetch(key, slabs)
            for key in instruction.reads
            if key.kind is Kind.VALUE and not key.name.startswith("before.")
        }
        return Operands(parameters, self._buffers(instruction, slabs), values)

    def _buffers(self, instruction: Instruction, slabs: Slabs) -> dict[str, Tensor]:
        """Return the mutated buffers: the live ones, or copies of what a recomputation starts from.

        An evaluation reads them and changes nothing.
        """
        buffers: dict[str, Tensor] = {}
        for key in instruction.touches:
            if key.kind is Kind.STATE and key.role is Role.BUFFERS:
                buffers.update(self._named(key, slabs))
        for key in instruction.reads:
            if key.name.startswith("before."):
                copies = self._named(key, slabs)
                buffers.update({name: copy.clone() for name, copy in copies.items()})
        return buffers

    def _keep_buffers(self, instruction: Instruction, slabs: Slabs) -> None:
        for key in instruction.writes:
            if key.name.startswith("before."):
                source = ObjectKey(Kind.STATE, key.name.removeprefix("before."), key.segment)
                slabs[key].memory[:] = slabs[source].memory

    def _put_buffers(self, instruction: Instruction, slabs: Slabs, operands: Operands) -> None:
        for key in instruction.changes:
            if key.kind is Kind.STATE:
                for name, target in self._views(key, slabs).items():
                    self.device.put(target, operands.buffers[name])

    def _store_outputs(
        self, instruction: Instruction, slabs: Slabs, outputs: Mapping[str, Tensor]
    ) -> None:
        for key in instruction.writes:
            if key.kind is Kind.VALUE and not key.name.startswith("before."):
                self.device.store(self._host_view(key, slabs), outputs[key.name])

    def _accumulators(
        self, instruction: Instruction, slabs: Slabs, *, read: bool
    ) -> dict[str, Tensor]:
        for key in instruction.touches:
            if key.kind is Kind.ACCUMULATOR:
                return self._named(key, slabs, read=read)
        return {}

    def _named(self, key: ObjectKey, slabs: Slabs, *, read: bool = True) -> dict[str, Tensor]:
        return self._fetched(key, self._views(key, slabs), read=read)

    def _fetched(
        self, key: ObjectKey, hosts: Mapping[str, Tensor], *, read: bool = True
    ) -> dict[str, Tensor]:
        return {n: self.device.fetch(key, n, host, read=read) for n, host in hosts.items()}

    def _fetch(self, key: ObjectKey, slabs: Slabs) -> Tensor:
        return self.device.fetch(key, "", self._host_view(key, slabs))

    def _saved(
        self, keys: Iterable[ObjectKey], slabs: Slabs, *, read: bool = True
    ) -> Tensor | None:
        """Return the memory of what autograd saves, where an instruction has any; uint8."""
        for key in keys:
            if key.kind is Kind.SAVED:
                return self.device.fetch(key, "", self._host_view(key, slabs), read=read)
        return None

    def _put_saved(self, instruction: Instruction, slabs: Slabs, memory: Tensor | None) -> None:
        for key in instruction.writes:
            if key.kind is Kind.SAVED and memory is not None:
                self.device.put(self._host_view(key, slabs), memory)

    def _views(self, key: ObjectKey, slabs: Slabs) -> dict[str, Tensor]:
        return views(self._layouts.array(key), slabs[key])

    def _host_view(self, key: ObjectKey, slabs: Slabs) -> Tensor:
        return object_view(self._layouts, key, slabs[key])


def _piece_of(state: Tensor, piece: slice, elements: int) -> Tensor:
    """Return what belongs to a piece of a parameter: of its elements, or of their scales."""
    flat = storage_order(state)
    if flat.numel() == elements:
        return flat[piece]
    return flat[scales_of(piece)]
