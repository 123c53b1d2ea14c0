"""Captures a module and trains one step of it segment by segment, everything in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from swaptrain.capture.capture import capture, cut
from swaptrain.capture.captured import Captured
from swaptrain.capture.costs import graph_costs, node_flops
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.evaluation.graph import UncutEvaluation, capture_evaluation
from swaptrain.capture.evaluation.slices import slice_evaluations
from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.init.construct import construct
from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.capture.uncut import Uncut
from swaptrain.compute.object_tensors import copy_into
from swaptrain.compute.runner import Operands, Runner
from swaptrain.program.instructions import Kind, ObjectKey, Of, Operation
from swaptrain.program.model import ParameterSpec
from swaptrain.program.step import StepBuilder

__all__ = [
    "StepResult",
    "captured_model",
    "captured_with_evaluation",
    "cut_everywhere",
    "cut_into",
    "eager_losses",
    "eager_step",
    "legal_gaps",
    "product_flops",
    "segment_losses",
    "segment_step",
]

Factory = Callable[[], nn.Module]
Batches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepResult:
    """Losses by micro-batch, and the summed gradients and the mutated buffers after them."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def differences(self, other: StepResult) -> list[str]:
        """Return the names of what is not bit-equal; buffers that both have are compared."""
        found = [] if self.losses == other.losses else ["loss"]
        for name in sorted(self.gradients.keys() | other.gradients.keys()):
            left, right = self.gradients.get(name), other.gradients.get(name)
            if left is None or right is None or not torch.equal(left, right):
                found.append(name)
        shared = self.buffers.keys() & other.buffers.keys()
        found += [n for n in sorted(shared) if not torch.equal(self.buffers[n], other.buffers[n])]
        return found


def captured_model(factory: Factory, batch: Mapping[str, Tensor], scratch_dir: Path) -> Uncut:
    """Return the captured graph of what `factory` makes under seed 0, in float32."""
    construction = construct(factory, seed=0, scratch_dir=scratch_dir)
    module = construction.module
    masters = {n: str(p.dtype).removeprefix("torch.") for n, p in module.named_parameters()}
    return capture(module, construction.fake_mode, batch, masters)


def captured_with_evaluation(
    factory: Factory, batches: Batches, scratch_dir: Path
) -> tuple[Uncut, list[UncutEvaluation]]:
    """Return the captured graph on the first batch, and those in evaluation mode on each."""
    construction = construct(factory, seed=0, scratch_dir=scratch_dir)
    module, fake_mode = construction.module, construction.fake_mode
    masters = {n: str(p.dtype).removeprefix("torch.") for n, p in module.named_parameters()}
    uncut = capture(module, fake_mode, batches[0], masters)
    evaluated = (capture_evaluation(module, fake_mode, b, uncut, batches=1) for b in batches)
    return uncut, list(evaluated)


def segment_losses(
    captured: Captured, evaluations: Sequence[UncutEvaluation], module: nn.Module, batches: Batches
) -> list[float]:
    """Return the loss of each batch in evaluation mode, slice by slice, with a module's state.

    Values lie between two slices as a slab would hold them. Every slice is given the parameters and
    buffers that it names and no others.
    """
    captured = replace(captured, evaluations=slice_evaluations(evaluations, captured.model))
    parameters = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    buffers = {name: b.clone() for name, b in module.named_buffers() if name in captured.buffers}
    runner, losses = Runner(captured, seed=0, micro_batches=1), []
    for number, (graph, batch) in enumerate(zip(captured.evaluations, batches, strict=True)):
        spec = graph.spec
        prefix = spec.given.partition(".")[0]
        values = {f"{prefix}.batch.{key}": tensor for key, tensor in batch.items()}
        for part in spec.slices:
            operands = Operands(
                {name: parameters[name] for name in part.parameters},
                {name: buffers[name] for name in part.buffers},
                {name: values[name] for name in part.inputs},
            )
            for name, tensor in runner.evaluate(number, part.index, 0, operands).items():
                values[name] = stored(tensor, spec.values[name].tensor.stride)
        losses.append(float(values[spec.given][0]))
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers() if n in buffers)
    return losses


def eager_losses(module: nn.Module, batches: Batches) -> list[float]:
    """Return the loss of each batch of the module in evaluation mode, in plain PyTorch."""
    module.eval()
    losses = []
    for batch in batches:
        with torch.no_grad():
            result = module(**{key: tensor.clone() for key, tensor in batch.items()})
        losses.append(float(loss_of(result)))
    return losses


def cut_into(uncut: Uncut, target_bytes: int) -> Captured:
    """Cut it into segments of about `target_bytes` of weights."""

    def nbytes(parameter: ParameterSpec) -> int:
        return parameter.tensor.nbytes

    limits = CutLimits(target_bytes, 2 * target_bytes, 1 << 40, 2)
    return cut(uncut, limits, state_bytes=nbytes, working_bytes=nbytes)[0]


def legal_gaps(uncut: Uncut) -> dict[str, bool]:
    """Say of each computing node, by name and in order, whether a cut may follow it."""
    costs = graph_costs(
        uncut.captured, uncut.trace, uncut.parameters, {},
        _nothing, _nothing, uncut.uncuttable,
    )  # fmt: skip
    nodes = [node.name for node in uncut.captured.graph.nodes if node.op == "call_function"]
    return dict(zip(nodes, costs.legal, strict=True))


