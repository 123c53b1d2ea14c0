"""`plan --ranks`: a step of several ranks, rehearsed together."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.machine.speeds import Machine
from swaptrain.planning.planner import Plan
from swaptrain.planning.rank_costs import price_ranks
from swaptrain.program.cost import Disk, IOWork
from swaptrain.ranks.limits import step_committed
from swaptrain.store.format.root import RootRecord
from swaptrain.verbs.plans import planned as planned_module
from swaptrain.verbs.plans import ranks as ranks_module
from swaptrain.verbs.plans.planned import Planned, needs_of, planned
from swaptrain.verbs.plans.ranks import print_ranks, rank_plans, rank_tables
from swaptrain.verbs.plans.what_if import parse_machine
from tests.support.runs import config_of
from tests.verbs.test_plan import LLAMA, TEXT

pytestmark = pytest.mark.trains

SLOW = Machine(Disk(2e7, 2e7, 2e7), 0.1, IOWork(), {"float32": 1e11})

KEPT = {"keep": {"every": 1}, "commit": {"unit": "step"}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_module, "known_machine", lambda path, device: SLOW)


def job(tmp_path: Path, **sections: Any) -> Config:
    tree = {
        "model": {"hf": {**LLAMA, "num_hidden_layers": 2}},
        "data": {**TEXT, "micro_batches": 4},
    }
    tree["store"] = {"commit": {"unit": "step"}}
    tree["memory"] = {"host": "64MiB", "segment": "2MiB"}
    return config_of(tmp_path / "run", {**tree, **sections})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_module, "known_machine", lambda path, device: SLOW)
        return planned(job(tmp_path_factory.mktemp("plan")))


@pytest.fixture(scope="module")
def two(found: Planned) -> list[Plan]:
    return rank_plans(found, 2, lambda _: None)


def test_two_ranks_have_the_state_of_one_process_together(found: Planned, two: list[Plan]) -> None:
    """With the same cut, half of the micro-batches each, and the bytes that the formula has."""
    alone, model = found.made, found.made.captured.model
    assert all(plan.cuts == alone.cuts for plan in two)
    assert all(plan.builder.micro_batches == 2 for plan in two)
    owned = [list(plan.layouts.state) for plan in two]
    assert sorted(owned[0] + owned[1]) == list(alone.layouts.state)
    step = price_ranks(two, step_committed(found.config), SLOW, 1e9)
    weights_bytes, sums_bytes = 4 * model.parameter_count, 4 * model.parameter_count
    visits = 2 * weights_bytes  # less the last segment's, whose forward and backward are one
    for cost in step.ranks:
        assert 0.7 * visits + sums_bytes < cost.exchanged_bytes <= 1.05 * (visits + sums_bytes)
    assert len({cost.exchanged_bytes for cost in step.ranks}) == 1


def test_the_link_decides_where_it_is_slow(found: Planned, two: list[Plan]) -> None:
    """And the disk where it is not; the seconds of a link are its bytes over its speed."""
    config = step_committed(found.config)
    slow, fast = (price_ranks(two, config, SLOW, speed) for speed in (1e6, 1e12))
    assert slow.link_s == pytest.approx(slow.ranks[0].exchanged_bytes / 1e6)
    assert (slow.bound, fast.bound) == ("link", "disk")
    assert slow.step_s is not None and fast.step_s is not None and fast.best_s is not None
    assert slow.step_s > slow.link_s > fast.step_s
    assert slow.best_s == pytest.approx(slow.link_s) == pytest.approx(slow.busy_s)
    # Nothing is faster than the disk of the rank that moves most.
    assert fast.io_s is not None and fast.step_s >= 0.98 * fast.io_s


@pytest.mark.proof
def test_a_rank_has_an_nth_of_the_state_on_its_disk_and_moves_it_once(tmp_path: Path) -> None:
    """In bfloat16: 24 bytes a parameter over N for two trees; 26 of a step, where no cache is."""
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}
    data = {**TEXT, "micro_batches": 4, "micro_batch": 1}
    found = planned(job(tmp_path, model={"hf": wide, "dtype": "bfloat16"}, data=data))
    config, count = step_committed(found.config), found.made.captured.model.parameter_count
    for ranks in (2, 4):
        plans = rank_plans(found, ranks, lambda _: None)
        for plan in plans:
            (need,) = needs_of(plan, config, 0)
            assert need.slots_bytes == pytest.approx(24 * count / ranks, rel=0.05)
            assert found.disk_bytes_of(plan, config) == need.total_bytes
        # What a step spills is small here: a micro-batch has 16 tokens, a layer 512 columns.
        tight = [replace(plan, pool_bytes=plan.peaks.instruction_bytes) for plan in plans]
        for cost in price_ranks(tight, config, SLOW, 1e9).ranks:
            assert cost.traffic is not None
            moved = cost.traffic.read_bytes + cost.traffic.write_bytes
            assert moved == pytest.approx(26 * count / ranks, rel=0.05)


def test_weights_go_through_a_tree(found: Planned, two: list[Plan]) -> None:
    """Of four ranks: three rounds of a share, and sums of three others one behind the other."""
    four = rank_plans(found, 4, lambda _: None)
    config = step_committed(found.config)
    halves, quarters = (price_ranks(plans, config, SLOW, 1e6) for plans in (two, four))
    assert quarters.link_s == pytest.approx(3 * halves.link_s, rel=0.05)
    assert 2 * halves.link_s < quarters.busy_s < quarters.link_s
    assert max(c.exchanged_bytes for c in quarters.ranks) < 2 * halves.ranks[0].exchanged_bytes


def test_a_table_has_one_process_first(found: Planned) -> None:
    """Its efficiency is 1; another machine with another link is another table."""
    machines = [parse_machine("link 8Gb/s"), parse_machine("disk 10GB/s; link 8Gb/s")]
    here, other = rank_tables(found, [2], machines, lambda _: None)
    assert here.link_bytes_per_s == 1e9 and not here.is_link_assumed
    one, both = here.rows
    assert (one.ranks, one.efficiency, one.exchanged_bytes) == (1, 1.0, 0)
    assert one.step_s == found.price.step_s and one.disk_bytes == found.disk_bytes
    assert both.tokens_per_s is not None and one.tokens_per_s is not None
    assert both.efficiency == pytest.approx(both.tokens_per_s / one.tokens_per_s / 2)
    assert both.disk_bytes < one.disk_bytes
    assert other.rows[0].step_s is not None and other.rows[0].step_s < one.step_s
    assert other.rows[1].step_s is not None and both.step_s is not None
    assert other.rows[1].step_s < both.step_s
    (assumed,) = rank_tables(found, [1], [], lambda _: None)
    assert assumed.is_link_assumed and assumed.link_bytes_per_s == 1.25e9


@pytest.mark.parametrize(
    ("text", "speed"),
    [("10Gb/s", 1.25e9), ("1.2GB/s", 1.2e9), ("100 Gbit/s", 12.5e9), ("400Gbps", 50e9)],
)
def test_a_link_is_in_bits_or_bytes(text: str, speed: float) -> None:
    assert parse_machine(f"link {text}").network_bytes_per_s == speed


@pytest.mark.parametrize("text", ["link", "link 10Gb", "link 0Gb/s", "link 10gb/h", "link fast"])
def test_a_link_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood|is not a size"):
        parse_machine(text)


def test_what_is_printed(found: Planned, two: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that is assumed, a row each, and whether a second machine pays."""
    monkeypatch.setattr(ranks_module, "plans_of_ranks", lambda *_: two)
    tables = rank_tables(found, [2], [], lambda _: None)
    to = io.StringIO()
    print_ranks(found, tables, Console(file=to, width=110))
    head, *_, first, second, verdict = to.getvalue().splitlines()
    assert "like this one; link 10Gb/s is assumed" in head
    assert [first.split()[0], second.split()[:2]] == ["1", ["2", "2"]]
    assert second.split()[-1] == tables[0].rows[1].bound == "disk"
    assert verdict.startswith("2 ranks: 1.") and "the disk takes longest" in verdict


