"""Names of the hub are looked up in its local cache, and nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from swaptrain.config.paths import cached_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache as the hub's library lays it out, with one model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "hub" / "models--org--name"
    made = model / "snapshots" / COMMIT
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return made


def test_a_name_is_its_snapshot(snapshot: Path) -> None:
    """What is not there, and what is a path, stays as it is."""
    assert cached_model("org/name") == str(snapshot)
    assert cached_model("org/other") == "org/other"
    assert cached_model("a/b/c") == "a/b/c"


def test_a_model_without_its_weights_is_refused(snapshot: Path) -> None:
    """A run would begin from drawn weights, and nobody would see it."""
    with pytest.raises(ValueError, match="org/name is in the hub's local cache without its weigh"):
        cached_model("org/name", weights=True)
    (snapshot / "model.safetensors").touch()
    assert cached_model("org/name", weights=True) == str(snapshot)


def test_a_directory_comes_first(snapshot: Path, tmp_path: Path) -> None:
    """A relative path that exists is meant."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert cached_model("org/name") == "org/name"
