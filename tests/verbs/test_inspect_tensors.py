"""`inspect RUN NAME` and `inspect RUN_A RUN_B`: figures of stored tensors, and what differs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.train import train
from tests.support.runs import config_of, weights

pytestmark = pytest.mark.trains

NAME = "blocks.1.mlp.1.weight"


def job(run_dir: Path, **sections: Any) -> Path:
    """Train a small run of several segments, in bfloat16 with moments of 8 bits, with snapshots."""
    tree: dict[str, Any] = {
        "model": {"python": "tests.support.models:gpt", "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:tokens"},
        "optimizer": {"state": "8bit"},
        "train": {"steps": 2},
        "memory": {"host": "64MiB", "segment": "64KiB"},
        "store": {"keep": {"every": 1}},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    config = config_of(run_dir, tree)
    train(config)
    return config.run.dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run, which no test changes."""
    return job(tmp_path_factory.mktemp("looked-at") / "run", train={"freeze": ["position"]})


def asked(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    """Return the JSON that `inspect` prints."""
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def agree(found: dict[str, Any], tensor: torch.Tensor) -> None:
    """Assert that figures are those of a tensor."""
    wide = tensor.double()
    assert found["count"] == wide.numel()
    assert (found["min"], found["max"]) == (float(wide.min()), float(wide.max()))
    assert found["mean"] == pytest.approx(float(wide.mean()), rel=1e-9)
    assert found["std"] == pytest.approx(float(wide.std(correction=0)), rel=1e-9)
    assert found["norm"] == pytest.approx(float(wide.norm()), rel=1e-9)
    assert found["zeros"] == int((wide == 0).sum())
    assert found["first"] == wide.flatten()[:4].tolist()
    assert found["last"] == wide.flatten()[-4:].tolist()


def test_a_trained_tensor_has_weights_master_and_decoded_state(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part has the figures of what `export` writes of it, and says how it lies."""
    found = asked(capsys, run, NAME)
    export_weights(run, to := tmp_path / "w.safetensors", "float32", state=True)
    master = load_file(to)
    assert (found["name"], found["kind"], found["step"]) == (NAME, "trained", 2)
    assert found["shape"] == list(master[NAME].shape) and found["dtype"] == "bfloat16"
    agree(found["parts"]["master"], master[NAME])
    export_weights(run, to, None)
    agree(found["parts"]["weights"], load_file(to)[NAME].float())
    for state in ("exp_avg", "exp_avg_sq"):
        agree(found["parts"][state], master[f"optimizer.{NAME}.{state}"])
        assert found["parts"][state]["form"] == "8-bit codes and scales"
        assert sum(found["parts"][state]["histogram"]["counts"]) == master[NAME].numel()
    assert found["parts"]["weights"]["form"] == "bfloat16"
    arrays = [place["array"] for place in found["places"]]
    assert {"weights", "exp_avg_8bit", "exp_avg_scale"} <= set(arrays)
    for place in found["places"]:
        first, last = place["chunks"]
        assert all((Path(place["path"]) / "c" / str(k)).is_file() for k in range(first, last + 1))


def test_a_small_or_frozen_tensor(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Small state is kept in float32; what is frozen has neither state nor master."""
    found = asked(capsys, run, "scale")
    assert found["parts"]["exp_avg"]["form"] == "float32"
    frozen = asked(capsys, run, "position")
    assert frozen["kind"] == "frozen" and list(frozen["parts"]) == ["weights"]
    assert {place["slot"] for place in frozen["places"]} == {"frozen"}


def test_a_snapshot_has_its_own_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = asked(capsys, run, NAME, "--step", "1"), asked(capsys, run, NAME)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["parts"]["master"]["norm"] != second["parts"]["master"]["norm"]
    assert main(["inspect", str(run), NAME, "--step", "7"]) == 2
    assert "has no snapshot of it; there are: 1, 2" in capsys.readouterr().err


def test_a_person_sees_place_figures_and_histogram(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["inspect", str(run), NAME]) == 0
    shown = capsys.readouterr().out
    for word in (
        NAME,
        "trained, segment",
        "array weights of slot",
        "8-bit codes and",
        "zeros",
        "std",
    ):
        assert word in shown
    assert "\x1b" not in shown
    assert shown.count("━━━━━") >= 3  # a longest bar for each part but the master


def test_a_glob_gives_a_table_of_the_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [tensor["name"] for tensor in asked(capsys, run, "blocks.*.mlp.1.*")["tensors"]]
    assert names == [n for n in weights(run) if ".mlp.1." in n] or len(names) == 6
    assert main(["inspect", str(run), "blocks.*.mlp.1.*"]) == 0
    shown = capsys.readouterr().out
    assert NAME in shown and "6 tensors of" in shown and "[128, 32]" in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.1.mlp.1.wieght", f"the nearest are {NAME}"),
        ("qkv", "it is part of 6 names: ask for '*qkv*'"),
        ("*nothing*", "no name matches '*nothing*'"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        (".", "the directory of that name is no run"),
    ],
)
def test_a_wrong_name_gets_close_ones(
    run: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run), name]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""
    assert printed.err.count("\n") == 1 and "\x1b" not in printed.err


