"""`init` writes a config for a directory and files, which then trains; or it writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError, RunError
from swaptrain.start import check_new, write_new
from tests.chat.conftest import write_tokenizer
from tests.chat.templates import CHATML

ROW = {
    "messages": [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "Four."},
    ]
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with a small model, a tokenizer, rows and text."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 30)
    (tmp_path / "book.txt").write_text("All work and no play. " * 200)
    return tmp_path


@pytest.mark.proof
def test_rows_become_a_config_for_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comments have the lengths, the estimate and the commands; `plan` takes the file."""
    write_tokenizer(here / "model", CHATML)
    assert main(["init", "mine.yaml", "--model", "model", "--data", "rows.jsonl"]) == 0
    text = (here / "mine.yaml").read_text()
    config = load_config(Path("mine.yaml"))
    assert (config.model.hf, config.data.chat) == ("model", ("rows.jsonl",))
    assert config.data.sequence_length == 64
    said = " ".join(text.replace("#", " ").split())
    for words in ("30 conversations", "tokens a row: half", "a step moves:"):
        assert words in said
    assert "    python -m swaptrain --config mine.yaml\n" in text
    assert sorted(os.listdir(here)) == ["book.txt", "mine.yaml", "model", "rows.jsonl"]
    assert main(["plan", "--config", "mine.yaml"]) == 0
    assert "30 rows" in capsys.readouterr().out


@pytest.mark.trains
def test_text_without_a_tokenizer_trains_by_bytes(here: Path) -> None:
    """The config of a directory with nothing but the model, carried out."""
    assert main(["init", "mine.yaml", "--model", "model", "--data", "*.txt"]) == 0
    config = load_config(Path("mine.yaml"))
    assert (config.data.tokenizer, config.data.text) == ("bytes", ("*.txt",))
    assert main(["--config", "mine.yaml", "train.epochs=null", "train.steps=2"]) == 0
    lines = (here / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("mine --model model --data book.txt", "mine: name the config to write, such as mine.yaml"),
        ("there.yaml --model model --data book.txt", "there.yaml: it is there already"),
        ("no/mine.yaml --model model --data book.txt", "no is no directory: make it"),
        ("old.yaml --model model --data book.txt", "runs/old is there already"),
        ("mine.yaml --model other --data book.txt", "--model other: it is no directory"),
        ("mine.yaml --model . --data book.txt", "config.json does not exist"),
        ("mine.yaml --model model --data none.txt", "--data: no file matches 'none.txt'"),
        ("mine.yaml --model model --data model", "is a directory: name its files"),
        ("mine.yaml --model model --data rows.jsonl", "rows need a tokenizer, and model has no"),
        ("mine.yaml --model plain --data rows.jsonl", "plain has no chat template: give --chat-t"),
        ("mine.yaml --model plain --data book.txt rows.jsonl", "a config has one kind of data"),
        ("mine.yaml --model plain --data odd.jsonl", "odd.jsonl, line 1: its columns are x"),
        ("mine.yaml --model plain --data empty.jsonl", "empty.jsonl holds no rows"),
        ("mine.yaml --model plain --data ids.npy", "holds token ids: a config names such files"),
        ("mine.yaml --model model --data book.txt --lora --full", "give one of --lora and --full"),
        ("mine.yaml --model model", "the following arguments are required: --data"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    arguments: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written or overwritten."""
    write_tokenizer(here / "plain", None)
    (here / "plain" / "config.json").write_bytes((here / "model" / "config.json").read_bytes())
    (here / "there.yaml").write_text("mine")
    (here / "runs" / "old").mkdir(parents=True)
    (here / "odd.jsonl").write_text('{"x": 1}\n')
    (here / "empty.jsonl").write_text("\n")
    (here / "ids.npy").write_bytes(b"")
    before = sorted(here.rglob("*"))
    assert main(["init", *arguments.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert sorted(here.rglob("*")) == before
    assert (here / "there.yaml").read_text() == "mine"


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's of the same name stays, and what was written beside it goes."""
    path = tmp_path / "mine.yaml"
    check_new(path)
    path.write_text("theirs")
    with pytest.raises(ConfigError, match="is not overwritten"):
        write_new(path, "ours")
    assert path.read_text() == "theirs"
    path.unlink()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="cannot write"):
            write_new(path, "ours")
    assert os.listdir(tmp_path) == []
    write_new(path, "ours")
    assert (path.read_text(), os.listdir(tmp_path)) == ("ours", ["mine.yaml"])
