"""Plain PyTorch training of a model in memory: what swaptrain's numbers are compared with.

In float32 on a CPU, for a model without random draws, swaptrain gives these losses and weights bit
for bit. In bfloat16 the loop below says what is computed: masters in float32, the model in their
bfloat16 halves, gradients accumulated in float32. swaptrain's dropout draws from counters, not from
torch's generator: with dropout the two runs differ.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from swaptrain.capture.forward.constants import bind_constants
from swaptrain.capture.forward.loss import loss_of
from swaptrain.capture.inputs.casts import batch_dtypes, cast_batch
from swaptrain.capture.losses.weighting import held_out_weights, step_weights
from swaptrain.capture.precision import kept_in_float32
from swaptrain.compute.gradient_norms import held_out_loss, step_loss
from swaptrain.compute.learning_rate import Schedule, ScheduleFields, learning_rate
from swaptrain.compute.optimizer_classes import optimizer_arguments, optimizer_class
from swaptrain.compute.split_master import is_dense, split, storage_order
from swaptrain.compute.state_codecs import (
    WEIGHT,
    Draws,
    StateDtype,
    codec_of,
    is_coded,
    round_in_pieces,
)
from swaptrain.compute.weighting.plain import CountedCalls, WeightedCalls
from swaptrain.errors import ConfigError

__all__ = ["ReferenceResult", "evaluate", "train_reference"]


@dataclass(frozen=True)
class ReferenceResult:
    """What a reference run leaves."""

    losses: list[float]
    """Per step the mean of the micro-batches' losses, in float64; of tokens, where they are
    weighted and the micro-batches have unequally many, the sum of the micro-batches' parts."""
    grad_norms: list[float]
    """Per step the global 2-norm of the gradients before clipping.

    What a bfloat16 run without clipping says differs from it in the last digits: it forms the norm
    of blocks."""
    parameters: dict[str, Tensor]
    """The final weights by name, tied ones once: in bfloat16 runs the float32 masters."""
    buffers: dict[str, Tensor]
    """The final buffers by name."""
    rounded: frozenset[str] = frozenset()
    """Names of the parameters that need no gradient and that are computed with in bfloat16."""
    eval_losses: dict[int, float] = field(default_factory=dict)
    """By step: the loss of the held-out batches, where it was taken."""


