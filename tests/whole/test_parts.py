"""An update in parts: the bits of one in one piece, in less memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from swaptrain.planning.planner import Plan, Planner
from swaptrain.program.instructions import Operation
from tests.support.matrix import proof_but
from tests.support.plain import PlainRuns
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    norms,
    trained,
    weights,
)

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "200KiB"},  # 2,048 elements a chunk: a segment has several parts
    "store": {"chunk": "8KiB"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "clipped": {"optimizer": {"clip_norm": 0.3}},
    "one-micro-batch": {"data": {**GPT["data"], "micro_batches": 1}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
    "radam": {"optimizer": {"name": "radam"}},  # without an implementation that is fused
    "trees": {"store": {**GPT["store"], "commit": {"every": 3}}},
    "verified": {"store": {**GPT["store"], "verify": "always"}},
}


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Slabs for one instruction only, so that parts leave memory between two of them."""
    plans: list[Plan] = []
    plan = Planner.plan

    def smallest(planner: Planner) -> Plan:
        found = plan(planner)
        plans.append(replace(found, pool_bytes=found.peaks.instruction_bytes))
        return plans[-1]

    monkeypatch.setattr(Planner, "plan", smallest)
    return plans


@pytest.mark.parametrize(
    ("variant", "dtype"),
    proof_but(
        product(VARIANTS, ["float32", "bfloat16"]),
        ("clipped", "float32"),
        ("radam", "bfloat16"),
        ("trees", "float32"),
    ),
)
def test_parts_change_no_bit(
    variant: str, dtype: str, tmp_path: Path, small_pool: list[Plan], plain_runs: PlainRuns
) -> None:
    """Losses, norms and weights are the reference's, in float32 plain PyTorch's."""
    tree = {**GPT, **VARIANTS[variant], "model": {**GPT["model"], "dtype": dtype}}
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    (plan,) = small_pool
    assert plan.layouts.parts and min(plan.layouts.parts.values()) > 2
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    if dtype == "float32":
        assert norms(run_dir) == plain.grad_norms
    else:
        assert norms(run_dir) == pytest.approx(plain.grad_norms, rel=1e-5)
    assert_same_bits(weights(run_dir), plain.parameters)


def test_an_update_in_parts_takes_less_memory(tmp_path: Path, small_pool: list[Plan]) -> None:
    """Of what only it reads, an update holds a part; computing needs the rest in one piece."""
    trained(config_of(tmp_path / "run", {**GPT, "train": {"steps": 1}}))
    (plan,) = small_pool
    whole = replace(plan.builder, parts={}).step()
    size_bytes = plan.layouts.size_bytes

    def most_bytes(updates: list[Any]) -> int:
        return max(sum(size_bytes(key) for key in set(i.touches)) for i in updates)

    parted = [i for i in plan.step if i.operation is Operation.UPDATE]
    one = most_bytes([i for i in whole if i.operation is Operation.UPDATE])
    assert most_bytes(parted) < one * 0.7
