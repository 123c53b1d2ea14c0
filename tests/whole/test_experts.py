"""Layers of experts in ranges: the bits of plain PyTorch, from the disk and through a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.ranges import DividedModel
from swaptrain.program.row_ranges import WHOLE, RangeSizes
from tests.models.stored.test_pretrained import STILL, loaded, saved
from tests.support.divided import (
    assert_clipped_within_rounding,
    assert_plain_bits,
    assert_same_run,
    ranges_of,
    resumes_with_its_ranges,
)
from tests.support.matrix import proof_but
from tests.support.mixtures import DENSE_MIXTURE, MIXTURES
from tests.support.plain import PlainRuns
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    trained,
    weights,
)
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

TEXT = "tests.support.datasets:text"


def job(run_dir: Path, name: str, experts: int | None, **sections: dict[str, Any]) -> Config:
    transformers.logging.set_verbosity_error()
    tree: dict[str, Any] = {
        "model": {"hf": {"model_type": name, **MIXTURES[name]}},
        "data": {"python": TEXT, "micro_batches": 2},
        "memory": {"segment": "16KiB", "experts": experts},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }
    for section, fields in sections.items():
        tree[section] = {**tree.get(section, {}), **fields}
    return config_of(run_dir, tree)


def dense_job(run_dir: Path, experts: int | None, **sections: dict[str, Any]) -> Config:
    """Return a job of a mixture that sends all tokens through all experts."""
    hf = {"model_type": "llama4_text", **DENSE_MIXTURE}
    sections["model"] = {"hf": hf, **sections.get("model", {})}
    return job(run_dir, "mixtral", experts, **sections)


@pytest.mark.parametrize(
    ("name", "experts", "dtype"),
    proof_but(
        [(n, e, d) for n in MIXTURES for e in (1, 2, 3, 8) for d in ("float32", "bfloat16")],
        ("qwen3_moe", 3, "float32"),
        whole=[
            (n, e, d)
            for i, n in enumerate(MIXTURES)
            for j, e in enumerate((1, 2, 3, 8))
            for k, d in enumerate(("float32", "bfloat16"))
            if (i + j + k) % 4 and (n, e, d) != ("qwen3_moe", 3, "float32")
        ],
    ),
)
def test_experts_in_ranges_have_the_bits_of_plain_pytorch(
    name: str, experts: int, dtype: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """Losses, and the weights under the names of the model; of eight, one range is the whole."""
    config = job(tmp_path / "run", name, experts, model={"dtype": dtype})
    plain = plain_runs.of(config)
    run_dir = trained(config)
    stacks = 2 if name == "deepseek_v3" else 4  # its first layer is a dense one
    assert len(ranges_of(run_dir)) == (stacks * -(-8 // experts) if experts < 8 else 0)
    assert_plain_bits(run_dir, plain)


@pytest.mark.parametrize(
    ("experts", "dtype"),
    proof_but([(e, d) for e in (2, 3, 6) for d in ("float32", "bfloat16")], (3, "float32")),
)
def test_dense_experts_in_ranges_have_the_bits_of_plain_pytorch(
    experts: int, dtype: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """Each expert computes all rows: its range has two experts at least."""
    config = dense_job(tmp_path / "run", experts, model={"dtype": dtype})
    plain = plain_runs.of(config)
    run_dir = trained(config)
    assert len(ranges_of(run_dir)) == 4 * -(-8 // experts)
    assert_plain_bits(run_dir, plain)


def test_a_mixture_of_one_dense_expert_is_whole(tmp_path: Path) -> None:
    hf = {"model_type": "llama4_text", **DENSE_MIXTURE, "num_local_experts": 1}
    run_dir = trained(job(tmp_path / "run", "mixtral", None, model={"hf": hf}))
    assert not ranges_of(run_dir)


@pytest.mark.parametrize("experts", [1, 7])
def test_a_dense_expert_alone_is_refused(experts: int, tmp_path: Path) -> None:
    """A product of one matrix may go to another kernel than one of several."""
    with pytest.raises(ConfigError, match=r"so few experts .* set memory.experts to 2"):
        trained(dense_job(tmp_path / "run", experts))


MODES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9}},
    "8bit": {"optimizer": {"state": "8bit"}},
    "rounded by chance": {
        "optimizer": {"state": "bfloat16"}, "model": {"dtype": "bfloat16", "master": "none"},
    },
    "parts": {"store": {"chunk": "8KiB"}},
    "groups": {"optimizer": {"groups": [{"match": ["*experts.down_proj"], "lr": 1e-3}]}},
    "coded base": {
        "model": {"base": "nf4", "dtype": "bfloat16"},
        "lora": {"r": 4, "target_modules": ["q_proj"]},
    },
    "one micro-batch": {"data": {"micro_batches": 1}, "model": {"dtype": "bfloat16"}},
}  # fmt: skip
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("mode", proof_but(MODES, "groups", whole=[*MODES][1:4]))
def test_a_run_in_ranges_equals_one_of_whole_stacks(mode: str, tmp_path: Path) -> None:
    """However weights and moments are kept, for experts of 4,096 numbers and more."""
    hf = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"], **WIDE}
    sections = {**MODES[mode], "model": {"hf": hf, **MODES[mode].get("model", {})}}
    sections["memory"] = {"segment": "200KiB"}
    whole = trained(job(tmp_path / "whole", "qwen3_moe", None, **sections))
    sections["memory"] = {"segment": "200KiB", "experts": 3}
    divided = trained(job(tmp_path / "divided", "qwen3_moe", 3, **sections))
    assert_same_run(divided, whole)


def test_clipping_with_ranges_is_within_rounding(tmp_path: Path, plain_runs: PlainRuns) -> None:
    config = job(tmp_path / "run", "qwen3_moe", 3, optimizer={"clip_norm": 0.3})
    assert_clipped_within_rounding(trained(config), plain_runs.of(config))


@pytest.mark.proof
def test_a_run_in_ranges_resumes_with_those_it_began_with(tmp_path: Path) -> None:
    """Killed between two ranges of a layer."""
    evaluated = {"eval": {"python": TEXT, "every": 1, "batches": 1}}
    resumes_with_its_ranges(
        lambda name, most: job(tmp_path / name, "qwen3_moe", most, **evaluated), "experts", 2
    )


@pytest.mark.parametrize(
    "name",
    proof_but(MIXTURES, "mixtral", whole=[n for n in MIXTURES if n not in ("mixtral", "gpt_oss")]),
)
def test_a_run_in_ranges_begins_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Stored expert by expert, or stacked: the weights are those of from_pretrained."""
    directory = saved({"model_type": name, **MIXTURES[name]}, tmp_path / "base")
    run_dir = trained(job(tmp_path / "run", name, 3, model={"hf": str(directory)}, **STILL))
    expected = {n: p.detach() for n, p in loaded(directory).named_parameters()}
    found = weights(run_dir)
    assert_same_bits({n: found[n] for n in expected}, expected)


