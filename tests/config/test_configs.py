"""The example jobs: every YAML in configs/ loads, and says how it is run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.data import open_data, open_eval, open_example
from swaptrain.models.build import model_factory
from swaptrain.units import parse_size
from swaptrain.verbs.export import Form, export_weights
from swaptrain.verbs.plan import plan
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_state, losses, reference, rows, trained, weights

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the README's commands are given, so that configs.digits is importable."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@every_config
def test_config_loads_and_survives_its_resolved_form(path: Path, tmp_path: Path) -> None:
    """What a run records of an example loads back to the same job."""
    config = load_config(path)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.resolved_yaml())
    assert load_config(resolved) == config.resolved()
    assert config.run.dir == Path("runs") / path.stem, "each example has a run directory of its own"


@every_config
def test_config_says_its_command_on_top(path: Path) -> None:
    """The first comment of each YAML holds the command that runs it."""
    head = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"python -m swaptrain --config configs/{path.name}" in head


def loaded_where_made(path: Path, overrides: list[str] | None = None) -> Config:
    """Load an example; skip one whose base a script makes, where that has not been run."""
    config = load_config(path, overrides or [])
    base = config.model.hf
    if isinstance(base, str) and not (ROOT / base).is_dir():
        script = re.search(r"^# +python (scripts/\S+\.py) +# makes (\S+),", path.read_text(), re.M)
        assert script is not None and script[2] == base, "its first comment says what makes it"
        assert (ROOT / script[1]).is_file()
        pytest.skip(f"{base} is made by {script[1]}, which has not been run here")
    return config


@every_config
@pytest.mark.usefixtures("in_root")
def test_config_names_data_that_every_machine_has(path: Path) -> None:
    """The globs of every example match, and its batches have the shape that it asks for."""
    config = loaded_where_made(path)
    example = open_example(config.data, model_vocabulary=None)
    labels = example["labels"]
    assert labels.dtype == torch.int64
    assert labels.shape[0] == config.data.micro_batch
    if config.data.text is not None:
        assert labels.shape[1] == config.data.sequence_length


def parameter_count(config: Config) -> int:
    """Count a model's parameters without a byte of weights."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_factory(config).make().parameters())


def test_the_sizes_that_the_comments_say() -> None:
    """10 to 25 million parameters, more state than RAM, in the quickstart; 2.6 billion in big."""
    quickstart = load_config(ROOT / "configs" / "quickstart.yaml")
    parameters = parameter_count(quickstart)
    assert 10e6 <= parameters <= 25e6
    assert quickstart.memory.host < 12 * parameters
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    assert f"{parameters / 1e6:.1f} million parameters" in text
    assert f"{12 * parameters / 2**20:.0f} MiB of weights" in text

    big = load_config(ROOT / "configs" / "big.yaml")
    parameters = parameter_count(big)
    assert f"{parameters / 1e6:,.0f} million in all" in (ROOT / "configs" / "big.yaml").read_text()
    assert 31e9 < 12 * parameters < 32e9
    assert big.memory.host == 5 * 2**30


@pytest.mark.usefixtures("in_root")
def test_digits_returns_a_loss_for_its_own_images() -> None:
    """Model and data of digits.yaml fit together, and the splits are disjoint parts of 1,797."""
    from configs.digits import images, network

    train, test = images("train"), images("test")
    assert (len(train), len(test)) == (1500, 297)
    batch = {key: torch.stack([item[key] for item in train[:4]]) for key in train[0]}
    assert batch["images"].shape == (4, 1, 8, 8)
    loss = network(width=4, blocks=1)(**batch)
    assert loss.shape == () and torch.isfinite(loss)


@pytest.mark.whole
@pytest.mark.trains
@pytest.mark.usefixtures("in_root")
def test_the_vision_example_trains_as_plain_pytorch(tmp_path: Path) -> None:
    """Smaller, into its second epoch, stopped in between, with other workers: the bits are same."""
    overrides = ["model.kwargs={width: 32, layers: 1}", "data.micro_batch=250", "train.threads=1"]
    overrides += ["train.steps=7", "optimizer.schedule.decay_steps=7", "eval.every=7"]
    overrides += [f"run.dir={tmp_path / 'run'}", "memory.segment=64KiB", "device=cpu"]
    path = ROOT / "configs" / "vision.yaml"
    run_dir = trained(load_config(path, [*overrides, "train.steps=3"]))
    trained(load_config(path, [*overrides, "data.workers=2"]))
    plain = reference(load_config(path, overrides))
    assert losses(run_dir) == plain.losses
    assert rows(run_dir)[-1]["eval_loss"] == plain.eval_losses[7]
    assert_same_state(weights(run_dir), plain)


