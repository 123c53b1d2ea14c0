"""Commits two segments in turn, step after step, until its standard input is closed.

`python -m tests.store.read.writer_driver RUN [alone]`: prints a line when the store exists. Each
element of each weight is the step. With `alone` it neither holds the run's lock nor lets exports
in: a writer that nothing protects readers from.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from swaptrain.store.access.lock import RunLock
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.root import create_root
from swaptrain.store.read.export_request import ExportDoor
from tests.store.helpers import SmallStore, array, small_root, spec

ELEMENTS = 60_000
LAYOUTS = [
    SegmentLayout((array("weights_float32", [spec(f"{k}.w", (ELEMENTS,))], chunk_bytes=2**16),))
    for k in (1, 2)
]
CONFIG = """
model: {python: "somewhere:model"}
data: {python: "somewhere:data", micro_batch: 1, micro_batches: 1}
optimizer: {name: adamw, lr: 0.01}
train: {steps: 1000000000}
memory: {host: 1GiB}
run: {dir: run}
"""


def commit(store: SmallStore, step: int) -> None:
    """Commit both segments, the upper one first."""
    content = np.full(ELEMENTS, step, np.float32)
    for k in (2, 1):
        store.commit(k, step, {"weights_float32": {f"{k}.w": content}})


def main() -> None:
    """Write until nobody holds the other end of the standard input."""
    run = Path(sys.argv[1])
    alone = sys.argv[2:] == ["alone"]
    with nullcontext() if alone else RunLock(run):
        store = SmallStore(run, LAYOUTS)
        commit(store, 0)
        root = small_root(2)
        rows = [
            row.model_copy(update={"parameters": (f"{row.segment}.w",)}) for row in root.segments
        ]
        create_root(run, root.model_copy(update={"segments": tuple(rows)}))
        (run / "config.yaml").write_text(CONFIG)
        exports = ExportDoor(run, lambda _: None)
        print("ready", flush=True)
        step = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            step += 1
            commit(store, step)
            if not alone:
                exports.let_in(step, lambda: None)
        store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
