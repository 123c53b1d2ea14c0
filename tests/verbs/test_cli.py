"""The command line: what each verb is called with, and what each failure prints and returns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import DamagedStoreError, RunError, StoppedBySignal

BASE = """\
model: {hf: {model_type: llama}}
data: {text: [a.txt]}
train: {steps: 2}
run: {dir: runs/x}
"""


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """What the rooms behind the command line were called with, and what the call then raises."""

    raises: BaseException | None = None

    def stub(self, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
        """Put a recording function in the place of `module.name`."""

        def function(*args: Any, **kwargs: Any) -> None:
            self.append((name, args, kwargs))
            if self.raises is not None and name != "tune":
                raise self.raises

        stand_in = ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace everything that the command line calls."""
    calls = Calls()
    for module in ("swaptrain.cli", "swaptrain.commands.look"):
        monkeypatch.setattr(f"{module}.set_up_torch", lambda: calls.append(("tune", (), {})))
    calls.stub(monkeypatch, "swaptrain.verbs.train", "train")
    calls.stub(monkeypatch, "swaptrain.verbs.plan", "print_plan")
    calls.stub(monkeypatch, "swaptrain.verbs.inspect", "inspect_run")
    calls.stub(monkeypatch, "swaptrain.verbs.export", "export_weights")
    return calls


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Return the path of a valid config."""
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    return str(path)


def test_training_gets_the_config_and_its_options(calls: Calls, job: str) -> None:
    """Overrides and options in any order reach `train`, after malloc has been tuned."""
    assert main(["--config", job, "train.steps=7", "--fresh", "train.seed=3"]) == 0
    assert [name for name, _, _ in calls] == ["tune", "train"]
    _, (config,), options = calls[1]
    assert isinstance(config, Config)
    assert (config.train.steps, config.train.seed) == (7, 3)
    assert options == {"fresh": True, "accept_change": False, "from_step": None}
    assert main(["train.steps=7", "--accept-change", f"--config={job}"]) == 0
    assert calls[3][2] == {"fresh": False, "accept_change": True, "from_step": None}


def test_the_other_verbs(calls: Calls, job: str, tmp_path: Path) -> None:
    """Each verb calls its room with paths and the config."""
    to = tmp_path / "w.safetensors"
    assert main(["plan", "--config", job, "memory.host=2GiB"]) == 0
    assert calls[1][0] == "print_plan"
    assert calls[1][1][0].memory.host == 2 * 2**30
    assert main(["inspect", str(tmp_path)]) == 0
    assert calls[2] == ("inspect_run", (tmp_path,), {})
    options = {"form": "all", "from_step": None, "shard_bytes": 5 * 10**9, "note": print}
    options["state"] = False
    assert main(["export", str(tmp_path), "--to", str(to), "--dtype", "bfloat16"]) == 0
    assert calls[3] == ("export_weights", (tmp_path, to, "bfloat16"), options)
    assert main(["export", str(tmp_path), "--to", str(to), "--from-step", "4"]) == 0
    options = {**options, "from_step": 4}
    assert calls[4] == ("export_weights", (tmp_path, to, None), options)
    for number, (words, form) in enumerate(
        ((["--adapter", str(to)], "adapter"), (["--merged", "--to", str(to)], "merged")), 5
    ):
        assert main(["export", str(tmp_path), *words]) == 0
        asked = {**options, "form": form, "from_step": None}
        assert calls[number] == ("export_weights", (tmp_path, to, None), asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plam"], "unknown verb 'plam'; did you mean plan?"),
        (["train", "--config", "JOB"], "to train: python -m swaptrain --config FILE"),
        (["big.yaml"], "to train: python -m swaptrain --config big.yaml"),
        (
            ["--fresh"],
            "the following arguments are required: --config. See python -m swaptrain --help",
        ),
        (
            ["plan"],
            "the following arguments are required: --config. See python -m swaptrain plan --help",
        ),
        (["train.steps=3"], "the following arguments are required: --config"),
        (["--config", "JOB", "plan"], "the verb comes first"),
        (["--config", "JOB", "--frsh"], "--frsh; did you mean --fresh?"),
        (["--config", "JOB", "train.stesp=3"], "did you mean train.steps?"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["inspect"], "the following arguments are required: RUN"),
        (["inspect", "nowhere"], "nowhere: no such run directory"),
        (["export", ".", "--to", "a.bin"], "name a directory, or a file that ends in .safetensors"),
        (["export", ".", "--to", "a", "--max-shard", "5"], "the size 5 has no unit"),
        (["export", "."], "give one of --to DIR, --to FILE.safetensors and --adapter DIR"),
        (["export", ".", "--adapter", "a", "--to", "b"], "give one of --to"),
        (["export", ".", "--adapter", "a", "--merged"], "--merged writes a model"),
        (["export", ".", "--to", "a.safetensors", "--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    calls: Calls,
    job: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Wrong usage calls nothing, and prints one line on stderr that says what to do."""
    assert main([job if word == "JOB" else word for word in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("swaptrain: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert calls == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunError("the disk is full"), 1, "swaptrain: error: the disk is full\n"),
        (
            DamagedStoreError("checksum", segment=3, array="weights", chunk=7),
            3,
            "swaptrain: error: checksum (segment 3, array weights, chunk 7)\n",
        ),
        (StoppedBySignal(15, "stopped in step 3"), 143, "swaptrain: stopped in step 3\n"),
        (KeyboardInterrupt(), 130, "swaptrain: interrupted\n"),
    ],
)
def test_each_error_has_its_exit_code(
    calls: Calls,
    job: str,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    """A named error is its message alone, without a traceback, and ends with its own code."""
    calls.raises = error
    assert main(["--config", job]) == code
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback(
    calls: Calls, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected exception shows where it came from, and says that it is a bug."""
    calls.raises = ZeroDivisionError("oops")
    assert main(["--config", job]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "ZeroDivisionError: oops" in printed
    assert printed.splitlines()[-1].startswith("swaptrain: this is a bug")


def test_a_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    """`inspect RUN | head` ends quietly when head has read enough."""
    code = (
        "import sys, types; from swaptrain.cli import main; "
        "m = types.ModuleType('swaptrain.verbs.inspect'); "
        "m.inspect_run = lambda run: print('x' * 1000000); "
        "sys.modules[m.__name__] = m; sys.exit(main(['inspect', '.']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_help_lists_what_works(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments the help is printed, with the options and the verbs that exist."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    for word in ("--config", "--fresh", "--accept-change", "plan", "inspect", "report", "export"):
        assert word in printed
    for verb in ("plan", "inspect", "report", "export"):
        assert main([verb, "--help"]) == 0
        assert f"usage: python -m swaptrain {verb}" in capsys.readouterr().out
    assert calls == []


def test_help_is_quick_and_imports_no_torch() -> None:
    """`--help` answers within a second, which it cannot if torch is imported."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "swaptrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    elapsed_s = time.perf_counter() - start_s
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "swaptrain.cli" in imported
    assert imported.isdisjoint({"torch", "numpy", "zarr", "transformers"})
    # Three times the promise, so that a busy machine does not fail it.
    assert elapsed_s < 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "10000")),
        ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", "None")),
    ],
)
def test_threads_spin_shortly_unless_told_otherwise(
    given: dict[str, str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How torch's threads wait is set before it is imported; what the user has set stays."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    shows = (
        "import os; from swaptrain.machine.torch_settings import set_up_torch; set_up_torch();"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", shows], env={**os.environ, **given}, capture_output=True, text=True
    )
    assert tuple(done.stdout.split()) == expected, done.stderr
