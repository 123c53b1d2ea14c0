"""What a mixture's dry run computes has the memory of a training: many experts are chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from swaptrain.capture.captured import Captured
from swaptrain.compute.object_tensors import views
from swaptrain.compute.operations import Operations
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Instruction, Kind, Operation
from swaptrain.store.format.object_layouts import Layouts
from tests.support.mixtures import EXPERTS, MIXTURES
from tests.support.runs import config_of

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.fixture
def experts_taught(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return of how many experts each backward of the dry run leaves a gradient."""
    found: list[int] = []
    layouts: dict[Operations, Layouts] = {}
    begin, backward = Operations.__init__, Operations.backward

    def begun(self: Operations, captured: Captured, of: Layouts, *given: Any) -> None:
        layouts[self] = of
        begin(self, captured, of, *given)

    def counted(self: Operations, instruction: Instruction, slabs: Slabs, step: int) -> None:
        if instruction.operation is not Operation.BACKWARD:
            backward(self, instruction, slabs, step)
            return
        of_kind = {kind: [key for key in slabs if key.kind is kind] for kind in Kind}
        for kind, number in (Kind.ACCUMULATOR, 0.0), (Kind.GRADIENT, 1.0):
            for key in of_kind[kind]:
                for gradient in views(layouts[self].array(key), slabs[key]).values():
                    gradient.fill_(number)
        backward(self, instruction, slabs, step)
        for key in of_kind[Kind.ACCUMULATOR]:
            for gradient in views(layouts[self].array(key), slabs[key]).values():
                if gradient.dim() == 3 and gradient.shape[0] == EXPERTS:
                    found.append(int(gradient.flatten(1).any(1).sum()))

    monkeypatch.setattr(Operations, "__init__", begun)
    monkeypatch.setattr(Operations, "backward", counted)
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
