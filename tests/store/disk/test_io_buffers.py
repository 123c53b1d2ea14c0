"""Memory for direct I/O: aligned, zeroed, of the size that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer

HUGE = 2 * 2**20


@pytest.mark.parametrize("nbytes", [4096, HUGE - 4096, HUGE, 3 * HUGE + 4096])
def test_a_buffer_can_be_written_and_read_directly(nbytes: int, tmp_path: Path) -> None:
    first, second = io_buffer(nbytes), io_buffer(nbytes)
    assert len(first) == nbytes
    assert not any(np.frombuffer(first, np.uint64))
    assert np.frombuffer(first, np.uint8).ctypes.data % (4096 if nbytes < HUGE else HUGE) == 0
    first[:] = np.random.default_rng(0).bytes(nbytes)
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes))
    with DirectIO() as io:
        io.write(path, first, flush=True).result()
        io.read(path, second).result()
    assert first == second == path.read_bytes()
