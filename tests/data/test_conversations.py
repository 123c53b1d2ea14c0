"""Conversations become micro-batches: once, the same at every start, split by their content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from swaptrain.config.data import DataConfig, EvalConfig
from swaptrain.data import Batches, look_at_held_out, open_data, open_eval, open_example
from swaptrain.errors import ConfigError
from tests.chat.conftest import write_tokenizer
from tests.chat.templates import CHATML

pytestmark = pytest.mark.trains  # starts processes

VOCABULARY = 300
Make = Callable[..., DataConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write conversations and return a config that reads them."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="<|im_end|>")

    def config(rows: int = 8, **fields: Any) -> DataConfig:
        lines = []
        for number in range(rows):
            question = {"role": "user", "content": "?" * (number % 5)}
            answer = {"role": "assistant", "content": str(number)}
            lines.append(json.dumps({"messages": [question, answer]}))
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        given = {"chat": [str(tmp_path / "rows.jsonl")], "tokenizer": str(tokenizer)}
        return DataConfig(
            **{"sequence_length": 96, "packing": True, "shuffle": False, **given, **fields}
        )

    return config


def opened(config: DataConfig, run_dir: Path, **options: Any) -> Batches:
    """Open the training data of a run."""
    return open_data(config, seed=0, run_dir=run_dir, model_vocabulary=VOCABULARY, **options)


def trained_tokens(batches: Batches) -> int:
    """Count the trained tokens of all items."""
    return sum(int((batches.item(i)["labels"] >= 0).sum()) for i in range(len(batches)))


def test_rows_are_packed_or_padded(make: Make, tmp_path: Path) -> None:
    """Packed, there are fewer sequences of the same tokens, with positions."""
    padded = opened(make(packing=False), tmp_path / "padded")
    packed = opened(make(), tmp_path / "packed")
    assert (len(padded), len(packed)) == (8, 3)
    assert sorted(padded.layout) == ["input_ids", "labels"]
    assert sorted(packed.layout) == ["input_ids", "labels", "position_ids"]
    assert trained_tokens(padded) == trained_tokens(packed) == 8 * 2
    positions = packed.item(0)["position_ids"]
    assert (positions == 0).sum() >= 2
    assert torch.equal(positions[1:] - positions[:-1] == 1, positions[1:] != 0)


def test_rows_are_encoded_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start reads what the first one made, and says the same of it."""
    config, first, second = make(), list[str](), list[str]()
    before = opened(config, tmp_path / "run", note=first.append).example()
    monkeypatch.setattr("swaptrain.data.conversations.write_token_array", None)
    after = opened(config, tmp_path / "run", note=second.append).example()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert first[0].startswith("encoding ")
    assert first[1:] == second
    assert "8 rows, " in first[1] and "16 of them trained" in first[1]
    assert "assistant\n[[0<|im_end|>]]" in first[2]


def test_other_rows_are_refused(make: Make, tmp_path: Path) -> None:
    """A file that changed is named, a template that changed too."""
    config = make()
    opened(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        opened(make(rows=9), tmp_path / "run")
    make()
    write_tokenizer(tmp_path / "tokenizer", CHATML + " ", eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"the tokenizer .its chat template counts. has changed"):
        opened(config, tmp_path / "run")


def test_a_refused_file_leaves_nothing(make: Make, tmp_path: Path) -> None:
    """The row is named, and the run directory is as it was."""
    config = make()
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user"}]}')
    with pytest.raises(ConfigError, match=r"data\.chat: .*rows\.jsonl, line 9: its message 1"):
        opened(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_are_split_by_their_content(make: Make, tmp_path: Path) -> None:
    """Each row is on one side, whatever others there are."""
    config = make(rows=200, held_out=0.25, packing=False)
    held_out = EvalConfig(every=1, batches="all")
    train = opened(config, tmp_path / "run")
    evaluated = open_eval(
        held_out, config, run_dir=tmp_path / "run", model_vocabulary=VOCABULARY, like=train
    )
    looked = look_at_held_out(
        held_out, config, run_dir=tmp_path / "other", model_vocabulary=VOCABULARY
    )
    assert looked.items == len(evaluated)
    assert len(train) + len(evaluated) == 200
    assert 25 < len(evaluated) < 75

    def rows(batches: Batches) -> set[tuple[int, ...]]:
        return {tuple(batches.item(i)["input_ids"].tolist()) for i in range(len(batches))}

    assert len(rows(train) | rows(evaluated)) == 200
    more = opened(make(rows=300, held_out=0.25, packing=False), tmp_path / "more")
    assert rows(train) <= rows(more)


@pytest.mark.parametrize("packing", [True, False])
def test_an_example_has_the_layout_of_the_data(make: Make, tmp_path: Path, packing: bool) -> None:
    """What a start looks at before it writes anything."""
    config = make(packing=packing, micro_batch=3)
    example = open_example(config, model_vocabulary=VOCABULARY)
    batch = opened(config, tmp_path / "run").batch(1, 0)
    assert {key: (v.shape, v.dtype) for key, v in example.items()} == {
        key: (v.shape, v.dtype) for key, v in batch.items()
    }
    assert (example["labels"] >= 0).any()
    assert not (tmp_path / "run" / "data").exists() or packing is not None


def test_nothing_to_train_is_refused(make: Make, tmp_path: Path) -> None:
    """Where no answer fits into a sequence, the file is of no use."""
    with pytest.raises(ConfigError, match=r"nothing is trained in any row of 8.*\n?.*raise"):
        opened(make(sequence_length=10), tmp_path / "run")
    config = make()
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="its files hold no rows"):
        opened(config, tmp_path / "run")


def test_a_tokenizer_that_does_not_fit_is_refused(make: Make, tmp_path: Path) -> None:
    """More words than the model has, or none at all."""
    with pytest.raises(ConfigError, match="the model's vocabulary has 20: take the model's own"):
        open_data(make(), seed=0, run_dir=tmp_path / "run", model_vocabulary=20)
    with pytest.raises(ConfigError, match=r"data\.chat needs data\.tokenizer"):
        opened(make(tokenizer=str(tmp_path)), tmp_path / "run")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ["a"], "train_on": "all"}, "train_on belongs to chat, which is not set"),
        ({"text": ["a"], "packing": True}, "packing belongs to chat"),
        ({"chat": ["a"]}, "chat needs tokenizer"),
        ({"chat": ["a"], "text": ["b"]}, "give exactly one of text, chat, tokens, python"),
        ({"chat": ["a"], "tokenizer": "t", "mask": 0.15}, "mask belongs to text and tokens"),
    ],
)
def test_keys_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    """A key that would do nothing is refused."""
    with pytest.raises(ValidationError, match=message):
        DataConfig(**fields)
