"""Keys of other tools are answered with those of swaptrain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swaptrain.config.load import load_config
from swaptrain.config.messages import known_keys
from swaptrain.config.other_tools import OTHER_TOOLS
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

_KEY = re.compile(r"\b(?:model|data|train|eval|store|memory|run|optimizer|lora)\.[a-z_.]*[a-z]")
_FILES = {"metrics.jsonl"}


@pytest.mark.parametrize("key", sorted(OTHER_TOOLS))
def test_the_answer_names_keys_that_there_are(key: str) -> None:
    """And none of theirs is a key of swaptrain's own under the same name in the same place."""
    known = {*known_keys(Config), "optimizer.betas", "optimizer.eps"}
    assert key not in known
    named = [name for name in _KEY.findall(OTHER_TOOLS[key]) if name not in _FILES]
    assert set(named) <= known
    assert named or OTHER_TOOLS[key].startswith("no key: ") or "a lora section" in OTHER_TOOLS[key]


def test_a_config_of_another_tool_is_answered_line_by_line(tmp_path: Path) -> None:
    """Wherever the key stands."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "base_model: dir\ndata: {text: [a.txt], sample_packing: true}\n"
        "train: {num_train_epochs: 3}\nrun: {dir: runs/a}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = str(caught.value)
    assert "line 1: base_model: another tool's key; here it is model.hf" in said
    assert "data.sample_packing: another tool's key; here it is data.packing" in said
    assert "train.num_train_epochs: another tool's key; here it is train.epochs" in said
