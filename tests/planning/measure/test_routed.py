"""What a mixture's dry run computes has the memory of a training: many experts are chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swaptrain.compute.object_tensors import views
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.planning.measure.sampler import Sampler
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Instruction, Kind, Operation
from tests.support.mixtures import EXPERTS, MIXTURES
from tests.support.runs import config_of

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.fixture
def experts_taught(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return of how many experts each backward of the dry run leaves a gradient."""
    found: list[int] = []
    execute = Sampler._execute

    def counted(self: Sampler, instruction: Instruction, slabs: Slabs, step: int) -> None:
        accumulators = [key for key in slabs if key.kind is Kind.ACCUMULATOR]
        if instruction.operation is Operation.BACKWARD:
            for key in accumulators:
                for gradient in views(self.layouts.array(key), slabs[key]).values():
                    gradient.zero_()
            for key in (key for key in slabs if key.kind is Kind.GRADIENT):
                for gradient in views(self.layouts.array(key), slabs[key]).values():
                    gradient.fill_(1.0)
        execute(self, instruction, slabs, step)
        if instruction.operation is Operation.BACKWARD:
            for key in accumulators:
                for gradient in views(self.layouts.array(key), slabs[key]).values():
                    if gradient.dim() == 3 and gradient.shape[0] == EXPERTS:
                        found.append(int(gradient.flatten(1).any(1).sum()))

    monkeypatch.setattr(Sampler, "_execute", counted)
    return found


def prepared(run_dir: Path, model: dict[str, Any], data: str) -> None:
    tree = {
        "model": model,
        "data": {"python": f"tests.support.datasets:{data}", "micro_batches": 2},
        "memory": {"segment": "16KiB"},
        "train": {"check_capture": False},
    }
    Prepared(config_of(run_dir, tree), None, lambda _: None)


def test_the_router_of_a_dry_run_chooses_many_experts(
    tmp_path: Path, experts_taught: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of zeros it would choose the same two for each token, and the memory of six is not seen."""
    for name in CAPACITIES:
        monkeypatch.setenv(name, "")  # so that it is as it was behind the test
        monkeypatch.delenv(name)
    prepared(tmp_path / "dense", {"python": "tests.support.models:gpt"}, "tokens")
    assert not any(name in os.environ for name in CAPACITIES)
    mixture = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
    prepared(tmp_path / "mixture", {"hf": mixture}, "text")
    assert experts_taught and min(experts_taught) > mixture["num_experts_per_tok"]
    assert [os.environ[name] for name in CAPACITIES] == ["64", "64"]