def cut_everywhere(uncut: Uncut, *, every: int = 1) -> Captured:
    """Cut at every legal gap, or at every so many of them."""
    gaps = [i for i, legal in enumerate(legal_gaps(uncut).values()) if legal][::every]
    limits = CutLimits(1, 1, 1, 1)
    return cut(uncut, limits, state_bytes=_nothing, working_bytes=_nothing, cuts=gaps)[0]


def _nothing(parameter: ParameterSpec) -> int:
    return 0


def eager_step(factory: Factory, batches: Batches) -> StepResult:
    """Run forward and backward of all micro-batches in plain PyTorch."""
    torch.manual_seed(0)
    model = factory().train()
    losses = []
    for batch in batches:
        loss = loss_of(model(**{key: tensor.clone() for key, tensor in batch.items()}))
        (loss / len(batches)).backward()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return StepResult(losses, gradients, dict(model.named_buffers()))


def segment_step(
    captured: Captured, factory: Factory, batches: Batches, loss: StepWeights | None = None
) -> StepResult:
    """Run the same by the program of a step; the weights are those of the plain constructor.

    `loss` says how the losses of the micro-batches are weighted.
    """
    torch.manual_seed(0)
    weights = {name: p.detach() for name, p in factory().named_parameters()}
    return _Step(captured, weights, batches, loss).run()


def stored(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy with the given strides, as a slab would hold it."""
    copy = torch.empty_strided(tuple(tensor.shape), tuple(stride), dtype=tensor.dtype)
    copy_into(copy, tensor)
    return copy


class _Step:
    """One step's objects, by key, as the tier would hold them."""

    def __init__(
        self,
        captured: Captured,
        weights: Mapping[str, Tensor],
        batches: Batches,
        loss: StepWeights | None,
    ) -> None:
        self.loss = loss
        self.model, self.weights, self.batches = captured.model, weights, batches
        self.runner = Runner(captured, seed=0, micro_batches=len(batches))
        self.buffers = {name: tensor.clone() for name, tensor in captured.buffers.items()}
        self.before: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.values: dict[tuple[str, int], Tensor] = {}
        self.gradients: dict[ObjectKey, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def run(self) -> StepResult:
        m = len(self.batches)
        arrays = {segment.index: ["weights"] for segment in self.model.segments}
        for instruction in StepBuilder(self.model, "float32", arrays, m, False).step():
            k, micro_batch = instruction.segment, instruction.micro_batch
            match instruction.operation:
                case Operation.LOAD:
                    for name, tensor in self.batches[micro_batch].items():
                        self.values[f"batch.{name}", micro_batch] = tensor.clone()
                case Operation.FORWARD:
                    self.before[k, micro_batch] = self.copied_buffers(k)
                    operands = self.operands(k, micro_batch, self.buffers)
                    outputs = self.runner.forward(k, 1, micro_batch, operands, None, self.loss)
                    for name, tensor in outputs.items():
                        self.values[name, micro_batch] = stored(tensor, tensor.stride())
                case Operation.TURN | Operation.BACKWARD:
                    self.backward(k, micro_batch, instruction.reads, instruction.operation)
        return StepResult(self.losses, self.sums, self.buffers)

    def backward(
        self, k: int, micro_batch: int, reads: Sequence[ObjectKey], operation: Operation
    ) -> None:
        turn = operation is Operation.TURN
        buffers = self.buffers if turn else self.before[k, micro_batch]
        incoming = [key for key in reads if key.kind is Kind.GRADIENT]
        outputs = self.model.segment(k).outputs
        gradients, later = dict[str, Tensor](), dict[str, Tensor]()
        for key in incoming:
            of_output = key.of is not Of.PARAMETER and key.name in outputs
            (gradients if of_output else later)[key.name] = self.gradients[key]

        def sink(name: str, gradient: Tensor) -> None:
            if self.model.owner[name] != k:
                key = ObjectKey(Kind.GRADIENT, name, k, micro_batch, of=Of.PARAMETER)
                self.gradients[key] = gradient
            elif name in self.sums:
                self.sums[name] += gradient
            else:
                self.sums[name] = gradient.clone()
            hooks = self.runner.hooks.get(name)
            if hooks is not None and name in self.sums and self.model.owner[name] == k:
                hooks.run_accumulated(self.weights[name], self.sums[name])

        operands = self.operands(k, micro_batch, buffers)
        inputs, loss = self.runner.backward(
            k, 1, micro_batch, operands, gradients, later, sink, None, self.loss
        )
        for name, gradient in inputs.items():
            if gradient is None:
                gradient = torch.zeros_like(self.values[name, micro_batch])
            spec = self.model.values[name].gradient_tensor
            key = ObjectKey(Kind.GRADIENT, name, k, micro_batch)
            self.gradients[key] = stored(gradient, spec.stride)
        if loss is not None:
            self.losses.append(float(loss.detach()))

    def operands(self, k: int, micro_batch: int, buffers: Mapping[str, Tensor]) -> Operands:
        segment = self.model.segment(k)
        values = {name: self.values[name, micro_batch] for name in segment.inputs}
        return Operands(self.weights, buffers, values)

    def copied_buffers(self, k: int) -> dict[str, Tensor]:
        return {name: self.buffers[name].clone() for name in self.model.segment(k).buffers}


def product_flops(uncut: Uncut) -> int:
    """Return the floating-point operations of a forward that are counted."""
    return sum(node_flops(node, uncut.trace) for node in uncut.captured.graph.nodes)
