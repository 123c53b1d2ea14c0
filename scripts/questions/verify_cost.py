"""What comparing checksums costs: `store.verify: always` against `never`, by swaptrain's own reads.

python scripts/questions/verify_cost.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import xxhash

from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.units import GIB, MIB

__all__ = ["main"]

CHUNK_BYTES = 64 * MIB
PASSES = 5


def read_all(io: DirectIO, files: list[Path], buffers: list[memoryview], checksum: int) -> float:
    """Read all files, four at a time, and compare them; return the processor's seconds per GB."""
    begun_s = time.process_time()
    expected = checksum if checksum >= 0 else None
    for first in range(0, len(files), len(buffers)):
        group = zip(files[first : first + len(buffers)], buffers, strict=False)
        for future in [io.read(file, buffer, checksum=expected) for file, buffer in group]:
            future.result()
    return (time.process_time() - begun_s) / (len(files) * CHUNK_BYTES / 1e9)


def main() -> int:
    """Print the processor's seconds per GB with and without, in turn; the best of five counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path())
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory} is no directory")
    content = os.urandom(CHUNK_BYTES)
    checksum = xxhash.xxh3_64_intdigest(content)
    buffers = [io_buffer(CHUNK_BYTES) for _ in range(4)]
    with tempfile.TemporaryDirectory(dir=directory) as folder, DirectIO() as io:
        files = [Path(folder, str(number)) for number in range(GIB // CHUNK_BYTES)]
        for file in files:
            file.write_bytes(content)
            io.flush(file).result()
        always, never = [], []
        for _ in range(PASSES):
            always.append(read_all(io, files, buffers, checksum))
            never.append(read_all(io, files, buffers, -1))
    print(f"always: {min(always):.3f} CPU-s per GB read")
    print(f"never:  {min(never):.3f} CPU-s per GB read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
