"""The scripts: they parse, refuse an old Python, find the repository from anywhere, and reuse."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swaptrain.store.disk.direct import DirectIO

ROOT = Path(__file__).parents[2]
SHELL = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse_and_are_strict(path: Path) -> None:
    """bash accepts every script, and each that is run (not sourced) stops at the first failure."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    if path.name != "environment.sh":
        assert "set -euo pipefail" in path.read_text()
        assert os.access(path, os.X_OK), f"{path} is not executable"


@pytest.mark.parametrize("cases", ["slow_cases.txt", "slowest_cases.txt"])
def test_slow_cases_are_tests_that_there_are(cases: str) -> None:
    """A case whose test has another name now would run by default again, and nobody would see."""
    for case in (ROOT / "tests" / cases).read_text().splitlines():
        path, _, test = case.partition("::")
        name = test.partition("[")[0]
        assert f"def {name}(" in (ROOT / path).read_text(), case


def test_ci_runs_the_very_command_of_the_readme() -> None:
    """CI and a user run the tests in the same way, at one of the speeds that the README names."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1].startswith("bash scripts/test.sh")
    readme = (ROOT / "README.md").read_text()
    assert lines[-1] in readme
    assert "bash scripts/quickstart.sh" in readme


def fake_python(directory: Path, version: str, *, fails: bool = False) -> str:
    """Write a stand-in for python into a directory; it logs its calls and makes fake venvs."""
    path = directory / "fake-python"
    path.write_text(f"""#!/usr/bin/env bash
[[ "$1" == --version ]] && echo "Python {version}" && exit
[[ "$1" == -c ]] && exit {int(fails)}
echo "$*" >> "{directory}/calls"
[[ "$2" == venv ]] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip"
exit 0
""")
    path.chmod(0o755)
    return str(path)


def run_script(name: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository from another directory."""
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), "train.steps=2"],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_is_refused_with_the_version_that_is_needed(tmp_path: Path) -> None:
    """Nothing is made, and the message names what was found, what is needed and the way out."""
    python = fake_python(tmp_path, "3.9.1", fails=True)
    done = run_script("quickstart.sh", tmp_path, PYTHON=python, VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert "needs Python 3.11 or later; found: Python 3.9.1" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_second_start_installs_nothing(tmp_path: Path) -> None:
    """The environment is made once, the arguments are passed on, from any directory."""
    python, venv = fake_python(tmp_path, "3.12.0"), tmp_path / "venv"
    for _ in range(2):
        done = run_script("quickstart.sh", tmp_path, PYTHON=python, VENV=str(venv))
        assert done.returncode == 0, done.stderr
    train = "-m swaptrain --config configs/quickstart.yaml train.steps=2"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"-m venv {venv}"
    assert calls[1].startswith("-m pip install ")
    write = (
        "-m swaptrain generate --config configs/quickstart.yaml --set train.steps=2 --prompt def"
    )
    assert [call.rstrip() for call in calls[2::2]] == [train, train]
    assert len(calls) == 6 and all(call.startswith(write) for call in calls[3::2])


def test_the_tests_need_more_than_the_program(tmp_path: Path) -> None:
    """test.sh adds the dev extra to the environment of a quickstart; then both are complete."""
    python, venv = fake_python(tmp_path, "3.12.0"), tmp_path / "venv"
    for name in ("quickstart.sh", "test.sh", "quickstart.sh", "test.sh"):
        assert run_script(name, tmp_path, PYTHON=python, VENV=str(venv)).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([call for call in calls if "venv" in call]) == 1
    installs = [call for call in calls if "-m pip install" in call]
    assert [call.partition("-e ")[2] for call in installs] == [".", ".[dev]"]
    assert calls[-1] == "-m pytest -n 2 --dist worksteal train.steps=2"


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["tests/store"], "tests/store"),
        (["quick", "-x"], "-m not trains and not proof and not whole -x"),
        (["proof"], "-m not whole"),
        (["proof", "--whole", "-x"], "-m  -x"),
    ],
)
def test_a_speed_becomes_a_selection(words: list[str], passed: str, tmp_path: Path) -> None:
    """The rest of the arguments is pytest's; a marker that nobody has is an error of pytest's."""
    python, venv = fake_python(tmp_path, "3.12.0"), str(tmp_path / "venv")
    environment = {**os.environ, "PYTHON": python, "VENV": venv}
    subprocess.run(["bash", str(ROOT / "scripts" / "test.sh"), *words], env=environment, check=True)
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last == f"-m pytest -n 2 --dist worksteal {passed}"


