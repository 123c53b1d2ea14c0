"""A power failure at any moment of a run loses nothing that was done, and leaves no mixture."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.recording import Event
from tests.support.recording_disk import Blobs, Disk
from tests.support.recording_sabotage import SABOTAGES
from tests.support.recording_states import Shelf, choices
from tests.support.recording_strace import TRACED, calls_of

pytestmark = pytest.mark.trains

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def replay(*arguments: str) -> list[dict[str, Any]]:
    """Run scripts/proof/power_loss.py and return its reports, one for each mode."""
    script = ROOT / "scripts" / "proof" / "power_loss.py"
    command = [sys.executable, str(script), "--json", *arguments]
    process = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert process.returncode in (0, 1)
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_no_power_failure_loses_a_commit_or_shows_a_mixture() -> None:
    """A sample of the moments of a run on one disk, and of one that tokenises text first."""
    reports = replay(
        *("--modes", "fused,text", "--stride", "31", "--width", "2"),
        *("--resume", "1", "--again", "0"),
    )
    assert [report["mode"] for report in reports] == ["fused", "text"]
    for report in reports:
        assert report["violations"] == []
        assert report["distinct"] > 50
        assert report["resumed"] > 3


@pytest.mark.whole
def test_nor_where_a_disk_does_not_pass_on_that_all_of_it_be_flushed() -> None:
    """As behind FUSE: there is no syncfs, and every file that counts is flushed by itself."""
    (report,) = replay(
        *("--modes", "fused", "--file-by-file", "--stride", "61", "--width", "1"),
        *("--resume", "1", "--again", "0"),
    )
    assert report["violations"] == []
    assert report["distinct"] > 20


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mode",
    [
        *("fused", "clipped", "batch-norm", "batch-norm-clipped", "trees"),
        *("trees-clipped", "two-disks"),
        *("frozen", "text", "longer", "fresh", "snapshots", "back", "trees-back"),
        *("parts", "parts-clipped", "parts-8bit", "lag-2", "lora", "lora-step"),
        *("8bit-clipped", "bfloat16-state", "float16", "no-master"),
    ],
)
def test_no_mode_has_a_moment_at_which_power_must_not_fail(mode: str) -> None:
    """More moments and states of each mode, with recoveries that are cut in their turn."""
    (report,) = replay("--modes", mode, "--stride", "5", "--width", "8")
    assert report["violations"] == []
    assert report["recoveries"] == 4


@pytest.mark.whole
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_the_replay_finds_a_flush_that_is_left_out(sabotage: str) -> None:
    """Each flush that the protocol asks for is missed when it is not there."""
    # On one disk the flush of the spill, of the whole file system, makes up for that of the slots.
    mode = "two-disks" if sabotage == "unflushed-creation" else "fused"
    (report,) = replay(
        *("--modes", mode, "--sabotage", sabotage, "--stride", "7", "--width", "4"),
        *("--resume", "0", "--again", "0"),
    )
    assert report["violation_count"] > 0


@pytest.mark.whole
def test_nothing_that_a_run_does_to_its_disk_escapes_the_recorder(tmp_path: Path) -> None:
    """Recorder and strace count the same calls, by kind and path, of the very same process."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install -y strace")
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
        "data": {"python": "tests.support.datasets:tokens", "micro_batches": 2},
        "memory": {"segment": "32KiB"},
        "store": {"paths": [str(tmp_path / "disk1"), str(tmp_path / "disk2")]},
        "train": {"steps": 2},
    }
    log = tmp_path / "strace.log"
    command = [
        *("strace", "-f", "-y", "-s", "4096", "-e", f"trace={TRACED}", "-o", str(log)),
        *(sys.executable, "-m", "tests.support.recording_strace", str(tmp_path), json.dumps(tree)),
    ]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "tally.json").read_text())
    recorded = Counter({(kind, path): count for kind, path, count in rows})
    roots = [str(tmp_path / name) for name in ("disk", "disk1", "disk2")]
    with log.open() as lines:
        traced = calls_of(lines, roots)
    assert sum(recorded.values()) > 1000
    assert traced - recorded == Counter(), "strace saw what the recorder did not"
    assert recorded - traced == Counter(), "the recorder saw what strace did not"


