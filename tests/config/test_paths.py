"""`~` and variables mean the same in every path of a config and of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.config.paths import expand_path, written_path
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"hf": "PATH"},
    "data": {"text": ["PATH"], "tokenizer": "PATH", "cache": "PATH"},
    "train": {"steps": 1},
    "eval": {"tokens": ["PATH"], "every": 1},
    "store": {"paths": ["PATH", "other/PATH"]},
    "run": {"dir": "PATH"},
}


def loaded(tmp_path: Path, path: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(TREE).replace("PATH", path))
    return load_config(file)


def paths_of(config: Config) -> list[str]:
    data, held_out, store = config.data, config.eval, config.store
    assert data.text and held_out and held_out.tokens and store.paths
    found = [config.model.hf, *data.text, data.tokenizer, data.cache, *held_out.tokens]
    return [str(path) for path in (*found, store.paths[0], config.run.dir)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/a", "HOME/a"),
        ("$PLACE/a", "/place [1]/a"),
        ("${PLACE}a/$OTHER", "/place [1]a/$PLACE"),
        ("a$$b", "a$b"),
        ("a$.txt", "a$.txt"),
        ("a/~b", "a/~b"),
        ("plain", "plain"),
    ],
)
def test_every_key_reads_a_path_alike(
    written: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule for all; what a variable holds is taken as it is; what is recorded loads back."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "/place [1]")
    monkeypatch.setenv("OTHER", "$PLACE")
    config = loaded(tmp_path, written)
    assert paths_of(config) == [meant.replace("HOME", str(tmp_path))] * 7
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(config.resolved_yaml())
    assert load_config(recorded) == config.resolved()
    over = load_config(
        tmp_path / "config.yaml", [f"run.dir='{written}/b'", f"data.text=['{written}/b']"]
    )
    assert str(over.run.dir) == over.data.text[0] == expand_path(written + "/b")  # type: ignore[index]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$NOT_SET/a", r"variable \$NOT_SET is not set"),
        ("${NOT_SET}", r"variable \$NOT_SET is not set"),
        ("$EMPTY/a", r"variable \$EMPTY is empty"),
        ("${a/b", "names no variable"),
        ("a${}", "names no variable"),
        ("~nobody-of-this-name/a", "no user 'nobody-of-this-name'"),
    ],
)
def test_what_cannot_be_expanded_is_refused_in_every_key(
    written: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys are named, and so is the variable."""
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=message) as caught:
        loaded(tmp_path, written)
    for key in ("model.hf", "data.text", "data.tokenizer", "data.cache", "eval.tokens", "run.dir"):
        assert key in str(caught.value)


@pytest.mark.parametrize("path", ["~", "~x/y", "a$b", "$$", "${x}", "./~", "plain*"])
def test_a_written_path_is_read_as_the_path(path: str) -> None:
    """Whatever a name is made of; a leading ./ may come to it."""
    assert expand_path(written_path(path)).removeprefix("./") == path.removeprefix("./")


def test_the_command_line_expands_and_prefers_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RUN, --to and --config: quoted for the shell, they are expanded; a literal name wins."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "~/no-run"]) == 2
    assert f"{tmp_path}/no-run: no such run directory" in capsys.readouterr().err
    assert main(["inspect", "$NOT_SET"]) == 2
    assert "$NOT_SET is not set" in capsys.readouterr().err
    assert main(["verify", "~/no-run"]) == 2
    assert main(["export", "~/no-run", "--to", "$NOT_SET/a.safetensors"]) == 2
    assert "$NOT_SET is not set" in capsys.readouterr().err
    (tmp_path / "$NOT_SET").mkdir()
    main(["inspect", "$NOT_SET"])
    assert "is not set" not in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("model: 3")
    assert main(["--config", "~/c.yaml"]) == 2
    assert "model" in capsys.readouterr().err
