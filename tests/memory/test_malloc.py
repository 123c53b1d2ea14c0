"""The allocator's settings reach the process, and the heap is given back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from swaptrain.memory.malloc import restart_without_cache

RESTARTED = """
import os, sys
from swaptrain.memory.malloc import restart_without_cache
restart_without_cache()
print(os.getpid(), os.environ["GLIBC_TUNABLES"], *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=3", "glibc.malloc.tcache_count=3"),
    ],
)
def test_a_process_restarts_once_with_its_arguments_and_number(
    before: str | None, after: str
) -> None:
    """What the user set stays."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if before is not None:
        environment["GLIBC_TUNABLES"] = before
    process = subprocess.Popen(
        [sys.executable, "-c", RESTARTED, "one argument", "--two"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=60)
    assert output == f"{process.pid} {after} one argument --two\n"


def test_a_process_that_cannot_restart_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more memory then, which is no reason to refuse."""
    tried = []

    def refuse(*arguments: object) -> None:
        tried.append(arguments)
        raise PermissionError(1, "no")

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "execve", refuse)
    restart_without_cache()
    assert len(tried) == 1
    monkeypatch.setattr(sys, "executable", "")  # an embedded interpreter
    restart_without_cache()
    assert len(tried) == 1


GROWN = """
from swaptrain.memory.malloc import grow_heap, retain
from swaptrain.observe.memory_usage import resident_bytes
retain()
before = resident_bytes()
print(grow_heap(256 << 20), grow_heap(256 << 20), resident_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is asked")
def test_the_heap_grows_once_for_a_block_and_takes_no_memory() -> None:
    output = subprocess.run(
        [sys.executable, "-c", GROWN], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    first, second, resident = map(int, output.split())
    assert first >= 256 << 20 and second == 0
    assert resident < 8 << 20
