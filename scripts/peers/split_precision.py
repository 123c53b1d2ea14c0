"""The training loop of the peers that are plain PyTorch: bfloat16 weights, float32 masters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from job import (
    BETAS,
    EPS,
    LR,
    WEIGHT_DECAY,
    Meter,
    Options,
    batches,
    empty_model,
    initial_weights,
    put,
)
from torch import Tensor, nn

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""From a name, a shape and a dtype to the tensor that holds it, with undefined content."""


def train(job: Options, place: Place) -> None:
    """Train; weights, masters and moments lie where `place` says, gradients in memory.

    AdamW (fused) on one parameter at a time, so that no second copy of the state is needed.
    """
    model = empty_model(job)
    weights: list[nn.Parameter] = []
    optimizers: list[torch.optim.AdamW] = []
    masters: list[nn.Parameter] = []
    for name, value in initial_weights(job):
        weight = put(model, name, place(name + ".weight", value.shape, torch.bfloat16))
        master = nn.Parameter(place(name + ".master", value.shape, torch.float32))
        with torch.no_grad():
            weight.copy_(value)
            master.copy_(value)
        optimizer = torch.optim.AdamW(
            [master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        moments = {m: place(f"{name}.{m}", value.shape, torch.float32).zero_()
                   for m in ("exp_avg", "exp_avg_sq")}  # fmt: skip
        optimizer.state[master] = {"step": torch.zeros((), device=job.device), **moments}
        weights.append(weight)
        masters.append(master)
        optimizers.append(optimizer)
    meter = Meter(job.device)
    for step in batches(job):
        meter.begin()
        losses = []
        for ids in (batch.to(job.device) for batch in step):
            loss = model(input_ids=ids, labels=ids).loss
            (loss / len(step)).backward()
            losses.append(float(loss))
        _update(weights, masters, optimizers, job.clip_norm)
        meter.end(losses)


@torch.no_grad()
def _update(
    weights: list[nn.Parameter],
    masters: list[nn.Parameter],
    optimizers: list[torch.optim.AdamW],
    clip_norm: float | None,
) -> None:
    coefficient = 1.0
    if clip_norm is not None:
        norm = torch.stack([w.grad.float().norm() for w in weights if w.grad is not None]).norm()
        coefficient = min(1.0, clip_norm / (float(norm) + 1e-6))
    for weight, master, optimizer in zip(weights, masters, optimizers, strict=True):
        assert weight.grad is not None
        master.grad = weight.grad.float().mul_(coefficient)
        weight.grad = None
        optimizer.step()
        master.grad = None
        weight.copy_(master)