@pytest.mark.whole
def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key may come behind the numbers; the JSON has the rows, the report the disk of a rank."""
    job(tmp_path)
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--ranks", "2", "memory.host=65MiB"]
    assert main([*command, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["plan"]["host_bytes"] == 65 << 20
    (table,) = tree["ranks"]
    assert [row["ranks"] for row in table["rows"]] == [1, 2]
    assert tree["plan"]["ranks_disk_bytes"] == [[2, table["rows"][1]["disk_bytes"]]]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "disk of a rank" in shown
    assert "times the speed of one process" in shown


@pytest.mark.parametrize(
    ("sections", "arguments", "words"),
    [
        ({}, ["--ranks", "0"], "--ranks is 0"),
        ({}, ["--ranks", "two"], "--ranks two"),
        ({}, ["--ranks", "3"], "data.micro_batches is 4, which 3 ranks cannot divide"),
        ({"store": {"commit": {"unit": "segment"}}}, ["--ranks", "2"], "store.commit.unit"),
        (
            {"store": {"keep": {"every": 1}, "commit": {"unit": "step"}}},
            ["--ranks", "2"],
            "store.keep",
        ),
        ({"model": {"hf": LLAMA, "dtype": "float16"}}, ["--ranks", "2"], "float16"),
        ({}, ["--what-if", "link 1Gb/s"], "say how many with --ranks N"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_the_model_is_made(
    sections: dict[str, Any],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit 2, and the key."""
    job(tmp_path, **sections)
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert "capturing" not in printed


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"memory": {"host": "128MiB", "segment": "64MiB"}}, "would own none"),
        (
            {
                "model": {"python": "tests.support.models:convolutional"},
                "data": {"python": "tests.support.datasets:image_labels", "micro_batches": 2},
            },
            "changes the buffer",
        ),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(
    sections: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, **sections)
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--ranks", "2"]
    assert main(command) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_exists_is_not_divided(found: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    existing = Planned(**{**vars(found), "root": object.__new__(RootRecord)})
    with pytest.raises(ConfigError, match="holds a run of one process"):
        rank_tables(existing, [2], [], lambda _: None)


def test_ranks_on_another_machine_choose_which_segments_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow processor with a fast disk reads what it would compute again."""
    priced: list[Sequence[Plan]] = []

    def noted(plans: Sequence[Plan], *arguments: Any, **named: Any) -> Any:
        priced.append(plans)
        return price_ranks(plans, *arguments, **named)

    monkeypatch.setattr(ranks_module, "price_ranks", noted)
    slow = parse_machine("disk 10000GB/s; 1 GFLOPS; link 100GB/s")
    found = planned(job(tmp_path, train={"recompute": None}))
    rank_tables(found, [2], [slow], lambda _: None)
    (plans,) = priced
    assert all(plan.builder.saves for plan in plans)