def test_ranges_are_as_large_as_the_largest_of_the_rest(tmp_path: Path) -> None:
    """Smaller ones would help nothing; and none is divided where a whole stack fits."""
    config = job(tmp_path / "run", "qwen3_moe", None).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    assert prepared.plan.ranges == WHOLE
    table_bytes = 12 * 64 * 32
    ranges = DividedModel(
        config, prepared.built, prepared.rules, lambda spec: 12 * spec.tensor.numel
    )
    assert 4 * table_bytes == 12 * 8 * 32 * 32
    assert ranges.fitting(1 << 20) == WHOLE
    assert ranges.fitting(1 << 10) == ranges.fitting(table_bytes) == RangeSizes(experts=2)
    assert ranges.fitting(2 * table_bytes - 1) == RangeSizes(experts=2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"hf": LLAMA}}, "no weight of the model stacks experts"),
        ({"optimizer": {"name": "adafactor"}}, "would not be updated as the whole"),
    ],
    ids=["no experts", "no elementwise optimizer"],
)
def test_what_cannot_be_divided_is_said(tree: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(job(tmp_path / "run", "qwen3_moe", 2, **tree))


def test_frozen_experts_below_all_that_learns_have_no_backward(tmp_path: Path) -> None:
    """Adapters on the attention of the second layer: what is below is read in the forward alone."""
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}
    config = job(tmp_path / "run", "qwen3_moe", 2, lora=lora).resolved()
    prepared = Prepared(config, None, lambda _: None, draw=False)
    model, reads = prepared.plan.captured.model, [0, 0]
    for instruction in prepared.plan.step:
        if instruction.operation.value in ("backward", "turn"):
            for name in model.segment(instruction.segment).parameters:
                if ".experts." in name:
                    reads[int(".layers.1." in name)] += 1
    assert reads[0] == 0
    assert reads[1] > 0
    config = job(tmp_path / "run", "qwen3_moe", 2, lora=lora, train={"steps": 1})
    assert torch.tensor(losses(trained(config))).isfinite().all()
