"""Several ranks give the bits of plain PyTorch that adds the ranks' sums in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.store.format.root import read_root
from tests.support.matrix import proof_but
from tests.support.mixtures import MIXTURES
from tests.support.ranks import ddp, together
from tests.support.runs import assert_same_bits, config_of, losses, reference, rows
from tests.support.serving import Server
from tests.support.together import ADAPTERS, GPT, LLAMA, assert_same_as, rank_config

pytestmark = pytest.mark.trains


def with_base(form: str) -> dict[str, Any]:
    """Return adapters of a base in bfloat16 that is stored as codes."""
    model = {**ADAPTERS["model"], "dtype": "bfloat16", "base": form}
    return {**ADAPTERS, "model": model, "optimizer": {"clip_norm": 0.3}}


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "four micro-batches": (2, {"run": {"memory": True, "trace": 2}}),
    "clipped, one micro-batch each": (
        2, {"data": {"micro_batches": 2}, "optimizer": {"clip_norm": 0.3}},
    ),
    "three ranks, little memory": (
        3, {"data": {"micro_batches": 3}, "train": {"recompute": True},
            "memory": {"segment": "4KiB"}},
    ),
    "every second step, deferred": (
        2, {"store": {"commit": {"every": 2}}, "optimizer": {"clip_norm": 0.3}},
    ),
    "bfloat16": (2, {"model": {"dtype": "bfloat16"}, "optimizer": {"clip_norm": 0.3}}),
    "adapters": (2, ADAPTERS),
    "adapters of a base in 4 bits": (2, with_base("nf4")),
    "adapters of a base in 8 bits": (2, with_base("int8")),
    "sgd, held out": (
        4, {
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "eval": {"python": "tests.support.datasets:tokens", "every": 1, "batches": 5},
        },
    ),
}  # fmt: skip
QUICK = "four micro-batches", "clipped, one micro-batch each"


@pytest.mark.parametrize("name", proof_but(VARIANTS, *QUICK))
def test_ranks_have_the_bits_of_the_reference(name: str, tmp_path: Path, server: Server) -> None:
    """Losses, norms and weights of all ranks; and what is held out."""
    ranks, tree = VARIANTS[name]
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, ranks)
    assert ended.codes == [0] * ranks, ended.said
    plain = reference(config, ranks=ranks)
    assert_same_as(config, plain, ranks=ranks)
    if config.run.memory:
        for rank in range(ranks):
            assert (tmp_path / "run" / f"rank-{rank:03d}" / "memory.json").is_file()
    if config.model.base is not None:
        root = read_root(tmp_path / "run" / "rank-001")
        assert root is not None and root.quantized
        assert {record.form for record in root.quantized.values()} == {config.model.base}
    if plain.eval_losses:
        found = rows(tmp_path / "run" / "rank-000")
        assert {row["step"]: row["eval_loss"] for row in found} == plain.eval_losses


DIVIDED: dict[str, dict[str, Any]] = {
    "experts": {
        "model": {"hf": {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}},
        "memory": {"segment": "16KiB", "experts": 3},
    },
    "rows": {
        "model": {"hf": {**LLAMA, "tie_word_embeddings": False}},
        "memory": {"segment": "8KiB", "rows": 24},
    },
}


@pytest.mark.proof
@pytest.mark.parametrize("key", DIVIDED)
def test_ranks_own_ranges(key: str, tmp_path: Path, server: Server) -> None:
    """Each has some of a parameter; its weights are those of the reference, its norm is near it."""
    tree = {**DIVIDED[key], "data": {"python": "tests.support.datasets:text"}}
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said
    plain = reference(config, ranks=2)
    assert [row["loss"] for row in rows(tmp_path / "run" / "rank-001")] == plain.losses
    to = tmp_path / "whole.safetensors"
    assert main(["export", str(tmp_path / "run"), "--to", str(to), "--dtype", "float32"]) == 0
    stored = load_file(to)
    assert_same_bits({name: stored[name] for name in plain.parameters}, plain.parameters)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "tree", [{}, pytest.param({"optimizer": {"clip_norm": 0.3}}, marks=pytest.mark.whole)]
)
def test_little_memory_changes_no_bit(
    tree: dict[str, Any], late: bool, tmp_path: Path, server: Server
) -> None:
    """Slabs of one and a half instructions; and a device whose copies come late."""
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2, little=1.5, late=late)
    assert ended.codes == [0, 0], ended.said
    assert_same_as(config, reference(config, ranks=2), ranks=2)


@pytest.mark.proof
def test_ranks_of_two_machines_have_the_same_bits(tmp_path: Path, server: Server) -> None:
    """Where the number of a rank is not the one that it has on its machine."""
    config = rank_config(tmp_path / "run", {})
    ended = together(server, config, 2, each=1)
    assert ended.codes == [0, 0], ended.said
    assert_same_as(config, reference(config, ranks=2), ranks=2)


@pytest.mark.proof
def test_unequal_labels_weigh_by_tokens(tmp_path: Path, server: Server) -> None:
    """Each trained token of a step counts alike, whichever rank has it."""
    tree = {
        "model": {"hf": LLAMA},
        "data": {"python": "tests.ranks.labels:unequal", "micro_batches": 4},
    }
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said
    assert_same_as(config, reference(config, ranks=2), ranks=2)


@pytest.mark.whole
def test_dropout_is_keyed_by_the_micro_batch_of_the_step(tmp_path: Path, server: Server) -> None:
    """The first step's loss does not depend on how many ranks compute it."""
    first = []
    for ranks in (1, 2):
        tree = {"model": {"kwargs": {"dropout": 0.2}}, "train": {"steps": 1}}
        config = rank_config(tmp_path / f"run{ranks}", tree)
        ended = together(server, config, ranks)
        assert ended.codes == [0] * ranks, ended.said
        first.append(losses(tmp_path / f"run{ranks}" / ("" if ranks == 1 else "rank-000")))
    assert first[0] == first[1]


def test_ddp_is_the_reference_but_for_the_order_of_sums(tmp_path: Path, server: Server) -> None:
    """torch's DistributedDataParallel of two ranks ends with these weights, nearly."""
    config = rank_config(tmp_path / "run", {})
    plain = reference(config, ranks=2)
    found = ddp(server, config, 2, tmp_path / "weights.pt")
    for name, tensor in plain.parameters.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_order_of_the_ranks_is_part_of_the_bits(tmp_path: Path) -> None:
    """So the reference of two ranks is another one than that of one."""
    config = config_of(tmp_path / "run", {**GPT, "store": {"commit": {"unit": "step"}}})
    one, two = reference(config), reference(config, ranks=2)
    assert one.losses[0] == two.losses[0]
    assert any(not torch.equal(two.parameters[n], t) for n, t in one.parameters.items())
