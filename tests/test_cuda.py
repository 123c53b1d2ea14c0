"""A CUDA device takes the same road; these need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.test_exactness import LLAMA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def _tree(dtype: str, host: str, **train: Any) -> dict[str, Any]:
    return {
        "model": {"hf": LLAMA, "dtype": dtype},
        "data": {"python": "tests.support.datasets:text"},
        "device": "cuda",
        "memory": {"host": host, "segment": "64KiB"},
        "train": {"steps": 3, **train},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_budgets_and_waves_do_not_change_the_bits(dtype: str, tmp_path: Path) -> None:
    """On one device the bits do not depend on memory.host or the wave."""
    large = trained(config_of(tmp_path / "large", _tree(dtype, "1GiB", deterministic=True)))
    tree = _tree(dtype, "512MiB", wave=1, deterministic=True)
    small = trained(config_of(tmp_path / "small", tree))
    assert losses(large) == losses(small)
    assert_same_bits(weights(large), weights(small))


def test_the_loss_falls_as_on_the_cpu(tmp_path: Path) -> None:
    """In float32 the losses agree with the CPU's to rounding."""
    tree = _tree("float32", "1GiB")
    cuda = losses(trained(config_of(tmp_path / "cuda", tree)))
    cpu = losses(trained(config_of(tmp_path / "cpu", {**tree, "device": "cpu"})))
    assert cuda == pytest.approx(cpu, rel=1e-4)
