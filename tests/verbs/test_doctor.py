"""`doctor`: what each check says of what it finds."""

from __future__ import annotations

import json
import os
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from swaptrain.cli import main
from swaptrain.errors import RunError
from swaptrain.program.cost import Disk
from swaptrain.verbs import doctor
from swaptrain.verbs.checkup import disk, packages
from swaptrain.verbs.checkup.disk import file_system, mount_of, room, speed, sync_time
from swaptrain.verbs.checkup.memory import check_memory_limits, meminfo
from swaptrain.verbs.checkup.packages import judge, requirements
from swaptrain.verbs.checkup.processor import instructions
from swaptrain.verbs.checkup.result import CheckResult, Verdict, checked, wrong
from swaptrain.verbs.checkup.surroundings import check_clock, check_environment
from tests.support.runs import config_of

TABLE = r"""21 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
30 21 0:27 / /run rw,nosuid - tmpfs tmpfs rw,size=10%
31 21 0:50 / /srv/my\040disk rw - nfs4 server:/export rw
32 21 0:51 / /data rw,relatime - overlay overlay rw,lowerdir=/a
33 32 0:52 / /data ro - xfs /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "verdict"),
    [
        ("/home/a", "ext4", Verdict.OK),
        ("/runs", "ext4", Verdict.OK),  # /run is no directory above it
        ("/run/a", "tmpfs", Verdict.PROBLEM),
        ("/srv/my disk/a", "nfs4", Verdict.NOTE),
        ("/data/a", "xfs", Verdict.PROBLEM),  # the later mount, read-only
    ],
)
def test_file_systems(path: str, kind: str, verdict: Verdict) -> None:
    found = mount_of(Path(path), TABLE)
    assert found is not None and found.kind == kind
    result = file_system(Path(path), found)
    assert result.verdict is verdict and kind in result.found
    assert bool(result.advice) == (verdict is not Verdict.OK)


@pytest.mark.parametrize("kind", ["overlay", "fuse.sshfs", "cifs", "reiserfs"])
def test_file_systems_that_are_slower_or_not_known(kind: str) -> None:
    table = f"21 1 0:1 / / rw - {kind} it rw\n"
    result = file_system(Path("/a"), mount_of(Path("/a"), table))
    assert result.verdict is Verdict.NOTE and result.advice


def test_the_mount_of_this_directory_is_found(tmp_path: Path) -> None:
    found = mount_of(tmp_path)
    assert found is not None and tmp_path.resolve().is_relative_to(found.point)


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1e-6, "note"), (1e-3, "ok"), (0.02, "ok"), (0.2, "note")]
)
def test_a_sync_takes_as_long_as_a_drive_needs(seconds: float, verdict: str) -> None:
    assert sync_time(seconds).verdict == verdict


@pytest.mark.parametrize(
    ("free", "verdict"), [(2**20, "problem"), (2**30, "note"), (2**40, "ok"), (None, "note")]
)
def test_room(free: int | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: free)
    assert room(Path("/a")).verdict == verdict


def test_speed() -> None:
    assert speed(Disk(3e9, 2e9, 2.5e9), "measured now").verdict is Verdict.OK
    assert speed(Disk(2e8, 2e8, 2e8), "measured now").verdict is Verdict.NOTE
    assert speed(None, "").verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("found", "dtype", "verdict"),
    [
        (["avx2", "avx512_bf16", "amx_bf16"], "bfloat16", "ok"),
        (["avx2"], "bfloat16", "note"),
        (["avx2"], "float32", "ok"),
        (["avx2"], None, "ok"),
        (["fma"], "float32", "note"),
        (["asimd"], "float32", "ok"),
    ],
)
def test_instructions(found: list[str], dtype: str | None, verdict: str) -> None:
    result = instructions(found, "AVX2", dtype)
    assert result.verdict == verdict
    assert ("amx_bf16" in result.found) == ("amx_bf16" in found)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.9.1", "ok"), ("2.13.0+cpu", "ok"), ("2.8", "problem"), ("2.14", "problem")],
)
def test_versions(version: str, verdict: str) -> None:
    result = judge(Requirement("torch>=2.9,<2.14"), version)
    assert result.verdict == verdict
    assert verdict == "ok" or result.advice in {
        "pip install 'torch<2.14,>=2.9'",
        "pip install 'torch>=2.9,<2.14'",
    }


def test_a_package_that_is_missing_is_a_problem() -> None:
    assert judge(Requirement("zarr>=3"), None).verdict is Verdict.PROBLEM


@pytest.mark.parametrize("is_there", [True, False])
def test_what_the_project_asks_for(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the project file of a source tree; by the metadata where there is none."""
    if not is_there:
        lines = ["torch>=2.9", "peft>=0.17; extra == 'lora'", 'pytest; extra == "dev"']
        message = Message()
        for line in lines:
            message["Requires-Dist"] = line
        message["Requires-Python"] = ">=3.11"
        monkeypatch.setattr(packages, "_PROJECT", tmp_path / "pyproject.toml")
        monkeypatch.setattr(packages.metadata, "metadata", lambda _: message)
    groups, python = requirements()
    assert python == ">=3.11"
    assert "torch" in {one.name for one in groups[""]}
    assert {one.name for one in groups["lora"]} == {"peft"} and "dev" not in groups