def test_options_without_a_name_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--json"], ["--step", "1"]):
        assert main(["inspect", str(run), *option]) == 2
        assert "name it" in capsys.readouterr().err


def test_equal_runs_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    assert main(["inspect", str(run), str(tmp_path / "copy")]) == 0
    shown = capsys.readouterr().out
    count = len(weights(run))
    assert f"equal bit for bit: {count} tensors" in shown
    assert "the configs are equal but for run.dir" in shown
    found = asked(capsys, run, tmp_path / "copy")
    assert found["equal"] and found["compared"] == count and found["config"] == {}


def test_two_runs_differ_in_config_and_tensors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masters are compared; the largest relative difference comes first."""
    other = job(
        tmp_path / "run", optimizer={"lr": 2e-2}, train={"freeze": ["position"], "steps": 1}
    )
    found = asked(capsys, run, other)
    assert found["steps"] == [2, 1] and not found["equal"]
    assert found["config"]["optimizer.lr"] == [1e-2, 2e-2]
    assert found["config"]["train.steps"] == [2, 1] and "run.dir" not in found["config"]
    left, right = weights(run), weights(other)
    expected = {name for name in left if not torch.equal(left[name], right[name])}
    rows = {row["name"]: row for row in found["differing"]}
    assert rows.keys() == expected and "position" not in expected and NAME in expected
    between = right[NAME].double() - left[NAME].double()
    assert rows[NAME]["differing"] == int((left[NAME] != right[NAME]).sum())
    assert rows[NAME]["largest"] == float(between.abs().max())
    size = float(left[NAME].double().norm())
    assert rows[NAME]["relative"] == pytest.approx(float(between.norm()) / size)
    sizes = [row["relative"] for row in found["differing"] if row["relative"] is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert main(["inspect", str(run), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.lr" in shown and f"{len(expected)} tensors with other bits" in shown


def test_names_and_shapes_that_only_one_has(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"layers": 2, "width": 16}
    other = job(tmp_path / "run", model={"kwargs": kwargs}, train={"steps": 1})
    found = asked(capsys, run, other)
    only_a, only_b = found["only"]
    assert only_a and all(name.startswith("blocks.2.") for name in only_a) and only_b == []
    row = next(row for row in found["differing"] if row["name"] == NAME)
    assert row["shapes"] == [[128, 32], [64, 16]] and row["elements"] == 0
    assert main(["inspect", str(run), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "only A has" in shown and "[128, 32] and [64, 16]" in shown


def test_a_run_is_not_compared_with_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even by another name: each would wait for the other to let go of it."""
    os.symlink(run, tmp_path / "alias")
    assert main(["inspect", str(run), str(tmp_path / "alias")]) == 2
    assert "are the same run directory" in capsys.readouterr().err


def test_what_a_config_says_does_nothing_to_a_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "copy"
    shutil.copytree(run, other, symlinks=True)
    text = (other / "config.yaml").read_text()
    evil = text.replace("  kwargs: {}\n", '  kwargs: {"a\\e[31m": "[bold]x\\e[2J"}\n', 1)
    assert evil != text
    (other / "config.yaml").write_text(evil)
    assert main(["inspect", str(run), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[bold]x\\u001b[2J" in shown


def test_damage_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chunk that does not verify ends with exit code 3, and no figures."""
    other = tmp_path / "copy"
    shutil.copytree(run, other, symlinks=True)
    place = asked(capsys, other, NAME)["places"][0]
    chunk = Path(place["path"]) / "c" / str(place["chunks"][0])
    content = bytearray(chunk.read_bytes())
    content[2 * place["offset"] % len(content)] ^= 1
    chunk.write_bytes(content)
    assert main(["inspect", str(other), NAME]) == 3
    printed = capsys.readouterr()
    assert "does not verify" in printed.err and printed.out == ""
