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


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no clear_refs")
def test_the_peak_starts_anew() -> None:
    """After a reset the peak forgets 32 MiB that were given back."""
    block = mmap.mmap(-1, _SIZE_BYTES)
    block.write(b"\1" * _SIZE_BYTES)
    block.close()
    before_bytes = peak_resident_bytes()
    if reset_peak():
        assert peak_resident_bytes() <= before_bytes - _SIZE_BYTES // 2
