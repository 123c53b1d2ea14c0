"""Which kernels torch may use on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch import Tensor, nn

from swaptrain.compute.device import choose_kernels
from swaptrain.errors import ConfigError
from tests.support.runs import config_of, trained


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a test changes for the whole process."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("device", "wanted"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_only_where_sums_have_no_order_are_kernels_chosen(device: str, wanted: bool) -> None:
    """A CPU's kernels are deterministic as they are, and some have another order if told to be."""
    choose_kernels(torch.device(device), deterministic=wanted)
    chosen = device == "cuda" and wanted
    assert torch.are_deterministic_algorithms_enabled() == chosen
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == chosen
    assert torch.utils.deterministic.fill_uninitialized_memory != chosen


class Putting(nn.Module):
    """Uses an operation that torch has no deterministic kernel for, on a CPU either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros(1, dtype=torch.int64)
        return self.linear(x).put(first, torch.ones(1)).square().mean()


@pytest.mark.trains
@pytest.mark.usefixtures("kernels")
def test_an_operation_without_such_a_kernel_is_refused(tmp_path: Path) -> None:
    """With the key that asked for it."""
    tree: dict[str, Any] = {
        "model": {"python": f"{__name__}:Putting"},
        "data": {"python": "tests.support.datasets:vectors"},
        "train": {"steps": 1},
    }
    trained(config_of(tmp_path / "plain", tree))
    torch.use_deterministic_algorithms(True)  # as on a GPU
    with pytest.raises(ConfigError, match=r"train\.deterministic: put_ does not have a determin"):
        trained(config_of(tmp_path / "run", tree))
    assert not (tmp_path / "run" / "store").exists()
