"""Records: what goes in comes out bit for bit, and nothing torn is believed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.store.format.record import (
    decode_record,
    encode_record,
    read_record,
    record_size,
    write_record,
)

KEYS = st.text(min_size=1, max_size=8).filter(lambda key: key not in {"checksum", "$float"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(attributes=st.dictionaries(KEYS, VALUES, max_size=4), padding=st.integers(0, 50))
def test_round_trip(attributes: dict[str, object], padding: int) -> None:
    """Every value comes back, floats with all bits, NaN and infinities as themselves."""
    content = encode_record(attributes)
    content = encode_record(attributes, len(content) + padding)
    assert repr(decode_record(content, Path("zarr.json"))) == repr(attributes)


@given(position=st.integers(0, 399), bit=st.integers(0, 7))
def test_any_flipped_bit_is_caught(position: int, bit: int) -> None:
    """No single bit of a record can change unnoticed, not even in the padding."""
    content = bytearray(encode_record({"version": 3, "losses": [0.1, math.nan]}, 400))
    content[position] ^= 1 << bit
    with pytest.raises(DamagedStoreError):
        decode_record(bytes(content), Path("zarr.json"))


def test_a_torn_write_is_caught() -> None:
    """The beginning of a new record over the rest of an old one does not verify, at any place."""
    path = Path("zarr.json")
    old = encode_record({"version": 3, "norm": 0.25, "x": "a" * 500}, 1024)
    new = encode_record({"version": 4, "norm": 0.75, "x": "b" * 500}, 1024)
    for kept_bytes in range(1024):
        torn = new[:kept_bytes] + old[kept_bytes:]
        if torn not in (old, new):
            with pytest.raises(DamagedStoreError):
                decode_record(torn, path)


def test_a_record_is_overwritten_in_place(tmp_path: Path) -> None:
    """Writing changes neither the file's size nor its inode; a larger record is refused."""
    path = tmp_path / "zarr.json"
    size = record_size({"version": 1})
    path.write_bytes(b" " * size)
    inode = path.stat().st_ino
    for version in (1, 123456):
        write_record(path, {"version": version}, size)
        assert read_record(path) == {"version": version}
        assert (path.stat().st_size, path.stat().st_ino) == (size, inode)
    with pytest.raises(RunError, match="does not fit"):
        write_record(path, {"x": "a" * size}, size)
    with pytest.raises(RunError, match="No such file"):
        write_record(tmp_path / "other", {}, size)


def test_blank_and_missing_records_are_damage(tmp_path: Path) -> None:
    """The record of a slot that was never committed does not verify."""
    (tmp_path / "blank").write_bytes(b" " * 4096)
    for name in ("blank", "missing"):
        with pytest.raises(DamagedStoreError):
            read_record(tmp_path / name)
