"""Configs and corpora for the tests of the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.data import DataConfig


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """Write files, given by name and content, into a directory and return it."""

    def write(**contents: str | bytes) -> Path:
        directory = tmp_path / "corpus"
        directory.mkdir(exist_ok=True)
        for name, content in contents.items():
            file = directory / f"{name}.txt"
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return directory

    return write


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    """Make a DataConfig of byte sequences of 8 tokens, in order; further fields as given."""

    def make(**fields: Any) -> DataConfig:
        return DataConfig(**{"sequence_length": 8, "shuffle": False, **fields})

    return make
