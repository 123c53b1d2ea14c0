"""A plan of many equal layers measures each of them once, and the memory of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swaptrain.compute.known_products import KnownProducts
from swaptrain.config.schema import Config
from swaptrain.planning.measure.sampler import Sampler
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.units import MIB
from tests.support.mixtures import MIXTURES
from tests.support.runs import config_of

LAYERS = 4
CODED: dict[str, Any] = {
    "model": {
        "hf": {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 512, "intermediate_size": 2048,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "dtype": "bfloat16",
        "base": "nf4",
    },
    "lora": {"r": 4, "target_modules": "all-linear"},
    "data": {"python": "tests.support.datasets:text"},
}  # fmt: skip


class Watched(KnownProducts):
    """Counts how often each product is asked for, and how often it is computed."""

    def __init__(self, enough_s: float, least_flops: int) -> None:
        super().__init__(enough_s=enough_s, least_flops=least_flops)
        self.asked = self.computed = 0
        self.operations: dict[Any, Callable[..., Any]] = {}

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        def computing(*args: Any, **kwargs: Any) -> Any:
            self.computed += 1
            return func(*args, **kwargs)

        self.asked += 1
        return super().product(self.operations.setdefault(func, computing), args, kwargs)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Operation]]:
    """Return the rounds in which instructions are run, with the instruction's operation."""
    found: list[tuple[int, Operation]] = []
    sample = Sampler.sample

    def noted(self: Sampler, instructions: list[Instruction], step: int) -> None:
        found.extend((step, instruction.operation) for instruction in instructions)
        sample(self, instructions, step)

    monkeypatch.setattr(Sampler, "sample", noted)
    return found


def planner_of(config: Config, prepared: Prepared, products: KnownProducts) -> Planner:
    batch = dict(prepared.built.uncut.batch)
    return Planner(
        config, prepared.built, prepared.rules, prepared.device, batch, products=products
    )


def arena(plan: Plan) -> tuple[float, list[tuple[int, int]], set[Any]]:
    saved = [(k, layout.nbytes) for k, layout in plan.layouts.saved.items()]
    return plan.measured.arena_bytes, saved, set(plan.measured.seconds)


@pytest.mark.trains
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("segment", ["6MiB", "1GiB"])
def test_equal_layers_are_computed_once(
    segment: str, tmp_path: Path, samples: list[tuple[int, Operation]]
) -> None:
    """What takes long is run once, an update twice; memory is that of all layers."""
    pytest.importorskip("peft")
    config = config_of(tmp_path / "run", {**CODED, "memory": {"segment": segment}}).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    samples.clear()  # of the first one in a process, which loads libraries
    every_bytes, *every = arena(planner_of(config, prepared, KnownProducts()).plan())
    assert {step for step, _ in samples} == {1, 2, 3}
    samples.clear()
    products = Watched(enough_s=0.0, least_flops=0)
    found = planner_of(config, prepared, products)
    plan = found.plan()
    rounds = Counter((step, operation is Operation.UPDATE) for step, operation in samples)
    assert set(rounds) == {(1, False), (1, True), (2, True)}
    assert products.asked > LAYERS * products.computed > 0
    taken_bytes, *few = arena(plan)
    assert few == every
    assert abs(taken_bytes - every_bytes) < 8 * MIB + every_bytes // 8
    computed = products.computed
    planner_of(config, prepared, products).plan()
    assert products.computed == computed, "the next cut need not compute what this one did"


@pytest.mark.trains
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_what_is_small_is_computed_whole(
    tmp_path: Path, samples: list[tuple[int, Operation]]
) -> None:
    """In all rounds, and no call of it is looked at."""
    pytest.importorskip("peft")
    config = config_of(tmp_path / "run", CODED).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    samples.clear()
    usual = KnownProducts()
    products = Watched(usual.enough_s, usual.least_flops)
    planner_of(config, prepared, products).plan()
    assert {step for step, _ in samples} == {1, 2, 3}
    assert products.asked == 0


@pytest.mark.trains
def test_a_router_chooses_by_what_is_computed(tmp_path: Path) -> None:
    """Of a mixture nothing is left out: by zeros the first experts alone would be chosen."""
    mixture = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
    tree = {"model": {"hf": mixture}, "data": CODED["data"]}
    config = config_of(tmp_path / "run", tree).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    products = Watched(enough_s=0.0, least_flops=0)
    planner_of(config, prepared, products).plan()
    assert products.asked == 0
