"""A run that is killed, wherever, ends with the bits of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.matrix import proof_but
from tests.support.serving import Server
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {
        "python": "tests.support.models:gpt",  # tied weights, dropout, values read far away
        "kwargs": {"layers": 2, "dropout": 0.1},
    },
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "32KiB"},
    "train": {"steps": 4},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},  # batch norm
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 4},
}
TEXT: dict[str, Any] = {
    "model": {"hf": LLAMA},
    "data": {"python": "tests.support.datasets:text"},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 4},
}
LORA = {**TEXT, "lora": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}}
MUON: dict[str, Any] = {
    "name": "muon",
    "groups": [{"match": ["*norm*", "*embed*", "lm_head*"], "name": "adamw"}],
}
CLIPPED = {"optimizer": {"clip_norm": 0.3}}
PARTS = {"memory": {"segment": "200KiB"}, "store": {"chunk": "8KiB"}}
TREES = {"store": {"commit": {"every": 3}}, "train": {"steps": 7}}
EVALUATED = {"eval": {"python": "tests.support.datasets:tokens", "every": 2, "batches": 2}}
MODES: dict[str, dict[str, Any]] = {
    "fused": GPT,
    "clipped": {**GPT, **CLIPPED, **EVALUATED},
    "clipped-one-bfloat16": {
        **CLIPPED,
        "model": {**GPT["model"], "dtype": "bfloat16"},
        "data": {**GPT["data"], "micro_batches": 1},
        "memory": GPT["memory"],
        "train": {"steps": 6},
    },
    "two-repeated": {**GPT, "store": {"commit": {"lag": 2}}},
    "two-repeated-clipped": {**CNN, **CLIPPED, "store": {"commit": {"lag": 2}}},
    "parts": {**GPT, **PARTS},
    "parts-clipped": {**GPT, **PARTS, **CLIPPED},
    "float16": {**GPT, "model": {**GPT["model"], "dtype": "float16"}},
    "parts-8bit": {**GPT, **PARTS, "optimizer": {"state": "8bit", "clip_norm": 0.3}},
    "bfloat16-state": {**GPT, "optimizer": {"state": "bfloat16"}},
    "no-master": {
        **GPT,
        "model": {**GPT["model"], "dtype": "bfloat16", "master": "none"},
        "optimizer": {"state": "8bit", "clip_norm": 0.3},
    },
    "muon": {**TEXT, "optimizer": MUON},
    "skip-ignored": {
        **TEXT,
        "data": {"python": "tests.support.datasets:answers"},
        "train": {"steps": 4, "skip_ignored": True},
    },
    "parts-trees": {**GPT, **PARTS, **TREES, "store": {**PARTS["store"], **TREES["store"]}},
    "batch-norm": CNN,
    "batch-norm-clipped": {**CNN, **CLIPPED},
    "trees": {**GPT, **TREES, **EVALUATED},
    "trees-clipped": {**CNN, **TREES, **CLIPPED},
    "lora": LORA,
    "lora-step": {**LORA, "store": {"commit": {"unit": "step"}}},
    "lora-nf4": {**LORA, "model": {**LORA["model"], "base": "nf4"}},
}
SMALL: dict[str, Any] = {
    **GPT,
    "model": {**GPT["model"], "kwargs": {"layers": 1, "dropout": 0.1}},
    "data": {**GPT["data"], "micro_batches": 2},
    "memory": {"segment": "64KiB"},
    "train": {"steps": 2},
}
SMALL_CNN = {**CNN, **CLIPPED, "data": {**CNN["data"], "micro_batches": 2}, "train": {"steps": 2}}
LOSES: dict[str, dict[str, Any]] = {
    "hand-off": {"tree": SMALL},
    # With little memory a run ends by itself: nothing of its state is clean, so nothing can go.
    "an array": {"tree": SMALL, "pool": 20},
    "an array of a part": {"tree": {**SMALL, **PARTS}, "pool": 20},
    "finished gradients": {"tree": SMALL_CNN},
    "buffers": {"tree": SMALL_CNN},
}
"""What a run cannot do without, and a job that shows it."""
REPEATS: dict[str, dict[str, Any]] = {
    "barriers": {"tree": SMALL, "delay_s": 0.02},
    "visits": {"tree": SMALL, "delay_s": 0.02},
    "activations": {"tree": SMALL},
}
"""What costs no bit but time: a kill repeats more without it; sooner where the disk is slow."""


def ask(server: Server, folder: Path, do: str, tree: dict[str, Any], **plan: Any) -> dict[str, Any]:
    """Have a job of that config killed; its slabs leave a little room."""
    plan = {"do": do, "folder": str(folder), "tree": tree, "pool": 1.3, **plan}
    return server.ask("tests.support.killing", **plan)


BY_HAND = {
    "lora",
    "parts",
    "batch-norm",
    "two-repeated",
    "lora-nf4",
    "bfloat16-state",
    "no-master",
    "muon",
    "skip-ignored",
    "two-repeated-clipped",
    "parts-trees",
    "batch-norm-clipped",
    "trees-clipped",
}
"""Modes whose halves are killed in modes of their own; scripts/proof/chaos.py kills them too."""


@pytest.mark.parametrize(
    "mode",
    [
        *proof_but([mode for mode in MODES if mode not in {"fused", *BY_HAND}], "clipped"),
        *(pytest.param(mode, marks=pytest.mark.whole) for mode in sorted(BY_HAND)),
    ],
)
def test_a_run_killed_at_random_system_calls_ends_with_the_same_bits(
    mode: str, server: Server, tmp_path: Path
) -> None:
    """Eight kills, torn writes and repeated recoveries among them, change no bit and no line.

    And no process does again more than one segment's forward or backward, of what was completed;
    two segments' backwards with `store.commit.lag: 2`.
    """
    report = ask(server, tmp_path, "chain", MODES[mode], kills=8)
    assert report["wrong"] is None


@pytest.mark.proof
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(
    server: Server, tmp_path: Path
) -> None:
    """Twenty times SIGKILL, from outside, in runs of twelve steps."""
    tree = {**GPT, "train": {"steps": 12}}
    report = ask(server, tmp_path, "chain", tree, kills=20, timed=True)
    assert report["wrong"] is None


@pytest.mark.proof
def test_items_that_are_drawn_are_the_same_after_a_kill(server: Server, tmp_path: Path) -> None:
    """Augmented images, into the second epoch: 7 steps take 42 of 40 items."""
    tree = {**CNN, "data": {"python": "tests.support.datasets:moved"}, "train": {"steps": 7}}
    report = ask(server, tmp_path, "chain", tree, kills=8)
    assert report["wrong"] is None


@pytest.mark.parametrize(
    "mode", proof_but(["fused", "batch-norm-clipped"], whole=["batch-norm-clipped"])
)
def test_activations_that_a_power_loss_took_are_made_again(
    mode: str, server: Server, tmp_path: Path
) -> None:
    """They were never flushed; whatever is left of them and of their journal, the bits are same."""
    report = ask(server, tmp_path, "power loss", MODES[mode], positions=5)
    assert not report["wrong"]
    assert report["kills"] > 3 and report["more"] > 0


@pytest.mark.parametrize("part", proof_but(LOSES, whole=["an array", "buffers"]))
def test_a_kill_loses_what_was_not_made_durable(part: str, server: Server, tmp_path: Path) -> None:
    """Each object that a commit writes is needed: these kills can find what is missing."""
    report = ask(server, tmp_path, "sweep", positions=14, enough=1, without=part, **LOSES[part])
    assert report["lost"] == 1


@pytest.mark.parametrize("part", proof_but(REPEATS, whole=["visits", "activations"]))
def test_a_kill_repeats_more_without_a_wait_and_loses_nothing(
    part: str, server: Server, tmp_path: Path
) -> None:
    """A barrier is about work: what it waits for is safe by the order of the commits alone."""
    report = ask(server, tmp_path, "sweep", positions=14, enough=3, without=part, **REPEATS[part])
    assert report["wrong_count"] > 0 and report["lost"] == 0


@pytest.mark.parametrize(
    "part",
    proof_but(["hand-off", "finished gradients", "barriers"], whole=["hand-off", "barriers"]),
)
def test_the_same_kills_cost_nothing_where_nothing_is_left_out(
    part: str, server: Server, tmp_path: Path
) -> None:
    """The jobs of the two tests above, whole."""
    job = {**LOSES, **REPEATS}[part]
    report = ask(server, tmp_path, "sweep", positions=14, **job)
    assert not report["wrong"]
    assert report["kills"] > 7


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
def test_no_position_of_a_kill_changes_a_bit(mode: str, server: Server, tmp_path: Path) -> None:
    """A hundred positions spread over a run, each followed by one recovery.

    Which does again one segment's forward or backward at most.
    """
    report = ask(server, tmp_path, "sweep", MODES[mode], positions=100)
    assert not report["wrong"]
    assert report["kills"] > 50
