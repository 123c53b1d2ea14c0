"""The reference loop is plain PyTorch, and its bfloat16 form is the split-master update."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from swaptrain.capture.precision import kept_in_float32
from swaptrain.compute.gradient_norms import clip_coefficient, gradient_norm, total_norm
from swaptrain.compute.learning_rate import Schedule, learning_rate
from swaptrain.compute.split_master import join, split
from swaptrain.compute.update import UpdateRule
from swaptrain.errors import ConfigError
from swaptrain.reference import train_reference

pytestmark = pytest.mark.trains

STEPS, MICRO_BATCHES, SEED, LR = 5, 3, 7, 1e-2


class Model(nn.Module):
    """A little of everything: tied weights, norms, a buffer, frozen and unreached parameters."""

    norm: nn.Module

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.middle = nn.Linear(16, 16)
        self.batch_norm = nn.BatchNorm1d(16) if batch_norm else None
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.unreached = nn.Parameter(torch.ones(3, 3))

    def forward(self, ids: Tensor, noise: Tensor) -> Any:
        hidden = self.frozen(self.middle(self.embedding(ids[:, :-1])) + noise)
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = self.norm(hidden) * self.scale
        self.mean.add_(hidden.detach().mean())
        logits = self.head(hidden.relu()).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def batches(step: int, micro_batch: int) -> dict[str, Tensor]:
    """Return a micro-batch that depends on nothing but its number."""
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return {
        "ids": torch.randint(0, 11, (4, 9), generator=generator),
        "noise": torch.randn(4, 8, 16, generator=generator) * 0.1,
    }


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_float32_is_the_loop_that_anyone_would_write(clip_norm: float | None) -> None:
    """Losses, norms, weights and buffers are those of the textbook loop, bit for bit."""
    schedule = Schedule("cosine", warmup_steps=2)
    factory = functools.partial(Model, batch_norm=True)
    result = train_reference(
        factory, batches, steps=STEPS, micro_batches=MICRO_BATCHES, seed=SEED, lr=LR,
        weight_decay=0.1, arguments={"betas": [0.9, 0.95]}, schedule=schedule, clip_norm=clip_norm,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = factory().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    full = Schedule("cosine", warmup_steps=2, decay_steps=STEPS)
    for step in range(1, STEPS + 1):
        losses = []
        for micro_batch in range(MICRO_BATCHES):
            loss = model(**batches(step, micro_batch)).loss
            losses.append(loss.detach().double())
            (loss / MICRO_BATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm or float("inf"))
        assert result.losses[step - 1] == pytest.approx(torch.stack(losses).mean().item(), abs=0)
        assert result.grad_norms[step - 1] == float(norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr=LR, schedule=full)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    assert list(result.parameters) == list(expected)
    for name, weight in expected.items():
        assert torch.equal(result.parameters[name], weight)
    for name, buffer in model.named_buffers():
        assert torch.equal(result.buffers[name], buffer)


def to_halves(model: nn.Module) -> dict[str, Tensor]:
    """Make the model's parameters bf16 in place and return their remainders."""
    remainders = {}
    for name, parameter in model.named_parameters():
        hi = torch.empty_like(parameter, dtype=torch.bfloat16)
        remainders[name] = torch.empty_like(parameter, dtype=torch.int16)
        split(parameter.detach(), hi, remainders[name])
        parameter.data = hi
    return remainders


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_bfloat16_is_the_split_master_update(name: str, clip_norm: float | None) -> None:
    """Stepping only the halves of each parameter, one by one, ends with the reference's masters."""
    arguments: dict[str, object] = {"momentum": 0.9} if name == "sgd" else {}
    result = train_reference(
        Model, batches, steps=STEPS, micro_batches=MICRO_BATCHES, seed=SEED,
        dtype=torch.bfloat16, optimizer=name, lr=LR, weight_decay=0.1, arguments=arguments,
        clip_norm=clip_norm,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Model().train()
    remainders = to_halves(model)
    rule = UpdateRule(name=name, lr=LR, weight_decay=0.1, arguments=arguments)
    state = {
        key: {k: torch.zeros(shape) for k, shape in rule.state_tensors(tuple(p.shape)).items()}
        for key, p in model.named_parameters()
    }
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for micro_batch in range(MICRO_BATCHES):
            batch = batches(step + 1, micro_batch)
            batch["noise"] = batch["noise"].bfloat16()
            (model(**batch).loss / MICRO_BATCHES).backward()
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[key] = sums[key] + gradient if key in sums else gradient
                parameter.grad = None
        assert set(sums) == {"embedding.weight", "middle.weight", "middle.bias", "norm.weight",
                             "norm.bias", "scale"}  # fmt: skip
        norm = total_norm([gradient_norm(sums[k]) for k in state if k in sums])
        assert result.grad_norms[step] == float(norm)
        if clip_norm is not None:
            for gradient in sums.values():
                gradient.mul_(clip_coefficient(norm, clip_norm))
        for key, parameter in model.named_parameters():
            if key in sums:
                rule.update_split(
                    parameter.detach(), remainders[key], sums[key], state[key],
                    updates_before=step, lr=LR, decay=parameter.ndim >= 2,
                )  # fmt: skip
    for key, parameter in model.named_parameters():
        master = torch.empty_like(parameter, dtype=torch.float32)
        join(parameter.detach(), remainders[key], master)
        assert torch.equal(result.parameters[key], master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_trained_stays(dtype: torch.dtype) -> None:
    """Frozen and unreached parameters keep their first float32 values; buffers their dtype."""
    torch.manual_seed(SEED)
    initial = dict(Model().named_parameters())
    result = train_reference(
        Model, batches, steps=2, seed=SEED, dtype=dtype, lr=LR, weight_decay=0.5
    )
    changed = {k for k, v in result.parameters.items() if not torch.equal(v, initial[k])}
    assert changed == {"embedding.weight", "middle.weight", "middle.bias", "norm.weight",
                       "norm.bias", "scale"}  # fmt: skip
    assert "head.weight" not in result.parameters
    assert result.buffers["mean"].dtype == torch.float32
    assert result.losses[0] > 0 and len(result.losses) == 2


def test_the_seed_reaches_every_generator() -> None:
    """A constructor that draws from torch, numpy and random is the same under the same seed."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2) + np.random.rand() + random.random())

        def forward(self, ids: Tensor, noise: Tensor) -> Tensor:
            return self.weight.sum() * 0.0

    runs = [
        train_reference(Drawn, batches, steps=1, seed=seed, weight_decay=0.0).parameters["weight"]
        for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_modules_that_the_model_keeps_in_float32() -> None:
    """Names listed by a model or a submodule match whole parts of the dotted name."""

    class Inner(nn.Module):
        _keep_in_fp32_modules = ("gate",)
        _keep_in_fp32_modules_strict = None

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(2, 2, bias=False)
            self.gates = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            assert self.gate.weight.dtype == torch.float32
            assert self.gates.weight.dtype == torch.bfloat16
            return (self.gates(x).float() @ self.gate.weight).sum()

    outer = nn.Sequential(Inner(), nn.ModuleDict({"gate": nn.Linear(2, 2)}))
    assert kept_in_float32(outer) == {"0.gate.weight"}
    result = train_reference(
        Inner, lambda step, micro_batch: {"x": torch.ones(1, 2)}, steps=2, dtype=torch.bfloat16
    )
    assert {weight.dtype for weight in result.parameters.values()} == {torch.float32}


def test_a_dtype_that_is_not_there_is_refused() -> None:
    """float64 is not silently something else."""
    with pytest.raises(ConfigError, match="float64"):
        train_reference(Model, batches, steps=1, dtype=torch.float64)
