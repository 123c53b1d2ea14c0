"""Runs the code of one segment on one micro-batch: forward, backward, recomputation if needed.

M micro-batches of a step; tensors lie on the compute device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from swaptrain.capture.captured import Captured
from swaptrain.capture.guards.hooks import ParameterHooks
from swaptrain.capture.losses.weighting import StepWeights, weighted
from swaptrain.capture.randomness import draws
from swaptrain.capture.segments import Code
from swaptrain.capture.to_device import place
from swaptrain.compute.memoryless import MemorylessTensors
from swaptrain.compute.saved_tensors import SavedTensors

__all__ = ["GradientSink", "Operands", "Runner"]

GradientSink = Callable[[str, Tensor], None]
"""Takes a parameter's name and its gradient of one micro-batch, in the parameter's layout."""


@dataclass(frozen=True)
class Operands:
    """The tensors that a segment's code is called with, by name."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    values: Mapping[str, Tensor]


@dataclass
class _Graph:
    """What autograd recorded of one forward of a segment."""

    leaves: Mapping[str, Tensor]
    """The parameters and values that get gradients, by name."""
    roots: Mapping[str, Tensor | GradientEdge]
    """The outputs that may get gradients, by name."""
    loss: Tensor | None  # []
    saved: SavedTensors | None
    """None where autograd keeps what it saves itself."""

    def open(self, operands: Mapping[str, Tensor], memory: Tensor) -> bool:
        """Begin the backward with what was saved in `memory`; False where it is of no use."""
        return self.saved is not None and self.saved.open(operands, memory)


