"""Nothing of the data grows with the corpus."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from swaptrain.config.data import DataConfig
from swaptrain.data import open_data

_MIB = 2**20


def test_memory_and_descriptors_do_not_grow_with_the_corpus(
    tmp_path: Path, data_config: Callable[..., DataConfig]
) -> None:
    """A corpus of 32 MiB is tokenised and read within 8 MiB, and no file stays open."""
    (tmp_path / "large.txt").write_bytes(bytes(range(256)) * 2**17)
    config = data_config(
        text=[str(tmp_path / "large.txt")], text_as_is=True, sequence_length=512, shuffle=True
    )
    tracemalloc.start()
    try:
        batches = open_data(config, seed=0, run_dir=tmp_path / "run", model_vocabulary=257)
        descriptors = len(os.listdir("/proc/self/fd"))
        for step in range(1, 101):
            batches.batch(step, 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(batches) == 32 * _MIB // 512
    assert peak_bytes < 8 * _MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors
