"""Export: one safetensors file, equal to what was committed; clean refusals."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

import swaptrain.store.read.reader
import swaptrain.store.read.safetensors
from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.program.tensors import TensorSpec
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.root import write_buffers
from swaptrain.store.format.state_record import state_record
from swaptrain.store.slots.slot import create_frozen
from swaptrain.verbs.export import export_weights
from tests.store.helpers import SmallStore, aligned, array, spec

MASTER = np.random.default_rng(0).standard_normal((70, 90)).astype(np.float32)
NORM = np.random.default_rng(1).standard_normal(5).astype(np.float32)
TRANSPOSED = np.random.default_rng(2).standard_normal((30, 40)).astype(np.float32)
FROZEN = np.arange(6, dtype=np.float32).reshape(2, 3)
RUNNING = np.array(3, dtype=np.int64)


def _split(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = master.view(np.uint32).astype(np.uint64)
    upper = ((bits + 0x8000) >> 16).astype(np.uint16)
    return upper.view(ml_dtypes.bfloat16), (bits & 0xFFFF).astype(np.uint16)


LAYOUTS = [
    SegmentLayout(
        (
            array("weights", [spec("a.weight", (70, 90), "bfloat16")]),
            array("remainder", [spec("a.weight", (70, 90), "uint16")]),
            array("weights_float32", [spec("a.norm", (5,))]),
        )
    ),
    SegmentLayout(
        (
            array("weights_float32", [TensorSpec("b.weight", (30, 40), (1, 30), "float32")]),
            array("buffers_int64", [spec("b.running", (), "int64")]),
        )
    ),
]


def _commit(store: SmallStore, k: int, version: int) -> None:
    upper, lower = _split(MASTER)
    if k == 1:
        contents = {
            "weights": {"a.weight": upper},
            "remainder": {"a.weight": lower},
            "weights_float32": {"a.norm": NORM},
        }
    else:
        contents = {
            "weights_float32": {"b.weight": np.ascontiguousarray(TRANSPOSED.T)},
            "buffers_int64": {"b.running": RUNNING},
        }
    store.commit(k, version, contents)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    store = SmallStore(directory, LAYOUTS)
    for k in (2, 1):
        _commit(store, k, 3)
    layout = SegmentLayout((array("frozen", [spec("a.frozen", (2, 3))]),))
    slot = create_frozen(directory, 1, layout, record_bytes=8192)
    buffer = aligned(layout.nbytes)
    buffer[: FROZEN.nbytes] = FROZEN.tobytes()
    sums = [f.result() for f in slot.array("frozen").write(store.io, buffer, flush=True)]
    slot.write_record(
        state_record(
            segment=1, version=0, fingerprint="test", layout=layout, checksums={"frozen": sums}
        )
    )
    write_buffers(directory, {"b.table": np.arange(4, dtype=np.float16)})
    store.finish()
    return directory


def _load(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("piece_elements", [7, 4096, 2**22])
def test_masters_are_joined(
    run: Path, tmp_path: Path, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As float32 every bit of the masters is there; transposed, frozen and buffers too."""
    monkeypatch.setattr(swaptrain.store.read.reader, "PIECE_ELEMENTS", piece_elements)
    export_weights(run, tmp_path / "x.safetensors", "float32")
    found = _load(tmp_path / "x.safetensors")
    expected = {
        "a.weight": MASTER,
        "a.norm": NORM,
        "b.weight": TRANSPOSED,
        "a.frozen": FROZEN,
        "b.running": RUNNING,
        "b.table": np.arange(4, dtype=np.float16),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], torch.from_numpy(value)), name
    assert [path.name for path in tmp_path.iterdir() if "safetensors" in path.name] == [
        "x.safetensors"
    ]


def test_the_default_is_what_was_trained_in(run: Path, tmp_path: Path) -> None:
    """Without a dtype the stored ones are kept; bfloat16 converts what is float32."""
    upper = torch.from_numpy(_split(MASTER)[0].view(np.int16)).view(torch.bfloat16)
    for dtype, norm in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        export_weights(run, tmp_path / "x.safetensors", dtype)
        found = _load(tmp_path / "x.safetensors")
        assert torch.equal(found["a.weight"], upper)
        assert torch.equal(found["a.norm"], torch.from_numpy(NORM).to(norm))
        assert found["b.running"].dtype == torch.int64


def test_what_cannot_be_exported_is_refused(run: Path, tmp_path: Path) -> None:
    """Not a run, no commit, a directory or no directory as target."""
    target = tmp_path / "x.safetensors"
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ConfigError, "not a run", lambda: export_weights(tmp_path, target, None)),
        (ConfigError, "exists and is not empty", lambda: export_weights(run, tmp_path, None)),
        (ConfigError, "no directory", lambda: export_weights(run, tmp_path / "y" / "x", None)),
    ]
    for kind, message, call in refusals:
        with pytest.raises(kind, match=message):
            call()
    (run / "store" / "zarr.json").unlink()
    with pytest.raises(ConfigError, match="no commit yet"):
        export_weights(run, target, None)
    assert not target.exists()


def test_a_run_inside_a_step_is_refused(tmp_path: Path) -> None:
    """Weights of two steps are never mixed in one file."""
    store = SmallStore(tmp_path / "run", LAYOUTS)
    for k, version in ((2, 3), (1, 3), (2, 4)):
        _commit(store, k, version)
    store.finish()
    with pytest.raises(RunError, match="inside step 4"):
        export_weights(tmp_path / "run", tmp_path / "x.safetensors", None)


def test_damage_and_full_disks_leave_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit names segment, array and chunk; a full disk the bytes; no file is left."""
    target = tmp_path / "x.safetensors"
    monkeypatch.setattr(swaptrain.store.read.safetensors, "free_bytes", lambda path: 1000)
    with pytest.raises(RunError, match=r"make room"):
        export_weights(run, target, None)
    monkeypatch.undo()
    chunk = run / "store" / "segments" / "001" / "weights" / "c" / "1"
    content = bytearray(chunk.read_bytes())
    content[77] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(DamagedStoreError, match="segment 1, array weights, chunk 1"):
        export_weights(run, target, None)
    assert not list(tmp_path.glob("x.*"))


def test_a_disk_that_fills_up_while_it_is_written_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a signal; a file of that name that was there before stays as it was."""
    target = tmp_path / "x.safetensors"
    write = os.write
    for error, kind in ((OSError(errno.ENOSPC, "full"), RunError), (KeyboardInterrupt(), None)):
        target.write_text("before")
        calls = 0

        def failing(*arguments: Any, error: BaseException = error) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise error
            return write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing)
            with pytest.raises(kind or KeyboardInterrupt):
                export_weights(run, target, None)
        assert target.read_text() == "before"
        assert not list(tmp_path.glob("*.partial")) and not list(run.glob("export.*"))
    (tmp_path / "x.safetensors.partial").write_text("left by a killed one" * 10_000)
    export_weights(run, target, None)
    assert _load(target)["b.running"] == 3
    assert not list(tmp_path.glob("*.partial"))


def test_two_exports_to_one_file_do_not_mix(run: Path, tmp_path: Path) -> None:
    """The second is refused as long as the first has the file open."""
    target = tmp_path / "x.safetensors"
    with (
        swaptrain.store.read.safetensors._aside(tmp_path / "x.safetensors.partial"),
        pytest.raises(RunError, match="another process is writing"),
    ):
        export_weights(run, target, None)
    export_weights(run, target, None)


def test_plain_zarr_reads_a_store(run: Path) -> None:
    """zarr-python, with swaptrain not imported, shows the groups, the table and the weights."""
    code = f"""
import json, sys, warnings
warnings.simplefilter("error")
import zarr
root = zarr.open({str(run / "store")!r}, mode="r")
segment = root["segments/002"]
record = segment.attrs["swaptrain"]
row = next(row for row in record["table"] if row["name"] == "b.weight")
flat = segment[row["array"]][row["offset"] : row["offset"] + 1200]
assert "swaptrain" not in sys.modules
print(json.dumps([sorted(root["segments"].group_keys()), row, flat.tolist(),
                  root["frozen/001/frozen"][:6].tolist(), root["buffers/b.table"][:].tolist()]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    groups, row, flat, frozen, table = json.loads(out.stdout)
    assert groups == ["001", "002"]
    assert (row["shape"], row["stride"]) == ([30, 40], [1, 30])
    weights = np.array(flat, np.float32).reshape(40, 30).T
    np.testing.assert_array_equal(weights, TRANSPOSED)
    assert frozen == list(range(6))
    assert table == [0, 1, 2, 3]
