"""A whole run beside a loop that imports torch alone, on the same model and items.

`swaptrain.reference` shares the optimizers, the schedule, clipping and the split with the engine:
where they were wrong, both would be.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.datasets import tokens
from tests.support.matrix import proof_but
from tests.support.models import gpt
from tests.support.runs import config_of, losses, norms, trained, weights

pytestmark = pytest.mark.trains

STEPS, WARMUP, MICRO_BATCHES, ROWS, LR, CLIP = 6, 2, 3, 2, 1e-2, 0.3


def rate(step: int) -> float:
    """Return the learning rate of a step (from 1): two steps of warm-up, then a cosine to 0.1."""
    if step <= WARMUP:
        return LR * step / WARMUP
    t = (step - WARMUP) / (STEPS - WARMUP)
    return LR * (0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2)


def torch_alone() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the losses and gradient norms of all steps, and the weights after them."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = gpt().train()
    data = tokens()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    of_steps, of_gradients, row = [], [], 0
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        total = 0.0
        for _ in range(MICRO_BATCHES):
            rows = [data[(row + i) % len(data)] for i in range(ROWS)]
            row += ROWS
            loss = model(**{key: torch.stack([r[key] for r in rows]) for key in rows[0]})
            (loss / MICRO_BATCHES).backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        of_steps.append(total / MICRO_BATCHES)
        of_gradients.append(norm.item())
    return of_steps, of_gradients, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("host", proof_but(["256MiB", "64MiB"], "64MiB"))
def test_a_run_takes_the_steps_of_a_loop_of_torch_alone(host: str, tmp_path: Path) -> None:
    """Losses, gradient norms and weights, with warm-up, a cosine, weight decay and clipping."""
    schedule = {"name": "cosine", "warmup_steps": WARMUP, "min_lr_ratio": 0.1}
    config = config_of(
        tmp_path / "run",
        {
            "model": {"python": "tests.support.models:gpt"},
            "data": {"python": "tests.support.datasets:tokens", "micro_batches": MICRO_BATCHES},
            "optimizer": {"lr": LR, "clip_norm": CLIP, "schedule": schedule},
            "memory": {"host": host, "segment": "64KiB"},
            "train": {"steps": STEPS},
        },
    )
    run_dir = trained(config)
    expected = torch_alone()
    assert min(expected[1]) > CLIP, "nothing would be clipped"
    assert losses(run_dir) == expected[0]
    assert norms(run_dir) == expected[1]
    found = weights(run_dir)
    assert found.keys() == expected[2].keys()
    assert not [name for name in found if not torch.equal(found[name], expected[2][name])]