def train_reference(
    factory: Callable[[], nn.Module],
    batches: Callable[[int, int], Mapping[str, Tensor]],
    *,
    steps: int,
    micro_batches: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "adamw",
    lr: float = 3e-4,
    weight_decay: float | None = None,
    arguments: Mapping[str, object] | None = None,
    schedule: ScheduleFields | None = None,
    clip_norm: float | None = None,
    device: torch.device | str = "cpu",
    constants: Mapping[str, object] | None = None,
    loss_weighting: str | None = None,
    held_out: Sequence[Mapping[str, Tensor]] = (),
    every: int = 1,
    freeze: Sequence[str] = (),
    state: StateDtype = "float32",
    groups: Sequence[Mapping[str, Any]] = (),
    master: str = "float32",
    ranks: int = 1,
) -> ReferenceResult:
    """Construct the model under `seed`, train it for `steps` steps and return what came out.

    `batches(step, micro_batch)` gives one micro-batch, with steps from 1 and micro-batches from 0;
    `model(**batch)` returns the loss, or what `capture.forward.loss.loss_of` finds it in;
    `constants` are further arguments of every forward. The optimizer has two groups,
    parameters of two and more dimensions and the others, which do not decay. A schedule without
    `decay_steps` ends at `steps`. The seed is given to torch, numpy and Python's `random`.
    Every so many steps the batches `held_out` are evaluated (`evaluate`). Parameters whose names
    match one of the globs `freeze` stay as they are. Behind each step the optimizer's state is
    stored in `state` and read back, as `optimizer.state` asks for. `groups` are those of
    `optimizer.groups`: each is an optimizer of its own, with the parameters that it matches first.
    With the `master` "none" bfloat16 weights are rounded by chance behind each step, and the next
    one begins from what is left. In float16 losses are scaled by a GradScaler of torch, which
    skips the updates of gradients that are not finite. Of several `ranks` each accumulates the
    gradients of its own micro-batches, the first ones for rank 0, and their sums are added in the
    order of the ranks.

    With the `loss_weighting` "tokens", or None where a batch has `labels`, every trained token of
    a step weighs alike: where the micro-batches have unequally many, a cross entropy of the loss
    is summed and divided by the number of the whole step, and its other terms by that of the
    micro-batches. With "micro_batches" each micro-batch's mean weighs alike, as with None where
    the loss is no sum of terms. Means over tokens that a model writes by hand are not weighted.

    Raises:
        ConfigError: an optimizer or argument torch does not have, or a dtype that is not supported.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"model.dtype: {dtype} is not supported; use float32, bfloat16 or float16"
        )
    if schedule is None or schedule.decay_steps is None:
        schedule = with_decay_steps(schedule, steps)
    seed_generators(seed)
    model = bind_constants(factory().to(device).train(), constants or {})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in freeze):
            parameter.requires_grad_(False)
    masters = Masters(model, dtype, exact=master == "float32")
    base = {"name": optimizer, "lr": lr, "weight_decay": weight_decay, "state": state}
    steppers = build_optimizers(masters, base, arguments or {}, groups)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)
    updates = 0
    losses, grad_norms, eval_losses = [], [], {}
    dtypes: dict[str, torch.dtype] | None = None
    for step in range(1, steps + 1):

        def batch(micro_batch: int, step: int = step) -> dict[str, Tensor]:
            nonlocal dtypes
            given = batches(step, micro_batch)
            if dtypes is None:  # by the first micro-batch, as swaptrain captures
                dtypes = batch_dtypes(model, given, dtype)
            return {k: v.to(device) for k, v in cast_batch(given, dtypes).items()}

        losses.append(
            forward_backward(
                model, masters, batch, micro_batches, loss_weighting, scaler, ranks=ranks
            )
        )
        for stepper, *_ in steppers:
            scaler.unscale_(stepper)
        grad_norms.append(clip(masters.tensors, clip_norm))
        for stepper, own_lr, own_state in steppers:
            for group in stepper.param_groups:
                group["lr"] = learning_rate(step, lr=own_lr, schedule=schedule)
            if math.isfinite(grad_norms[-1]):
                scaler.step(stepper)
                masters.store(stepper, own_state, seed=seed, step=updates + 1)
            stepper.zero_grad(set_to_none=True)
        updates += math.isfinite(grad_norms[-1])
        scaler.update()
        masters.round(seed=seed, step=updates)
        masters.to_model()
        if held_out and step % every == 0:
            eval_losses[step] = evaluate(
                model, held_out, dtypes=dtypes, device=device, loss_weighting=loss_weighting
            )
            model.train()
    buffers = dict(model.named_buffers())
    rounded = frozenset(
        name
        for name, p in model.named_parameters()
        if not p.requires_grad and p.dtype == dtype != torch.float32
    )
    return ReferenceResult(losses, grad_norms, masters.weights(), buffers, rounded, eval_losses)


def evaluate(
    model: nn.Module,
    held_out: Sequence[Mapping[str, Tensor]],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str = "cpu",
    loss_weighting: str | None = None,
) -> float:
    """Put the model into evaluation mode and return the loss of the held-out batches.

    Without gradients, each batch once, its tensors in `dtypes` by key (None: as they are). A batch
    weighs as many as it has items, so that a last, smaller one does not count for more; with the
    `loss_weighting` of `train_reference` its cross entropies weigh as many as they have tokens.
    """
    model.eval()
    batches = [
        {key: value.to(device) for key, value in given.items()}
        for given in (held_out if dtypes is None else (cast_batch(b, dtypes) for b in held_out))
    ]
    items = [len(next(iter(batch.values()))) for batch in batches]
    by_tokens = loss_weighting == "tokens" or (loss_weighting is None and "labels" in batches[0])
    losses, counts = [], []
    with torch.no_grad():
        for batch in batches:
            calls = CountedCalls()
            losses.append(float(_loss(model, batch, calls if by_tokens else nullcontext())))
            counts.append(calls.counts)
        weights = held_out_weights(counts, items)
        if weights is None:
            return held_out_loss(losses, items, summed=False)
        try:
            weighted = [
                float(_loss(model, batch, WeightedCalls(own)))
                for batch, own in zip(batches, weights, strict=True)
            ]
        except ConfigError:  # its loss is no sum with a cross entropy
            return held_out_loss(losses, items, summed=False)
        return held_out_loss(weighted, items, summed=True)


def forward_backward(
    model: nn.Module,
    masters: Masters,
    batch: Callable[[int], dict[str, Tensor]],
    micro_batches: int,
    loss_weighting: str | None,
    scaler: GradScaler,
    *,
    ranks: int = 1,
) -> float:
    """Accumulate the gradients of a step and return its loss.

    As the mean of means first; where tokens are weighted and the counts found by then differ, all
    of it once more, from the same buffers and generators.
    """
    before, each = _Before(model), micro_batches // ranks
    counts: list[list[float]] = []
    losses = []
    for m in range(micro_batches):
        calls, given = CountedCalls(), batch(m)
        by_tokens = loss_weighting == "tokens" or (loss_weighting is None and "labels" in given)
        loss = _loss(model, given, calls if by_tokens else nullcontext())
        scaled = scaler.scale(loss / micro_batches)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        losses.append(float(loss.detach()))
        counts.append(calls.counts)
        masters.accumulate()
        if ranks > 1 and m % each == each - 1:
            masters.end_rank()
    masters.end_step()
    weights = step_weights(counts)
    if weights is None:
        return step_loss(losses, None)
    before.restore()
    masters.forget()
    losses.clear()
    for m in range(micro_batches):
        try:
            loss = _loss(model, batch(m), WeightedCalls(weights))
        except ConfigError:
            if loss_weighting is not None:
                raise
            before.restore()
            masters.forget()
            return forward_backward(
                model, masters, batch, micro_batches, "micro_batches", scaler, ranks=ranks
            )
        scaled = scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        losses.append(float(loss.detach()))
        masters.accumulate()
        if ranks > 1 and m % each == each - 1:
            masters.end_rank()
    masters.end_step()
    return step_loss(losses, weights)


def _loss(
    model: nn.Module, batch: Mapping[str, Tensor], mode: AbstractContextManager[Any]
) -> Tensor:
    """Return the loss of one micro-batch, whose calls a mode of torch counts or weighs."""
    with mode:
        loss = loss_of(model(**batch), model, batch.keys())
    if isinstance(mode, WeightedCalls):
        mode.check(loss)
    return loss


class _Before:
    """What a forward changes: the buffers and the generators."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Bring back what was there."""
        with torch.no_grad():
            for buffer, kept in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(kept)
        python, numpy, generator = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(generator)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class Masters:
    """The float32 tensors that the optimizer steps: the parameters themselves, or their masters.

    In float32 a parameter whose memory has holes (a slice of a tensor) has a master too, which has
    none: torch's fused optimizers step what lies in the holes instead of the last elements.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, exact: bool = True) -> None:
        """Turn `model` into `dtype`; the masters are the values that its constructor gave.

        Unless `exact` they hold what the model does, in float32.
        """
        self._exact = exact
        self._before: dict[str, Tensor] = {}
        """By name: the sums of the ranks that have computed."""
        self._parameters = dict(model.named_parameters())
        first = {id(p): name for name, p in self._parameters.items()}
        self.names = defaultdict[str, list[str]](list)
        """All names of a parameter by its first one: a tied one has several."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names[first[id(parameter)]].append(name)
        if dtype == torch.float32:
            self._masters = {
                name: p if is_dense(p) else _copied(p, torch.contiguous_format)
                for name, p in self._parameters.items()
            }
        else:
            self._masters = {name: _copied(p) for name, p in self._parameters.items()}
            kept = kept_in_float32(model)
            for name, parameter in self._parameters.items():
                if parameter.dtype == torch.float32 and name not in kept:
                    parameter.data = torch.empty_like(parameter, dtype=dtype)
            self.to_model()
            for name in self._rounded:
                self._masters[name].data.copy_(self._parameters[name])

    @property
    def _rounded(self) -> list[str]:
        """Names of the weights that have no master."""
        return [
            name
            for name, master in self._masters.items()
            if not self._exact
            and master.requires_grad
            and self._parameters[name].dtype != master.dtype
        ]

    def round(self, *, seed: int, step: int) -> None:
        """Round the weights that have no master by chance."""
        for name in self._rounded:
            flat = storage_order(self._masters[name].detach())
            out = torch.empty(flat.numel(), dtype=torch.bfloat16, device=flat.device)
            round_in_pieces(flat.clone(), out, Draws(seed, step, name), WEIGHT)
            flat.copy_(out)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The trainable ones by name, in the model's order."""
        return {name: master for name, master in self._masters.items() if master.requires_grad}

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The trainable ones, in the model's order."""
        return [*self.named.values()]

    def accumulate(self) -> None:
        """Add the gradients of one micro-batch, in float32, in the order of the micro-batches."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if parameter.grad is None or master is parameter:
                continue  # autograd has added it to the gradient of the parameter itself
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def end_rank(self) -> None:
        """Add the sums of a rank, in float32, to those of the ranks before it; begin anew."""
        for name, master in self._masters.items():
            before = self._before.pop(name, None)
            own, master.grad = master.grad, None
            if own is not None:
                self._before[name] = own if before is None else before.add_(own)
            elif before is not None:
                self._before[name] = before

    def end_step(self) -> None:
        """Let the gradients be the sums of all ranks."""
        for name, total in self._before.items():
            self._masters[name].grad = total
        self._before = {}

    def forget(self) -> None:
        """Drop the gradients that were accumulated."""
        self._before = {}
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def store(self, stepper: Optimizer, dtype: StateDtype, *, seed: int, step: int) -> None:
        """Encode and decode the optimizer's state of all parameters that are not small."""
        codec = codec_of(dtype)
        for name, master in self._masters.items() if codec is not None else ():
            assert codec is not None
            shape = tuple(master.shape)
            held = stepper.state.get(master, {})
            for key, value in held.items() if is_coded(shape) else ():
                if value.shape != master.shape:
                    continue
                whole, values = slice(0, value.numel()), storage_order(value)
                stored = {
                    array: torch.zeros(own, dtype=getattr(torch, kind)).view(-1).to(value.device)
                    for array, (own, kind) in codec.stored(key, shape).items()
                }
                codec.encode(key, values.clone(), stored, whole, Draws(seed, step, name))
                codec.decode(key, stored, whole, values)

    def to_model(self) -> None:
        """Give the model the masters' values, rounded as in swaptrain's split master."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                master = self._masters[name]
                if master is parameter:
                    continue
                has_rest = self._exact and master.requires_grad
                if parameter.dtype != torch.bfloat16 or not has_rest:
                    parameter.copy_(master)  # no lower half completes it to the master
                else:
                    remainder = torch.empty_like(master, dtype=torch.int16)
                    split(master.detach(), parameter.detach(), remainder)

    def weights(self) -> dict[str, Tensor]:
        """Return the masters by name."""
        return {name: master.detach() for name, master in self._masters.items()}


def _copied(
    parameter: nn.Parameter, memory_format: torch.memory_format = torch.preserve_format
) -> nn.Parameter:
    """Return a master: a copy of a parameter, in float32 if it has 16 bits and is trained."""
    copy = parameter.detach().clone(memory_format=memory_format)
    narrow = copy.dtype in (torch.bfloat16, torch.float16)
    copy = copy.float() if narrow and parameter.requires_grad else copy
    return nn.Parameter(copy, requires_grad=parameter.requires_grad)


def build_optimizers(
    masters: Masters,
    base: Mapping[str, Any],
    arguments: Mapping[str, object],
    groups: Sequence[Mapping[str, Any]],
) -> list[tuple[Optimizer, float, StateDtype]]:
    """Return an optimizer for each group that has parameters, with its rate and form of state."""
    keys = ("match", "name", "lr", "weight_decay", "state")
    left, found = dict(masters.named), []
    for group in (*groups, {"match": ("*",)}):
        said = {key: value for key, value in group.items() if value is not None}
        patterns = said["match"]
        chosen = {
            first: p
            for first, p in left.items()
            if any(fnmatchcase(n, own) for own in patterns for n in masters.names[first])
        }
        left = {name: p for name, p in left.items() if name not in chosen}
        name = said.get("name", base["name"])
        same = optimizer_class(name) is optimizer_class(base["name"])
        decay = said.get("weight_decay", base["weight_decay"] if same else None)
        lr = said.get("lr", base["lr"])
        further = {key: value for key, value in said.items() if key not in keys}
        optimizer = (
            build_optimizer(
                name,
                [*chosen.values()],
                lr=lr,
                weight_decay=decay,
                arguments={**(arguments if same else {}), **further},
                decays_all="weight_decay" in said,
            )
            if chosen
            else None
        )
        if optimizer is not None:
            found.append((optimizer, lr, said.get("state", base["state"])))
    return found


def build_optimizer(
    name: str,
    parameters: list[nn.Parameter],
    *,
    lr: float,
    weight_decay: float | None,
    arguments: Mapping[str, object],
    decays_all: bool = False,
) -> Optimizer:
    """Return one torch optimizer with two groups; parameters of fewer than 2 dimensions decay not,
    unless with `decays_all`.

    fused=True where the class has it: torch's fused and default implementations differ in the last
    bit.
    """
    make: Any = optimizer_class(name)
    chosen = optimizer_arguments(make, weight_decay=weight_decay, arguments=arguments)
    decaying = [p for p in parameters if p.ndim >= 2 or decays_all]
    others = [p for p in parameters if p.ndim < 2 and not decays_all]
    groups: list[dict[str, Any]] = [
        {"params": decaying},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer = make(groups, lr=lr, **chosen)
    return optimizer


def clip(parameters: list[nn.Parameter], clip_norm: float | None) -> float:
    """Clip the gradients if a limit is given, and return their norm before."""
    if clip_norm is None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))
    return float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and Python's `random`, as swaptrain does before it builds a model."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def with_decay_steps(schedule: ScheduleFields | None, steps: int) -> ScheduleFields:
    """Return the schedule with `decay_steps` set to `steps`."""
    if schedule is None:
        return Schedule(decay_steps=steps)
    return replace(
        Schedule(),
        name=schedule.name,
        warmup_steps=schedule.warmup_steps,
        warmup_ratio=schedule.warmup_ratio,
        decay_steps=steps,
        min_lr_ratio=schedule.min_lr_ratio,
        decay_fraction=schedule.decay_fraction,
    )


if __name__ == "__main__":
    print("the command that compares a job with this loop: python -m swaptrain compare --help")
