"""Modules that are constructed both ways, plainly and recorded, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.init.construct import Construction, construct

Factory = Callable[[], nn.Module]
SEED = 11


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype, shape, strides and every bit (NaN equals the same NaN)."""
    if (first.dtype, first.shape, first.stride()) != (second.dtype, second.shape, second.stride()):
        return False
    return (
        first.detach().numpy(force=True).tobytes() == second.numpy(force=True).tobytes()
        if (first.dtype is not torch.bfloat16)
        else torch.equal(first.detach().view(torch.int16), second.detach().view(torch.int16))
    )


def states() -> tuple[bytes, object, bytes]:
    numpy_state = np.random.get_state(legacy=False)["state"]["key"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state.tobytes()


def constructed(
    factory: Factory, scratch_dir: Path, fake_from_bytes: int = 16 << 10
) -> Construction:
    """Construct `factory` both ways and check all that has to be equal."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    plain = factory()
    plain_states = states()
    built = construct(
        factory,
        seed=SEED,
        scratch_dir=scratch_dir,
        fake_from_bytes=fake_from_bytes,
        check=lambda _: None,  # parameters in memory of others are replayed exactly, too
    )
    assert states() == plain_states
    assert built.recorded == (built.refusal is None)

    expected = dict(plain.named_parameters(remove_duplicate=False))
    parameters = dict(built.module.named_parameters(remove_duplicate=False))
    assert list(parameters) == list(expected)
    assert [n for n, _ in built.module.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    for name in reversed(expected):
        fake = parameters[name]
        assert isinstance(fake, FakeTensor) and isinstance(fake, nn.Parameter), name
        assert fake.fake_mode is built.fake_mode and fake.device.type == "cpu", name
        assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == (
            expected[name].shape,
            expected[name].stride(),
            expected[name].dtype,
            expected[name].requires_grad,
        ), name
        value = built.value(name)
        assert type(value) is torch.Tensor and not value.requires_grad
        assert same_bits(expected[name], value), name
    buffers = dict(built.module.named_buffers())
    assert list(buffers) == [name for name, _ in plain.named_buffers()]
    for name, buffer in plain.named_buffers():
        assert type(buffers[name]) is type(buffer), name
        assert same_bits(buffer, buffers[name]), name
    assert [(n, type(m).__name__) for n, m in built.module.named_modules()] == [
        (n, type(m).__name__) for n, m in plain.named_modules()
    ]
    assert states() == plain_states
    return built


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(300, 64, padding_idx=3), nn.Linear(64, 300, bias=False))
    model[1].weight = model[0].weight
    # A factory's own attribute, which torch's types do not know, stays on the fake parameter.
    model[0].weight.no_decay = True  # type: ignore[assignment]
    return model


def tied_small() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.no_decay = True  # type: ignore[assignment]  # as above
    return model


def linear_pair() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 90), nn.Linear(90, 3))


def runs_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64))
    model(torch.randn(4, 16, 8, 8))
    return model


def lazy_with_a_forward() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(90), nn.Linear(90, 90))
    with torch.no_grad():
        model(torch.randn(2, 100))
    return model
