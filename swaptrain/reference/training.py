"""The loop: a model is constructed, and trained step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from swaptrain.capture.forward.constants import bind_constants
from swaptrain.capture.inputs.casts import batch_dtypes, cast_batch
from swaptrain.compute.learning_rate import Schedule, ScheduleFields, learning_rate
from swaptrain.compute.optimizer_classes import optimizer_arguments, optimizer_class
from swaptrain.compute.state_codecs import StateDtype
from swaptrain.errors import ConfigError
from swaptrain.generators import seed_generators
from swaptrain.reference.losses import evaluate, forward_backward
from swaptrain.reference.masters import Masters

__all__ = ["ReferenceResult", "train_reference"]


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
    state: dict[str, Tensor] = field(default_factory=dict)
    """What the optimizers hold of each parameter in the end, as `NAME.exp_avg`."""


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
    ranks: int | Callable[[int], int] = 1,
) -> ReferenceResult:
    """Construct the model under `seed`, train it for `steps` steps and return what came out.

    `batches(step, micro_batch)` gives one micro-batch, with steps from 1 and micro-batches from 0;
    `model(**batch)` returns the loss, or what `capture.forward.loss.loss_of` finds it in;
    `constants` are further arguments of every forward. The optimizer has two groups,
    parameters of two and more dimensions and the others, which do not decay. A schedule without
    `decay_steps` ends at `steps`. The seed is given to torch, numpy and Python's `random`.
    Every so many steps the batches `held_out` are evaluated (`evaluate`). Parameters whose names
    match one of the globs `freeze` stay as they are. After each step the optimizer's state is
    stored in `state` and read back, as `optimizer.state` asks for. `groups` are those of
    `optimizer.groups`: each is an optimizer of its own, with the parameters that it matches first.
    With the `master` "none" bfloat16 weights are rounded by chance after each step, and the next
    one begins from what is left. In float16 losses are scaled by a GradScaler of torch, which
    skips the updates of gradients that are not finite. Of several `ranks` each accumulates the
    gradients of its own micro-batches, the first ones for rank 0, and their sums are added in the
    order of the ranks. As a function it gives their number in a step, for a run that was divided
    anew between two of them.

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
    schedule = schedule or Schedule()
    if schedule.decay_steps is None:
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

        count = ranks if isinstance(ranks, int) else ranks(step)
        losses.append(
            forward_backward(
                model, masters, batch, micro_batches, loss_weighting, scaler, ranks=count
            )
        )
        for stepper, *_ in steppers:
            scaler.unscale_(stepper)
        grad_norms.append(clip([*masters.trainable.values()], clip_norm))
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
    state_left = {
        f"{name}.{key}": value
        for stepper, *_ in steppers
        for name, weight in masters.trainable.items()
        for key, value in stepper.state.get(weight, {}).items()
        if value.shape == weight.shape
    }
    return ReferenceResult(
        losses, grad_norms, masters.weights(), buffers, rounded, eval_losses, state_left
    )


def build_optimizers(
    masters: Masters,
    base: Mapping[str, Any],
    arguments: Mapping[str, object],
    groups: Sequence[Mapping[str, Any]],
) -> list[tuple[Optimizer, float, StateDtype]]:
    """Return an optimizer for each group that has parameters, with its rate and form of state.

    fused=True where the class has it: torch's fused and default implementations differ in the last
    bit. Parameters of fewer than 2 dimensions decay not, unless a group says a `weight_decay`.
    """
    keys = ("match", "name", "lr", "weight_decay", "state")
    left, found = dict(masters.trainable), []
    for group in (*groups, {"match": ("*",)}):
        said = {key: value for key, value in group.items() if value is not None}
        chosen = {
            first: p
            for first, p in left.items()
            if any(fnmatchcase(n, own) for own in said["match"] for n in masters.names[first])
        }
        if not chosen:
            continue
        left = {name: p for name, p in left.items() if name not in chosen}
        make: Any = optimizer_class(said.get("name", base["name"]))
        same = make is optimizer_class(base["name"])
        further = {key: value for key, value in said.items() if key not in keys}
        given = optimizer_arguments(
            make,
            weight_decay=said.get("weight_decay", base["weight_decay"] if same else None),
            arguments={**(arguments if same else {}), **further},
        )
        decaying = [p for p in chosen.values() if p.ndim >= 2 or "weight_decay" in said]
        others = [p for p in chosen.values() if p.ndim < 2 and "weight_decay" not in said]
        halves: list[dict[str, Any]] = [
            {"params": decaying},
            {"params": others, "weight_decay": 0.0},
        ]
        lr = said.get("lr", base["lr"])
        optimizer = make([half for half in halves if half["params"]], lr=lr, **given)
        found.append((optimizer, lr, said.get("state", base["state"])))
    return found


def clip(parameters: list[nn.Parameter], clip_norm: float | None) -> float:
    """Clip the gradients if a limit is given, and return their norm before."""
    if clip_norm is None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))
    return float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))


def with_decay_steps(schedule: ScheduleFields, steps: int) -> Schedule:
    """Return the schedule with `decay_steps` set to `steps`."""
    said = {each.name: getattr(schedule, each.name) for each in fields(Schedule)}
    return Schedule(**{**said, "decay_steps": steps})
