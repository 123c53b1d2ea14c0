"""Typed records: what a record cannot say is one sentence with the file, the key and its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given

from swaptrain.errors import DamagedStoreError
from swaptrain.store.format.record import encode_record
from swaptrain.store.format.schema import ArrayName, Checksum, Items, Name, Record, Sizes, Whole
from tests.support.mutations import NASTY


class Inner(Record):
    sizes: Sizes
    name: Name
    row: Whole | None = None


class Small(Record):
    title: ClassVar[str] = "a small record"
    step: Whole
    loss: float
    checksums: dict[ArrayName, Items[Checksum]]
    inner: Inner


def good(**changes: Any) -> dict[str, Any]:
    inner = {"sizes": [3, 4], "name": "w"}
    return {"step": 7, "loss": 1, "checksums": {"a": [2**64 - 1]}, "inner": inner, **changes}


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Same bytes, absent keys included; a whole number is a float as well."""
    path = tmp_path / "record.json"
    for found in (good(loss=1.5), good(inner={"sizes": [], "name": "x", "row": None}, loss=0.25)):
        path.write_bytes(encode_record(found))
        assert Small.read(path).encoded() == path.read_bytes()
    assert Small.checked(good(), path).loss == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": -1}, "a small record has -1 as step"),
        ({"step": True}, "has true as step"),
        ({"step": 2**63}, "has 9223372036854775808 as step"),
        ({"step": 1.0}, "has 1.0 as step"),
        ({"loss": "1"}, 'has "1" as loss'),
        ({"checksums": {"a": [1, -2, "x"]}}, "has -2 as checksums.a.1"),
        ({"checksums": {"../a": []}}, 'has "../a" as checksums.../a'),
        ({"checksums": [[1]]}, "has a list of 1 as checksums"),
        ({"inner": {"name": "w"}}, "lacks inner.sizes"),
        ({"inner": {"sizes": [1] * 65, "name": "w"}}, "has a list of 65 as inner.sizes"),
        ({"inner": {"sizes": [], "name": "a\x1b[2J"}}, r'has "a\u001b[2J" as inner.name'),
        ({"inner": {"sizes": [], "name": ""}}, 'has "" as inner.name'),
        ({"inner": {"sizes": [], "name": "x" * 1025}}, "as inner.name"),
        ({"other": 1}, "has the unknown key other"),
        ({"\x1b[2J": 1}, r"has the unknown key '\x1b[2J'"),
        ({str(n): n for n in range(200)}, "has 200 impossible values"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], said: str) -> None:
    """File, key and value, in characters that do nothing to a terminal."""
    with pytest.raises(DamagedStoreError) as raised:
        Small.checked(good(**changes), Path("zarr.json"))
    message = str(raised.value)
    assert said in message and "(file zarr.json)" in message
    assert message.isprintable() and len(message) < 300


@given(found=NASTY)
def test_any_value_is_refused_by_one_error(found: object) -> None:
    """In the place of the record, of an object in it, or of a key."""
    path = Path("zarr.json")
    for value in (found, good(inner=found), good(checksums=found)):
        try:
            Small.checked(value, path)
        except DamagedStoreError as error:
            assert str(error).isprintable()
        else:
            assert isinstance(value, dict) and not (found and value["inner"] is found)
