"""What limits the RAM of a process, read from files like those of the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swaptrain.memory.limits import available_bytes, cgroup_limit
from swaptrain.memory.mapping import touch

MIB = 1 << 20
UNLIMITED = 9223372036854771712


def process(tmp_path: Path, groups: str, mounts: str) -> Path:
    """Make a directory like /proc/self; `{}` stands for where the control groups are mounted."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts.format(tmp_path / "cgroup"))
    return proc


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


V2 = "30 23 0:26 / {} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 30 0:32 {root} {{}} rw shared:16 - cgroup cgroup rw,memory\n"


def test_the_lowest_limit_of_the_group_and_those_above_counts(tmp_path: Path) -> None:
    """Version 2: a slice above may be lower than the group itself; `max` is no limit."""
    proc = process(tmp_path, "0::/user.slice/job.scope\n", V2)
    write(tmp_path / "cgroup/user.slice/job.scope/memory.max", str(900 * MIB))
    write(tmp_path / "cgroup/user.slice/memory.max", str(700 * MIB))
    found = cgroup_limit(proc)
    assert found is not None and found.limit_bytes == 700 * MIB
    assert found.path == tmp_path / "cgroup/user.slice/memory.max"
    write(tmp_path / "cgroup/user.slice/memory.max", "max")
    found = cgroup_limit(proc)
    assert found is not None and found.limit_bytes == 900 * MIB


def test_version_1_says_unlimited_with_a_large_number(tmp_path: Path) -> None:
    proc = process(tmp_path, "4:cpu:/x\n3:cpuset,memory:/job\n", V1.format(root="/"))
    write(tmp_path / "cgroup/memory.limit_in_bytes", str(UNLIMITED))
    write(tmp_path / "cgroup/job/memory.limit_in_bytes", str(UNLIMITED))
    assert cgroup_limit(proc) is None
    write(tmp_path / "cgroup/job/memory.limit_in_bytes", str(512 * MIB))
    found = cgroup_limit(proc)
    assert found is not None and found.limit_bytes == 512 * MIB


def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    """The mount begins at the container's group, which the process' path still names in full."""
    proc = process(tmp_path, "3:memory:/docker/abc\n", V1.format(root="/docker/abc"))
    write(tmp_path / "cgroup/memory.limit_in_bytes", str(256 * MIB))
    found = cgroup_limit(proc)
    assert found is not None and found.limit_bytes == 256 * MIB


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path) is None
    assert (available_bytes() or 0) > 0


def test_memory_that_may_not_be_mapped_is_refused_when_it_is_touched() -> None:
    touch(3 << 20)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "from swaptrain.memory.mapping import touch\n"
        "try: touch(8 << 30)\n"
        "except OSError as error: print(error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "12\n"
    with pytest.raises(OSError):
        touch(1 << 50)