def test_an_extra_is_a_problem_where_the_config_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "installed", lambda names: {})
    config = config_of(
        tmp_path / "run",
        {
            "model": {"hf": {"model_type": "llama"}},
            "lora": {},
            "data": {"text": ["a"]},
            "train": {"report_to": ["trackio"]},
        },
    )
    found = {one.name: one for one in packages.check_packages(config) if one.area == "extras"}
    assert found["lora"].verdict is Verdict.PROBLEM and found["trackio"].verdict is Verdict.PROBLEM
    assert found["tensorboard"].verdict is Verdict.NOTE
    assert found["lora"].advice == "pip install 'swaptrain[lora]'"


def test_memory_of_a_config(tmp_path: Path) -> None:
    """A budget above what there is would be refused."""
    total = meminfo()["MemTotal"]
    tree = {"model": {"hf": {"model_type": "llama"}}, "data": {"text": ["a"]}}

    def verdict(host_bytes: int) -> str:
        config = config_of(tmp_path / "run", {**tree, "memory": {"host": f"{host_bytes}B"}})
        found = {one.name: one for one in check_memory_limits(config)}
        assert {"RAM", "control group", "swap", "ulimit -l", "ulimit -n"} <= found.keys()
        return found["memory.host"].verdict

    assert verdict(2 * total) == "problem"
    assert verdict(64 * 2**20) != "problem"


def test_meminfo_is_read() -> None:
    found = meminfo("MemTotal:  2048 kB\nHugePages_Total: 0\nodd\n")
    assert found == {"MemTotal": 2 * 2**20, "HugePages_Total": 0}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"OMP_NUM_THREADS": "64"}, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS"),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY"),
        ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX"),
        ({"LD_PRELOAD": "/a/\x1b[2J.so"}, "LD_PRELOAD"),
        ({"HF_HOME": "/nowhere"}, "HF_HOME"),
        ({"HF_HOME": __file__}, "HF_HOME"),
    ],
)
def test_variables(environment: dict[str, str], name: str) -> None:
    found = {one.name: one for one in check_environment(environment, 4)}
    assert found[name].verdict is not Verdict.OK and found[name].advice
    assert all(one.found.isprintable() for one in found.values())
    usual = {one.name: one.verdict for one in check_environment({"OMP_NUM_THREADS": "2"}, 4)}
    assert set(usual.values()) == {Verdict.OK}


def test_a_clock_that_was_never_set() -> None:
    assert next(check_clock(0.0)).verdict is Verdict.NOTE
    assert next(check_clock()).verdict is Verdict.OK


def test_the_verb_says_all_of_it_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON and as a table; the first line comes at once. The disk is not measured here."""
    monkeypatch.setattr(disk, "machine", lambda *_: None)
    code = main(["doctor", str(tmp_path), "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    problems = [one for one in found["checks"] if one["verdict"] == "problem"]
    assert len(problems) == found["problems"] and code == (1 if problems else 0)
    assert printed.err.startswith("swaptrain: looking at the machine")
    areas = {one["area"] for one in found["checks"]}
    assert areas == {
        *("disk", "memory", "processor", "device", "versions", "extras", "environment", "clock")
    }
    names = {one["name"] for one in found["checks"] if one["area"] == "disk"}
    assert {"file system", "room", "direct I/O", "sync", "speed"} <= names
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", str(tmp_path)]) == code
    assert "torch" in capsys.readouterr().out


def test_a_config_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disks of run.dir and of store.paths are looked at, each once."""
    looked: list[Path] = []

    def check_disk(path: Path, note: Any) -> list[CheckResult]:
        looked.append(path)
        return [checked("disk", "room", "much")]

    monkeypatch.setattr(doctor, "check_disk", check_disk)
    tree: dict[str, Any] = {
        "model": {"hf": {"model_type": "llama"}},
        "data": {"text": ["a"]},
        "train": {"steps": 1},
        "store": {"paths": [str(tmp_path / "more")]},
        "run": {"dir": str(tmp_path / "run")},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main(["doctor", "--config", str(file)]) in {0, 1}
    assert looked == [tmp_path / "run"]
    assert "memory.host" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--config", str(file)]) == 2


def test_a_directory_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(disk.tempfile, "TemporaryDirectory", refuse)
    last = list(disk.check_disk(tmp_path, lambda _: None))[-1]
    assert last.verdict is Verdict.PROBLEM and "Permission denied" in last.found


def test_problems_end_with_1_after_all_was_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [checked("disk", "room", "much"), wrong("device", "CUDA", "none", "install it")]
    monkeypatch.setattr(doctor, "check_machine", lambda *_: found)
    with pytest.raises(RunError, match=r"1 problem would stop a run: device: CUDA"):
        doctor.print_checks(None, Path(), os.environ, as_json=False, note=print)
    shown = capsys.readouterr().out
    assert "-> install it" in shown and "2 checks: 1 problem, 0 notes" in shown