class Model:
    """A disk with one empty directory, and short words for what is done to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path.resolve() / "disk"
        self.root.mkdir()
        self.disk = Disk([self.root], Blobs())

    def do(self, kind: str, name: str = "", other: str = "", offset: int = 0, data: bytes = b""):
        path = str(self.root / name) if name else str(self.root)
        if kind == "rename":
            other = str(self.root / other)
        self.disk.apply(Event(kind, path, other, offset, data))

    def flush(self, how: str, name: str = "", number: int = 1) -> None:
        self.do("begin", name, how, number)
        self.do("end", name, how, number)

    def shown(self) -> set[tuple[tuple[str, bytes], ...]]:
        """Return all that the disk may show: names and contents."""
        result = set()
        for choice in choices(self.disk, random.Random(0), newest=False, width=50):
            state = self.disk.state(choice)
            result.add(
                tuple(
                    (Path(path).name, self.disk.blobs[what] if kind == "file" else b"")
                    for path, (kind, what) in sorted(state.items())
                )
            )
        return result


def test_a_file_without_flushes_may_be_anything(tmp_path: Path) -> None:
    """Absent, empty, whole, half, or of the right size and blank."""
    model = Model(tmp_path)
    model.do("create", "a")
    model.do("write", "a", data=b"1234")
    contents = [b"", b"1234", b"12", b"\0\x0034", b"\0\0\0\0"]
    assert model.shown() == {(), *((("a", content),) for content in contents)}


def test_a_files_flush_does_not_keep_its_name_nor_a_directorys_its_bytes(tmp_path: Path) -> None:
    """Both are needed, in whatever order."""
    model = Model(tmp_path)
    model.do("create", "a")
    model.do("write", "a", data=b"1")
    model.flush("fdatasync", "a")
    assert model.shown() == {(), (("a", b"1"),)}
    model.do("create", "b")
    model.do("write", "b", data=b"1")
    model.flush("fsync")
    assert model.shown() == {(("a", b"1"), ("b", b"")), (("a", b"1"), ("b", b"1"))}


def test_a_flush_covers_only_what_returned_before_it_began(tmp_path: Path) -> None:
    """A write between the two ends of a flush may be lost."""
    model = Model(tmp_path)
    model.do("create", "a")
    model.flush("syncfs")
    model.do("write", "a", data=b"1")
    model.do("begin", "a", "fsync", 2)
    model.do("write", "a", data=b"2")
    model.do("end", "a", "fsync", 2)
    assert model.shown() == {(("a", b"1"),), (("a", b"2"),)}


def test_renames_are_lost_in_any_combination(tmp_path: Path) -> None:
    """A later rename may be on the disk without an earlier one."""
    model = Model(tmp_path)
    for name in ("a", "b"):
        model.do("create", name)
    model.flush("syncfs")
    model.do("rename", "a", "x")
    model.do("rename", "b", "y")
    names = {tuple(name for name, _ in state) for state in model.shown()}
    assert names == {("a", "b"), ("b", "x"), ("a", "y"), ("x", "y")}


def test_a_reserved_size_needs_more_than_fdatasync(tmp_path: Path) -> None:
    """fsync keeps it, and it reads as zeros."""
    model = Model(tmp_path)
    model.do("create", "a")
    model.flush("fsync")
    model.do("allocate", "a", offset=2)
    model.flush("fdatasync", "a")
    assert model.shown() == {(("a", b""),), (("a", b"\0\0"),)}
    model.flush("fsync", "a")
    assert model.shown() == {(("a", b"\0\0"),)}


def test_the_shelf_shows_exactly_a_state(tmp_path: Path) -> None:
    """Files, links and directories come and go with what is asked for."""
    blobs = Blobs()
    root = tmp_path / "disk"
    shelf = Shelf([root], blobs)
    name = str(root.resolve())
    first = {f"{name}/d": ("directory", ""), f"{name}/d/f": ("file", blobs.add(b"1"))}
    second = {f"{name}/d": ("symlink", "e"), f"{name}/e": ("file", blobs.add(b"2"))}
    for state in (first, second, first, {}):
        shelf.show(state)
        assert Disk([root], blobs).state({}) == state
