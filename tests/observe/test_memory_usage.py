"""Resident memory."""

from __future__ import annotations

import mmap
import os

import pytest

from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes

_SIZE_BYTES = 32 * 2**20


def test_resident_memory_follows_what_is_touched() -> None:
    """Touching 32 MiB raises the resident bytes and the peak by as much; the peak stays."""
    before_bytes = resident_bytes()
    block = mmap.mmap(-1, _SIZE_BYTES)
    block.write(b"\1" * _SIZE_BYTES)
    touched_bytes = resident_bytes()
    block.close()
    assert touched_bytes - before_bytes >= _SIZE_BYTES * 0.9
    assert peak_resident_bytes() >= touched_bytes - 2**20
    assert resident_bytes() < touched_bytes - _SIZE_BYTES // 2


def test_a_forked_process_looks_at_itself() -> None:
    """What a parent takes after it has looked, and forked, is not in what its child says."""
    resident_bytes()
    read_end, write_end = os.pipe()
    go_on_read, go_on_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_on_read, 1)
        os.write(write_end, str(resident_bytes()).encode())
        os._exit(0)
    block = mmap.mmap(-1, _SIZE_BYTES)
    block.write(b"\1" * _SIZE_BYTES)
    os.write(go_on_write, b"x")
    childs_bytes = int(os.read(read_end, 64))
    os.waitpid(child, 0)
    assert childs_bytes <= resident_bytes() - _SIZE_BYTES // 2
    block.close()
    for descriptor in (read_end, write_end, go_on_read, go_on_write):
        os.close(descriptor)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no clear_refs")
def test_the_peak_starts_anew() -> None:
    """After a reset the peak forgets 32 MiB that were given back."""
    block = mmap.mmap(-1, _SIZE_BYTES)
    block.write(b"\1" * _SIZE_BYTES)
    block.close()
    before_bytes = peak_resident_bytes()
    if reset_peak():
        assert peak_resident_bytes() <= before_bytes - _SIZE_BYTES // 2