@pytest.mark.usefixtures("in_root")
def test_digits_move_anew_in_each_epoch(tmp_path: Path) -> None:
    """The same image of another epoch lies elsewhere; the held-out ones stay, as none of theirs."""
    from configs.vision import digits

    config = load_config(ROOT / "configs" / "vision.yaml")
    assert config.eval is not None
    data = open_data(config.data, seed=0, run_dir=tmp_path, model_vocabulary=None)
    first, second = (
        torch.stack([data.item(i, epoch)["images"] for i in range(50)]) for epoch in (0, 1)
    )
    moved = (first != second).flatten(1).any(dim=1)
    assert moved.sum() > 30, "of nine places one is the same"
    held_out = open_eval(config.eval, config.data, run_dir=tmp_path, model_vocabulary=None)
    assert torch.equal(held_out.batch(1, 0)["images"], digits("test").images[:50])
    assert (len(data), len(digits("test"))) == (1498, 299)


def test_commands_of_the_readme_exist() -> None:
    """Every config, script and document that the README names is there."""
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\b(?:configs|scripts|docs|swaptrain|tests)/[\w/]+\.\w+", readme))
    assert {"configs/quickstart.yaml", "configs/big.yaml", "scripts/quickstart.sh"} <= named
    missing = [name for name in sorted(named) if not (ROOT / name).is_file()]
    assert not missing


def test_example_modules_are_plain_pytorch() -> None:
    """The modules beside the YAMLs show what a user writes: they import nothing of swaptrain."""
    for path in (ROOT / "configs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "swaptrain" not in ast.unparse(node)


@pytest.mark.trains
@pytest.mark.parametrize(
    "name", proof_but(["translation", "chat", "masked"], whole=("translation", "masked"))
)
def test_an_example_learns_in_a_minute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shortened by overrides: the loss falls, and it is evaluated and exported."""
    monkeypatch.chdir(ROOT)
    overrides = [f"run.dir={tmp_path / 'run'}", "train.epochs=null", "train.steps=8"]
    overrides += ["eval.every=4", "eval.batches=1", "data.micro_batches=1", "memory.host=1GiB"]
    overrides += ["train.check_capture=false", "optimizer.schedule.name=constant"]
    if name == "translation":
        overrides += ["optimizer.lr=3e-3"]
    config = loaded_where_made(ROOT / "configs" / f"{name}.yaml", overrides)
    run_dir = trained(config)
    found = [row["eval_loss"] for row in rows(run_dir) if "eval_loss" in row]
    assert found[-1] < found[0]
    form: Form = "merged" if config.lora is not None else "all"
    export_weights(run_dir, tmp_path / "model", None, form=form)
    assert (tmp_path / "model" / "config.json").is_file()


_BY_HAND = ("big", "gpt2", "clipping", "digits", "masked")
PLANNED = [path for path in CONFIGS if path.stem != "translation"]  # planned where it is trained


@pytest.mark.trains
@pytest.mark.parametrize(
    "path",
    proof_but(
        PLANNED,
        whole=[path for path in PLANNED if path.stem in _BY_HAND],
    ),
    ids=lambda path: path.stem,
)
@pytest.mark.usefixtures("in_root")
def test_config_plans(path: Path, tmp_path: Path) -> None:
    """The model is captured and cut, and one that fits its budget was found; nothing is written."""
    overrides = [f"run.dir={tmp_path / 'run'}", "device=cpu"]
    if path.stem == "big":
        overrides.append("model.hf.num_hidden_layers=1")  # all are alike, and this takes seconds
    report = plan(loaded_where_made(path, overrides))
    segments = report.segments
    assert len(segments) > 1
    assert parse_size(report.least_host) <= report.host_bytes
    if path.stem == "io_vs_compute":
        assert len(segments) == 12, "its first comment says so"
    assert not list(tmp_path.iterdir())


def shortened(path: Path, run_dir: Path) -> list[str]:
    """Return the command of a config with a tiny model and two steps."""
    command = [sys.executable, "-m", "swaptrain", "--config", str(path), f"run.dir={run_dir}"]
    command += ["train.steps=2", "data.sequence_length=16", "data.text='{stdlib}/io.py'"]
    command += ["model.hf.hidden_size=32", "model.hf.intermediate_size=64", "train.threads=1"]
    return [*command, "model.hf.num_hidden_layers=2", "model.hf.num_attention_heads=2"]


@pytest.mark.trains
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """Shortened, it trains, says where the run is, and a second start says that it is finished."""
    run_dir = tmp_path / "run"
    command = shortened(ROOT / "configs" / "quickstart.yaml", run_dir)
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        assert "finished" in said and str(run_dir) in said
        assert "export" in said, "it says what to try next"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["loss"] == pytest.approx(5.55, abs=0.2), "the logarithm of 257"
    assert all(row["step_s"] > 0 and row["tokens"] == 8 * 16 * 2 for row in rows)