class Runner:
    """Calls the code of the segments of one captured model."""

    def __init__(
        self, captured: Captured, *, seed: int, micro_batches: int, first: int = 0
    ) -> None:
        """Take what is run: steps of so many micro-batches, of all ranks together.

        `first` is the step's number of the micro-batch that this rank calls 0.
        """
        self._captured = captured
        self._model = captured.model
        self._seed = seed
        self._micro_batches, self._first = micro_batches, first
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By segment and micro-batch: forwards whose backward need not recompute."""
        self._matches: dict[int, Mapping[int, int | None]] = {}
        """By isomorphism class: `SavedTensors.matches` that `measure_saved` found."""
        self._bring_back: Callable[[Tensor], Tensor] | None = None
        self._memoryless = MemorylessTensors()

    @property
    def hooks(self) -> Mapping[str, ParameterHooks]:
        """What is called with the gradients of parameters, by name."""
        return self._captured.hooks

    def move_to(
        self, device: torch.device, bring_back: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Run the code on `device` from now on; the operands have to lie there.

        `bring_back` is that of a device which computes beside the host.
        """
        self._captured, self._bring_back = place(self._captured, device), bring_back

    def forward(
        self,
        segment: int,
        step: int,
        micro_batch: int,
        operands: Operands,
        memory: Tensor | None = None,
        weights: StepWeights | None = None,
    ) -> dict[str, Tensor]:
        """Return the segment's outputs by name. Mutated buffers change in place.

        With `weights` the loss is the micro-batch's part of the step's, else a mean of its own.

        Runs in grad mode with the flags of the recomputation, since some kernels differ without
        (LSTM, masked attention). What autograd saves is dropped; given `memory` (uint8, [n], as
        many bytes as `measure_saved` says), it is kept there, and the graph until `backward`.
        """
        self._graphs.pop((segment, micro_batch), None)
        if memory is None:
            with saved_tensors_hooks(_drop, _dropped):
                results, _ = self._call(segment, step, micro_batch, operands, weights)
            return {name: result.detach() for name, result in results.items()}
        saved = self._saved_tensors(segment, operands, memory)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            results, leaves = self._call(segment, step, micro_batch, operands, weights)
        saved.seal()
        # Before the leaves lose their memory: an output may be an input as it came.
        outputs = {name: result.detach() for name, result in results.items()}
        if saved.complete:
            graph = _graph_without_memory(results, leaves, saved, self._memoryless)
            self._graphs[segment, micro_batch] = graph
        return outputs

    def measure_saved(self, segment: int, operands: Operands) -> SavedTensors:
        """Run a forward for nothing; return what autograd would save, counted but not kept."""
        saved = self._saved_tensors(segment, operands, None)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            self._call(segment, 0, 0, operands)
        saved.seal()
        self._matches[self._model.segment(segment).isomorphism] = saved.matches
        return saved

    def evaluate(
        self,
        graph: int,
        index: int,
        micro_batch: int,
        operands: Operands,
        weights: StepWeights | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs of slice `index` of an evaluation's graph; nothing is changed.

        What draws in evaluation mode too has the same draws in each evaluation. `weights` are those
        of the batch.
        """
        evaluation = self._captured.evaluations[graph]
        inputs = []
        for binding in evaluation.bindings[index - 1]:
            name = binding.name
            if binding.kind == "parameter":
                tensor = operands.parameters[name].detach()
                tensor.requires_grad_(name in evaluation.flagged)
            elif binding.kind == "value":
                tensor = operands.values[name].detach()
                tensor = tensor.clone() if binding.written else tensor
            elif binding.kind == "buffer":
                tensor = operands.buffers[name]
            else:
                tensor = evaluation.constants[name]
            inputs.append(tensor)
        part = evaluation.spec.slices[index - 1]
        with (
            draws(self._seed, 0, micro_batch, evaluation.random[index - 1]),
            weighted(weights, evaluation.terms[index - 1]),
            torch.no_grad(),
        ):
            results = evaluation.codes[part.isomorphism](*inputs)
        return dict(zip(part.outputs, results, strict=True))

    def backward(
        self,
        segment: int,
        step: int,
        micro_batch: int,
        operands: Operands,
        gradients: Mapping[str, Tensor],
        later: Mapping[str, Tensor],
        sink: GradientSink,
        memory: Tensor | None = None,
        weights: StepWeights | None = None,
        scale: float = 1.0,
    ) -> tuple[dict[str, Tensor | None], Tensor | None]:
        """Propagate gradients through the segment; return those of its input values.

        Through what the forward saved in `memory`, if it did, else through a recomputation.
        `gradients` are those of its outputs, by value and in its shape. `later` holds, by value and
        by parameter, the sums that later segments made for its inputs, in the shape of these: they
        become extra roots, so that autograd adds its own contributions after them, in the order of
        an uncut backward. The gradient of each parameter goes to `sink` as soon as it is complete
        and is not kept. Also returns the loss, [], when the segment makes it. The loss's root
        gradient is 1 / M; with `weights` it is 1, since the loss is the micro-batch's part of the
        step's then; times `scale`, rounded as autograd rounds it.
        """
        graph = self._graphs.pop((segment, micro_batch), None)
        if graph is None or memory is None or not graph.open(_lasting(operands), memory):
            graph = self._recompute(segment, step, micro_batch, operands, weights)
        spec, leaves = self._model.segment(segment), graph.leaves

        def deliver(name: str) -> Callable[[Tensor], None]:
            def take(leaf: Tensor) -> None:
                assert leaf.grad is not None
                gradient, leaf.grad = leaf.grad, None
                sink(name, gradient)

            return take

        for name in spec.parameters:
            if self._model.parameters[name].trainable:
                leaf = leaves[name]
                hooks = self.hooks.get(name)
                if hooks is not None and self._model.owner[name] == segment:
                    # Its gradient is whole only here: later segments' part of it comes as a root.
                    leaf.register_hook(hooks.run_gradient)  # type: ignore[no-untyped-call]
                leaf.register_post_accumulate_grad_hook(deliver(name))  # type: ignore[no-untyped-call]
        relaid: dict[str, Tensor] = {}
        for name in spec.inputs:
            value = self._model.values[name]
            if value.gradient and value.gradient_stride is not None:
                # Autograd lays a leaf's gradient out as the leaf; the next backward needs it as
                # it comes, since a reduction adds in the order of the layout.
                leaves[name].register_hook(partial(relaid.__setitem__, name))  # type: ignore[no-untyped-call]
        roots: list[GradientEdge] = []
        seeds: list[Tensor] = []  # each of its root's shape
        loss = graph.loss
        for name in spec.outputs:
            if name == self._model.loss:
                assert loss is not None
                roots.append(_edge(graph.roots[name]))
                one = torch.full_like(loss, scale)  # []
                seeds.append(one / self._micro_batches if weights is None else one)
            elif name in gradients:
                roots.append(_edge(graph.roots[name]))
                seeds.append(gradients[name])
        for name, gradient in later.items():
            roots.append(_edge(leaves[name]))
            seeds.append(gradient)
        del graph
        if roots:
            torch.autograd.backward(roots, seeds)
        return {
            name: relaid.get(name, leaves[name].grad)
            for name in spec.inputs
            if self._model.values[name].gradient
        }, loss

    def _recompute(
        self,
        segment: int,
        step: int,
        micro_batch: int,
        operands: Operands,
        weights: StepWeights | None,
    ) -> _Graph:
        results, leaves = self._call(segment, step, micro_batch, operands, weights)
        loss = results.get(self._model.loss)
        return _Graph(leaves, results, None if loss is None else loss.detach(), None)

    def _call(
        self,
        segment: int,
        step: int,
        micro_batch: int,
        operands: Operands,
        weights: StepWeights | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run the code in grad mode; return its outputs and the leaves of autograd, by name."""
        inputs, leaves = self._inputs(segment, operands)
        with (
            draws(self._seed, step, self._first + micro_batch, self._captured.random[segment - 1]),
            weighted(weights, self._captured.terms[segment - 1]),
            torch.enable_grad(),
        ):
            results = self._code(segment).train(*inputs)
        names = self._model.segment(segment).outputs
        return dict(zip(names, results, strict=True)), leaves

    def _saved_tensors(
        self, segment: int, operands: Operands, memory: Tensor | None
    ) -> SavedTensors:
        bindings = self._captured.bindings[segment - 1]
        constants = [self._captured.constants[b.name] for b in bindings if b.kind == "constant"]
        return SavedTensors(
            _lasting(operands),
            constants,
            memory,
            bring_back=self._bring_back,
            matches=self._matches.get(self._model.segment(segment).isomorphism, {}),
        )

    def _code(self, segment: int) -> Code:
        return self._captured.codes[self._model.segment(segment).isomorphism]

    def _inputs(self, segment: int, operands: Operands) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the code's arguments in order, and the leaves of autograd among them by name."""
        inputs: list[Tensor] = []
        leaves: dict[str, Tensor] = {}
        for binding in self._captured.bindings[segment - 1]:
            name = binding.name
            if binding.kind == "parameter":
                leaf = operands.parameters[name].detach()
                leaf.requires_grad_(self._model.parameters[name].trainable)
                leaves[name] = leaf
            elif binding.kind == "value":
                leaf = operands.values[name].detach()
                if self._model.values[name].gradient:
                    leaf.requires_grad_()
                    leaves[name] = leaf
                if binding.written:
                    leaf = leaf.clone()
            elif binding.kind == "buffer":
                leaf = operands.buffers[name]
            else:
                leaf = self._captured.constants[name]
            inputs.append(leaf)
        return inputs, leaves


def _lasting(operands: Operands) -> dict[str, Tensor]:
    """Return the operands that are the same in the backward; buffers may have changed by then."""
    parameters = {f"parameter {name}": tensor for name, tensor in operands.parameters.items()}
    return parameters | {f"value {name}": tensor for name, tensor in operands.values.items()}


def _graph_without_memory(
    results: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    saved: SavedTensors,
    memoryless: MemorylessTensors,
) -> _Graph:
    """Return the graph of a forward without the memory of its inputs and outputs.

    Autograd needs only the shapes and strides of its leaves.
    """
    roots = {name: get_gradient_edge(r) for name, r in results.items() if r.requires_grad}
    for leaf in leaves.values():
        leaf.data = memoryless.like(leaf)
    return _Graph(leaves, roots, None, saved)


def _edge(root: Tensor | GradientEdge) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(packed: None) -> Tensor:
    raise AssertionError("a forward's saved tensors are never used: backward recomputes")