@pytest.fixture
def io_vs_compute(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import scripts/bench/io_vs_compute.py with its directory on the path, as when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module("io_vs_compute")


def test_the_disk_is_measured_at_the_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe moves the bytes that it says, in the given ratio, and leaves nothing behind."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    probe: Any = importlib.import_module("disk_speed")
    engines = []

    class Counted(DirectIO):
        def __init__(self) -> None:
            super().__init__()
            engines.append(self)

    monkeypatch.setattr(probe, "DirectIO", Counted)
    monkeypatch.setattr(probe, "PROBE_BYTES", 16 * 2**20)
    monkeypatch.setattr(probe, "REQUEST_BYTES", 2**20)
    assert probe.disk_bytes_per_s(tmp_path, 300.0, 100.0) > 0
    engine = engines[0]
    assert engine.read_bytes == 2 * 24 * 2**20
    assert engine.write_bytes == (16 + 2 * 8) * 2**20, "the files are filled first"
    assert not list(tmp_path.iterdir())


def test_the_plot_is_written(io_vs_compute: ModuleType, tmp_path: Path) -> None:
    """Points become a PNG without a warning."""
    point = io_vs_compute.Point(2**28, 4, 2.0, 1.0, 0.2, 0.5, 2e9, 1e9, 2.5e9, 1.0, 1.2)
    io_vs_compute.plot([point, point], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_store_is_compared_with_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way that is installed moves the bytes; nothing is left behind."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    bench = importlib.import_module("bench_store")
    assert bench.main([str(tmp_path), "--size", "2MiB", "--chunk", "1MiB", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "swaptrain, direct I/O" in shown
    assert "zarr-python" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.proof
def test_the_peers_do_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory-mapped PyTorch and PyTorch in memory train with equal losses, step by step."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "peers"))
    job = importlib.import_module("job")
    monkeypatch.setitem(job.SHAPES, "4m", (32, 1, 64, 2))
    monkeypatch.setattr(job, "VOCABULARY", 1000)
    job.write_job(tmp_path / "job", "4m", sequences=4)
    losses = {}
    for peer in ("mapped", "in_memory"):
        command = [sys.executable, str(ROOT / "scripts" / "peers" / f"{peer}.py")]
        command += [f"--job={tmp_path / 'job'}", f"--work={tmp_path / peer}", "--steps=2"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [line.removeprefix("STEP ") for line in done.stdout.splitlines()]
        losses[peer] = [json.loads(row)["loss"] for row in rows]
    assert len(losses["mapped"]) == 2
    assert losses["mapped"] == losses["in_memory"]
    assert not (tmp_path / "mapped").exists()


def test_a_process_over_its_memory_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit that the comparisons set is one of the kernel's."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    limits = importlib.import_module("kernel_limits")
    if not limits.can_limit():
        pytest.skip("no cgroup with a memory limit can be made here")
    wants = [sys.executable, "-c", "bytearray(b'x') * (200 << 20)"]
    assert limits.run_limited(wants, {}, memory_bytes=100 << 20).returncode == -9
    assert limits.run_limited(wants, {}, memory_bytes=400 << 20).returncode == 0


def test_disks_of_files_go_with_whoever_made_them(tmp_path: Path) -> None:
    """Mounts, devices and room, also when that one is killed."""
    code = (
        "import os, sys; from pathlib import Path; from disks import new_disk\n"
        f"with new_disk(Path({str(tmp_path)!r}), 0, 64 << 20) as at:\n"
        "    (at / 'file').write_bytes(bytes(1 << 20))\n"
        "    print(os.stat(at).st_dev != os.stat(at.parent).st_dev, flush=True)\n"
        "    os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else None\n"
    )
    path = os.pathsep.join(map(str, (ROOT / "scripts" / "bench", ROOT)))
    for end, returncode in (("whole", 0), ("killed", -9)):
        done = subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", code, end],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout and ("losetup" in done.stderr or "unshare" in done.stderr):
            pytest.skip(f"no disk of a file can be made here: {done.stderr}")
        assert (done.returncode, done.stdout) == (returncode, "True\n"), done.stderr
        assert not [*tmp_path.glob("*.image")] and not [*(tmp_path / "disk-0").iterdir()]
        assert str(tmp_path) not in subprocess.check_output(["losetup", "--list"], text=True)
        (tmp_path / "disk-0").rmdir()


def test_rounds_of_a_comparison_become_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run's last step, the only one that commits, counts by its share of the steps."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    bench = importlib.import_module("bench_peers")

    def run(*seconds: float, commit_every: int = 1) -> Any:
        rows = [{"step_s": s} for s in seconds]
        return bench.Result("swaptrain", "none", rows, commit_every=commit_every)

    assert bench.together([run(1, 2, 9), run(3, 4, 5)]).median("step_s") == 3.5
    each = [run(1, 2, 21, commit_every=10), run(3, 4, 23, commit_every=10)]
    assert bench.together(each).median("step_s") == pytest.approx(2.5 + (22 - 2.5) / 10)
    rows = [{"step_s": 2.0, "roofline_fraction": fraction} for fraction in (0.9, 0.5, 0.8)]
    assert bench.Result("swaptrain", "none", rows).floor_s() == pytest.approx(1.6)
    rows[0]["roofline_fraction"] = None
    assert bench.Result("swaptrain", "none", rows).floor_s() is None
    failed = bench.Result("swaptrain", "none", [], "killed: out of memory")
    assert bench.together([run(1, 2), failed]) is failed


def test_the_driver_is_asked_how_busy_a_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers between two times are averaged; with a stand-in for nvidia-smi."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 100\necho '[N/A]'\necho 50\necho 0\nexec sleep 60\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    gpu_busy = importlib.import_module("gpu_busy")
    begun = time.time()
    with gpu_busy.GpuBusy() as gpu:
        deadline = begun + 30
        while gpu.fraction(begun, time.time()) != 0.5 and time.time() < deadline:
            time.sleep(0.01)
    assert gpu.fraction(begun, time.time()) == 0.5
    assert gpu.fraction(begun - 2, begun - 1) is None


def test_the_times_of_a_step_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is inside another part counts once; what nothing names is the loop's own."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    times = importlib.import_module("step_times")
    names = {1: "MainThread", 2: "swaptrain-read_0", 3: "swaptrain-write_0"}
    trace: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
        for thread, name in names.items()
    ]
    for name, thread, begin, took, moved in [
        ("step 1", 1, 0, 100, 0),
        ("forward", 1, 10, 30, 0),
        ("wait for a read", 1, 20, 10, 0),
        ("bring", 1, 50, 5, 0),
        ("turn", 1, 60, 40, 0),
        ("read", 2, 10, 20, 2**20),
        ("read", 3, 20, 20, 2**20),
        ("write", 2, 60, 10, 2**20),
    ]:
        event = {"name": name, "ph": "X", "pid": 1, "tid": thread}
        trace.append({**event, "ts": begin, "dur": took, "args": {"bytes": moved}})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    found = times.events(path)
    main = [event for event in found if event.thread == "MainThread"]
    step = next(event for event in main if event.name == "step 1")
    assert times.halves(step, main) == {"forward": (0, 50), "backward": (50, 100)}
    own = {"forward": 20, "wait for a read": 10, "the loop itself": 20}
    assert times.own_times(main, 0, 50) == own
    reads = [event for event in found if event.name == "read"]
    assert times.under_way(reads, 0, 50) == (0.6, pytest.approx(4 / 3))
    times.main([str(tmp_path), "--skip", "0"])
    shown = capsys.readouterr().out
    assert "medians of steps 1" in shown
    with pytest.raises(SystemExit, match=r"raise run\.trace"):
        times.main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r"No such file or directory; train with run\.trace"):
        times.main([str(tmp_path / "missing.json")])
    path.write_text('[1, {"a": 2}]')
    with pytest.raises(SystemExit, match="no trace that swaptrain wrote"):
        times.main([str(path)])


def test_the_table_of_architectures_is_written_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions, one line for each row, and the words of a refusal; the rest of the page stays."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "proof"))
    table: Any = importlib.import_module("architecture_table")
    page = tmp_path / "page.md"
    page.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n")
    trained = dict.fromkeys(table.COLUMNS, "bits") | {"trains": "yes", "refused": "-"}
    refused = dict.fromkeys(table.COLUMNS, "-") | {"trains": "no", "refused": "it draws"}
    results = table.Results({"torch": "9.9"}, {"one": trained, "two": refused})
    results.write(tmp_path / "rows.json")
    assert table.Results.read(tmp_path / "rows.json") == results
    for _ in range(2):
        table.write_page(results, page)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "2 architectures: 1 train, 1 of them" in text and "torch 9.9" in text
    assert text.count("| one |") == text.count("| two |") == text.count("`it draws`") == 1
    with pytest.raises(SystemExit, match="without --only"):
        results.check({"torch": "1.0"})


def test_every_architecture_that_is_tried_is_in_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has a row for each, and each has a kind of batches."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "proof"))
    tried = importlib.import_module("architecture_configs").ARCHITECTURES
    kinds = importlib.import_module("architecture_batches").KINDS
    page = (ROOT / "docs" / "models.md").read_text()
    assert len(tried) >= 80
    assert [name for name in tried if f"| {name} |" not in page] == []
    assert {one.kind for one in tried.values()} == set(kinds)
