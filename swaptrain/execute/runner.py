"""Runs the code of one segment on one micro-batch: forward, backward with recomputation.

M micro-batches of a step; tensors lie on the compute device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from swaptrain.capture.capture import Captured
from swaptrain.capture.place import place
from swaptrain.capture.randomness import draws
from swaptrain.capture.segments import Code

__all__ = ["GradientSink", "Operands", "Runner"]

GradientSink = Callable[[str, Tensor], None]
"""Takes a parameter's name and its gradient of one micro-batch, in the parameter's layout."""


@dataclass(frozen=True)
class Operands:
    """The tensors that a segment's code is called with, by name."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    values: Mapping[str, Tensor]


class Runner:
    """Calls the code of the segments of one captured model."""

    def __init__(self, captured: Captured, *, seed: int, micro_batches: int) -> None:
        self._captured = captured
        self._model = captured.model
        self._seed = seed
        self._micro_batches = micro_batches

    def move_to(self, device: torch.device) -> None:
        """Run the code on `device` from now on; the operands have to lie there."""
        self._captured = place(self._captured, device)

    def forward(
        self, segment: int, step: int, micro_batch: int, operands: Operands
    ) -> dict[str, Tensor]:
        """Return the segment's outputs by name, without an autograd graph.

        Runs in grad mode with the flags of the recomputation, since some kernels differ without
        (LSTM, masked attention), and drops what autograd saves. Mutated buffers change in place.
        """
        inputs, _ = self._inputs(segment, operands)
        with (
            draws(self._seed, step, micro_batch, self._captured.random[segment - 1]),
            torch.enable_grad(),
            saved_tensors_hooks(_drop, _dropped),
        ):
            results = self._code(segment).train(*inputs)
        names = self._model.segment(segment).outputs
        return {name: r.detach() for name, r in zip(names, results, strict=True)}

    def evaluate(self, segment: int, operands: Operands) -> dict[str, Tensor]:
        """Return the segment's outputs in evaluation mode; buffers stay as they are."""
        kept = {name: buffer.clone() for name, buffer in operands.buffers.items()}
        inputs, _ = self._inputs(segment, replace(operands, buffers=kept))
        with torch.no_grad():
            results = self._code(segment).evaluate(*inputs)
        return dict(zip(self._model.segment(segment).outputs, results, strict=True))

    def backward(
        self,
        segment: int,
        step: int,
        micro_batch: int,
        operands: Operands,
        gradients: Mapping[str, Tensor],
        later: Mapping[str, Tensor],
        sink: GradientSink,
    ) -> tuple[dict[str, Tensor | None], Tensor | None]:
        """Recompute the segment and propagate gradients; return those of its input values.

        `gradients` are those of its outputs, by value. `later` holds, by value and by parameter,
        the sums that later segments made for its inputs: they become extra roots, so that autograd
        adds its own contributions after them, in the order of an uncut backward. The gradient of
        each parameter goes to `sink` as soon as it is complete and is not kept. Also returns the
        loss when the segment makes it; the loss's root gradient is 1 / M.
        """
        inputs, leaves = self._inputs(segment, operands)
        spec = self._model.segment(segment)

        def deliver(name: str) -> Callable[[Tensor], None]:
            def take(leaf: Tensor) -> None:
                assert leaf.grad is not None
                gradient, leaf.grad = leaf.grad, None
                sink(name, gradient)

            return take

        for name in spec.parameters:
            if self._model.parameters[name].trainable:
                leaf = leaves[name]
                leaf.register_post_accumulate_grad_hook(deliver(name))  # type: ignore[no-untyped-call]
        relaid: dict[str, Tensor] = {}
        for name in spec.inputs:
            value = self._model.values[name]
            if value.gradient and value.gradient_stride is not None:
                # Autograd lays a leaf's gradient out as the leaf; the next backward needs it as
                # it comes, since a reduction adds in the order of the layout.
                leaves[name].register_hook(partial(relaid.__setitem__, name))  # type: ignore[no-untyped-call]
        with (
            draws(self._seed, step, micro_batch, self._captured.random[segment - 1]),
            torch.enable_grad(),
        ):
            results = self._code(segment).train(*inputs)
        del inputs
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        loss: Tensor | None = None
        for name, result in zip(spec.outputs, results, strict=True):
            if name == self._model.loss:
                loss = result.detach()
                roots.append(result)
                seeds.append(torch.ones_like(loss) / self._micro_batches)
            elif name in gradients:
                roots.append(result)
                seeds.append(gradients[name])
        for name, gradient in later.items():
            roots.append(leaves[name])
            seeds.append(gradient)
        del results
        if roots:
            torch.autograd.backward(roots, seeds)
        return {
            name: relaid.get(name, leaves[name].grad)
            for name in spec.inputs
            if self._model.values[name].gradient
        }, loss

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


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(packed: None) -> Tensor:
    raise AssertionError("a forward's saved tensors are never used: backward recomputes")
