"""`memory.tokens`: the same bits for each budget, each cut and through a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.resume_rules import resume_rule
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.verbs.plan import plan
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    norms,
    reference,
    rows,
    trained,
    weights,
)
from tests.whole.test_exactness import GPT2, LLAMA
from tests.whole.test_resume import interrupted, same_end

pytestmark = pytest.mark.trains

TEXT = "tests.support.datasets:text"
TOKENS = 10
"""In a range; a micro-batch has two sequences of 16."""
UNTIED = {**LLAMA, "tie_word_embeddings": False, "num_hidden_layers": 2}
LORA = {"lora": {"r": 4, "target_modules": "all-linear"}}
MODES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied-bfloat16": {"model": {"hf": LLAMA, "dtype": "bfloat16"}},
    "gpt2": {"model": {"hf": GPT2}},
    "clipped-bfloat16": {"model": {"dtype": "bfloat16"}, "optimizer": {"clip_norm": 0.3}},
    "lora": LORA,
    "lora-nf4": {**LORA, "model": {"base": "nf4", "dtype": "bfloat16"}},
    "float16": {"model": {"dtype": "float16"}},
    "saved": {"train": {"recompute": False}},
    "evaluated": {"eval": {"python": TEXT, "every": 1, "batches": 2}},
    "skipping": {"train": {"skip_ignored": True}},
}


def job(run_dir: Path, *others: dict[str, Any], tokens: int | None = TOKENS) -> Config:
    tree: dict[str, Any] = {
        "model": {"hf": UNTIED},
        "data": {"python": TEXT, "micro_batches": 2},
        "memory": {"tokens": tokens},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }
    for other in others:
        for section, fields in other.items():
            tree[section] = {**tree.get(section, {}), **fields}
    return config_of(run_dir, tree)


@pytest.mark.parametrize(
    "mode",
    proof_but(
        MODES,
        "clipped-bfloat16",
        whole=[mode for mode in MODES if mode != "clipped-bfloat16"],
    ),
)
def test_a_run_under_pressure_ends_with_the_bits_of_one_with_room(
    mode: str, tmp_path: Path
) -> None:
    """In many segments, stopped in a commit and resumed, against one segment."""
    roomy = trained(job(tmp_path / "roomy", MODES[mode], {"memory": {"segment": "64MiB"}}))
    small = {"memory": {"host": "48MiB", "segment": "16KiB"}}
    cut = trained(job(tmp_path / "cut", MODES[mode], small))
    assert losses(cut) == losses(roomy)
    held_out = [[row.get("eval_loss") for row in rows(run_dir)] for run_dir in (cut, roomy)]
    assert held_out[0] == held_out[1]
    assert_same_bits(weights(cut), weights(roomy))
    stopped = job(tmp_path / "stopped", MODES[mode], small)
    interrupted(stopped, 5)
    same_end(trained(stopped), cut)


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["llama", "lora"])
def test_it_trains_as_plain_pytorch_within_rounding(mode: str, tmp_path: Path) -> None:
    """The first loss has the same bits; the rest follows sums in another order."""
    config = job(tmp_path / "run", MODES[mode])
    run_dir = trained(config)
    plain = reference(job(tmp_path / "plain", MODES[mode], tokens=None))
    assert losses(run_dir)[0] == plain.losses[0]
    assert losses(run_dir) == pytest.approx(plain.losses, rel=1e-4)
    assert all(norm > 0 for norm in norms(run_dir))


@pytest.mark.whole
def test_the_comparison_at_the_start_says_by_how_much_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compares what trains: no equal bits are claimed that are not there."""
    compared = {"train": {"steps": 1, "check_capture": "required"}}
    trained(job(tmp_path / "run", compared, {"model": {"dtype": "bfloat16"}}))
    said = capsys.readouterr()
    assert "compared with plain PyTorch in float32: the same within" in said.out + said.err


def test_bits_depend_on_it_so_it_cannot_change() -> None:
    assert resume_rule("memory.tokens") == "no"


@pytest.mark.whole
def test_it_cannot_change_in_a_run(tmp_path: Path) -> None:
    trained(job(tmp_path / "run", {"train": {"steps": 1}}))
    with pytest.raises(ConfigError, match=r"memory\.tokens: 10 -> 12"):
        trained(job(tmp_path / "run", tokens=12))


@pytest.mark.parametrize("tokens", proof_but([32, 1000], 32))
def test_ranges_that_hold_all_tokens_are_refused(tokens: int, tmp_path: Path) -> None:
    """It would compute as ever, and the key would say nothing."""
    with pytest.raises(ConfigError, match=rf"memory\.tokens is {tokens}, and no part"):
        plan(job(tmp_path / "run", tokens=tokens))


LONG: dict[str, Any] = {
    "model": {
        "hf": {**UNTIED, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 1,
               "max_position_embeddings": 4096},
    },
    "data": {
        "python": None, "text": ["{stdlib}/[a-c]*.py"], "sequence_length": 4096, "micro_batch": 1,
    },
}  # fmt: skip
"""A layer and a head whose activations are far larger than their weights."""


@pytest.mark.whole
def test_a_long_sequence_needs_less_memory(tmp_path: Path) -> None:
    """As the dry run measures it."""
    whole = Prepared(job(tmp_path / "whole", LONG, tokens=None), None, lambda _: None).plan
    ranges = Prepared(job(tmp_path / "ranges", LONG, tokens=256), None, lambda _: None).plan
    assert ranges.arena_bytes < whole.arena_bytes / 2
    model = ranges.captured.model
    assert all(0 < s.at_once_bytes <= s.activation_bytes for s in model.segments)


@pytest.mark.whole
def test_a_budget_that_activations_do_not_fit_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"or set memory\.tokens, such as 1024"):
        plan(job(tmp_path / "whole", LONG, {"memory": {"host": "72MiB"}}, tokens=None))
