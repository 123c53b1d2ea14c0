"""Training on conversations gives the bits of plain PyTorch, packed and padded, also resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.verbs.plan import plan
from tests.chat.conftest import write_tokenizer
from tests.chat.templates import CHATML
from tests.models.test_rows_apart import MAMBA
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_state,
    config_of,
    losses,
    reference,
    rows,
    trained,
    weights,
)
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

MODEL = {**LLAMA, "vocab_size": 280, "max_position_embeddings": 128}


def chat(tmp_path: Path, name: str, **sections: Any) -> Config:
    """Return the config of a run on conversations of 64 tokens and less."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="<|im_end|>")
    lines = []
    for number in range(24):
        turns = [("user", "a" * (number % 7)), ("assistant", "b" * (1 + number % 4))]
        lines.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {
        "chat": [str(tmp_path / "rows.jsonl")],
        "tokenizer": str(tokenizer), "sequence_length": 96, "micro_batch": 2, "micro_batches": 2,
        **sections.pop("data", {}),
    }  # fmt: skip
    model = {"hf": sections.pop("hf", MODEL), "dtype": sections.pop("dtype", "float32")}
    return config_of(tmp_path / name, {"model": model, "data": data, **sections})


@pytest.mark.parametrize(
    ("dtype", "packing"),
    proof_but(
        [("float32", True), ("bfloat16", False), ("float32", False), ("bfloat16", True)],
        ("float32", True),
        whole=[("float32", False), ("bfloat16", True), ("bfloat16", False)],
    ),
)
def test_conversations_train_as_in_plain_pytorch(dtype: str, packing: bool, tmp_path: Path) -> None:
    """Losses and weights, bit for bit, with unequally many trained tokens in the micro-batches."""
    config = chat(
        tmp_path,
        "run",
        data={"packing": packing, "held_out": 0.2},
        eval={"every": 2},
        train={"steps": 3},
        memory={"segment": "128KiB"},
        dtype=dtype,
    )
    run_dir, plain = trained(config), reference(config)
    assert losses(run_dir) == plain.losses
    assert [row["eval_loss"] for row in rows(run_dir) if "eval_loss" in row] == [
        *plain.eval_losses.values()
    ]
    assert_same_state(weights(run_dir), plain)


@pytest.mark.proof
def test_packing_is_recorded(tmp_path: Path) -> None:
    """What a trial found when the run began holds when it goes on."""
    config = chat(tmp_path, "run")
    assert config.data.packing is None
    trained(config)
    assert "packing: true" in (config.run.dir / "config.yaml").read_text()
    trained(chat(tmp_path, "run", train={"steps": 7}))
    whole = chat(tmp_path, "whole", train={"steps": 7}, optimizer={"schedule": {"decay_steps": 5}})
    trained(whole)
    assert losses(config.run.dir) == losses(whole.run.dir)


@pytest.mark.whole
def test_plan_shows_the_rows(tmp_path: Path) -> None:
    """Counts and a row with its trained tokens, before there is a run and of one."""
    config = chat(tmp_path, "run")
    before = plan(config).rows
    assert before is not None
    assert before.startswith("24 rows, ")
    assert "<|im_start|>assistant\n[[b<|im_end|>]]" in before
    assert not config.run.dir.exists()
    trained(config)
    assert plan(config).rows == before


@pytest.mark.proof
def test_a_model_that_mixes_rows_is_padded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By itself; packing that is asked for is refused."""
    mixes = {**MAMBA, "vocab_size": 280}
    trained(chat(tmp_path, "run", hf=mixes, train={"steps": 1}))
    assert "each row has a sequence of its own, with padding" in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"data\.packing is true, and a trial does not show"):
        plan(chat(tmp_path, "packed", hf=mixes, data={"packing": True}))
