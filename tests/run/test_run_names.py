"""A run begins only where it overwrites nothing of somebody else's, and knows its own directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swaptrain.cli import main
from tests.support.matrix import proof_but
from tests.whole.test_bad_input import LLAMA, job

pytestmark = pytest.mark.trains


FOREIGN = {
    "config.yaml": "# what I tried\nmodel: {python: my:net}\n",
    "metrics.jsonl": "my own figures\n",
    "spill/notes.txt": "coffee\n",
    "static/style.css": "body {}\n",
    "data/train.json": '{"my": "data"}\n',
    "config.yaml.tmp": "half\n",
    "lock": "the key is under the mat\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_the_user_are_not_overwritten(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a directory is no run's, also with --fresh and by `plan`; the file is named."""
    command, run_dir = job(tmp_path)
    path = run_dir / name
    path.parent.mkdir(parents=True)
    path.write_text(FOREIGN[name])
    for words in (command, [*command, "--fresh"], ["plan", *command]):
        assert main(words) == 2
        message = capsys.readouterr().err
        named = path if path.parent.name in ("run", "data") else path.parent
        assert f"would overwrite {named}" in message and "set run.dir to another" in message
        assert [file for file in run_dir.rglob("*") if file.is_file()] == [path]
        assert path.read_text() == FOREIGN[name]
    main(["verify", str(run_dir), "--repair"])
    assert path.read_text() == FOREIGN[name]
    assert (run_dir / "lock").exists() == (name == "lock")


@pytest.mark.parametrize(
    "text", proof_but([b"", b"\0" * 256, b"pid 1\nhost elsewhere\nboot then\n"], b"")
)
def test_a_directory_with_nothing_but_a_lock_is_a_run(text: bytes, tmp_path: Path) -> None:
    """It was killed before it had written more, or its machine lost power."""
    command, run_dir = job(tmp_path)
    run_dir.mkdir(parents=True)
    (run_dir / "lock").write_bytes(text)
    assert main(command) == 0


def test_a_config_in_its_own_run_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be replaced by the one with all defaults, without its comments."""
    command, run_dir = job(tmp_path)
    run_dir.mkdir(parents=True)
    path = Path(command[1]).rename(run_dir / "config.yaml")
    before = path.read_text()
    assert main(["--config", str(path)]) == 2
    assert f"would overwrite {path}" in capsys.readouterr().err
    assert path.read_text() == before and list(run_dir.iterdir()) == [path]


@pytest.mark.parametrize(
    "name",
    proof_but(["trace.json", "metrics.jsonl", "config.yaml"], whole=["trace.json", "config.yaml"]),
)
def test_a_directory_in_the_place_of_a_file_is_not_started_over(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before the run is deleted, and the same command works once it has been moved."""
    command, run_dir = job(tmp_path)
    assert main(command) == 0
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    (run_dir / name / "mine").touch()
    before = sorted(run_dir.rglob("*"))
    assert main([*command, "--fresh"]) == 2
    assert f"{run_dir / name} is a directory" in capsys.readouterr().err
    assert sorted(run_dir.rglob("*")) == before
    (run_dir / name).rename(tmp_path / "moved")
    assert main([*command, "--fresh"]) == 0


@pytest.mark.proof
def test_a_directory_with_other_things_takes_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that no run writes stay, and tokens that another run put there are used."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be, that is the question\n" * 20)
    data = {"text": [str(corpus)], "sequence_length": 16}
    command, run_dir = job(tmp_path, model={"hf": LLAMA}, data=data)
    run_dir.mkdir(parents=True)
    (run_dir / "notes.txt").write_text("mine")
    other = [f"run.dir={tmp_path / 'other'}", f"data.cache={run_dir / 'data'}"]
    assert main([*command, *other]) == 0
    assert main(command) == 0
    assert (run_dir / "notes.txt").read_text() == "mine"
    assert "tokenising" in (said := capsys.readouterr().out) and said.count("tokenising") == 1


@pytest.mark.parametrize("deleted", proof_but(["lock", "all but the data"], whole=["lock"]))
def test_a_run_without_its_lock_is_a_run(deleted: str, tmp_path: Path) -> None:
    """Its store says so; what a refused start left of the data is no obstacle either."""
    command, run_dir = job(tmp_path)
    assert main(command) == 0
    if deleted == "lock":
        (run_dir / "lock").unlink()
    else:
        (run_dir / "data").rename(tmp_path / "data")
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        (tmp_path / "data").rename(run_dir / "data")
    assert main([*command, "train.steps=2"]) == 0
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == 2
