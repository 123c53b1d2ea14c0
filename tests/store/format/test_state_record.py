"""Records of segments and metadata of arrays: each value out of its bounds is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from swaptrain.errors import DamagedStoreError
from swaptrain.store.format.array_metadata import ArrayShape, array_shape
from swaptrain.store.format.state_record import SlotRecord

PATH = Path("weights/zarr.json")
SLOT: dict[str, Any] = {
    "segment": 1,
    "version": 3,
    "fingerprint": "f",
    "checksums": {"weights": [5, 2**64 - 1]},
    "handoff": {
        "gradients": [{"name": "x", "segment": 1, "micro_batch": 0, "row": 2, "checksums": [7]}]
    },
    "losses": [1, float("nan")],
    "norms": {"w": float("nan")},
    "table": [
        {
            "name": "w", "shape": [4, 4], "stride": [4, 1], "dtype": "float32",
            "array": "weights", "offset": 0,
        }
    ],
}  # fmt: skip
ARRAY: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "data_type": "float32",
    "shape": [2048],
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1024]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "fill_value": 0.0,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "attributes": {"of": "nobody"},
}


CODED: dict[str, Any] = {
    **SLOT,
    "checksums": {
        name: [7] for name in ("weights", "remainder", "exp_avg_8bit", "exp_avg_scale")
    },
    "table": [
        {
            "name": "w", "shape": [30, 20], "stride": [1, 30], "dtype": dtype, "array": array,
            "offset": 0,
        }
        for array, dtype in (
            ("weights", "bfloat16"), ("remainder", "uint16"), ("exp_avg_8bit", "uint8")
        )
    ] + [
        {
            "name": "w", "shape": [3], "stride": [1], "dtype": "float32",
            "array": "exp_avg_scale", "offset": 0,
        }
    ],
}  # fmt: skip
"""A transposed matrix in bfloat16 whose moment is coded."""


def with_value(record: dict[str, Any], place: str, value: object) -> dict[str, Any]:
    """Return a copy with another value at `a.0.b`."""
    changed: Any = copy.deepcopy(record)
    *way, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    target = changed
    for key in way:
        target = target[key]
    target[last] = value
    return dict(changed)


def test_what_swaptrain_writes_is_read() -> None:
    assert SlotRecord.checked(SLOT, PATH).losses[0] == 1.0
    assert array_shape(ARRAY, PATH) == ArrayShape("float32", 4096, 2, None)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("segment", 0, "has 0 as segment"),
        ("version", 2**63, "has 9223372036854775808 as version"),
        ("checksums.weights.0", 2**64, "as checksums.weights.0"),
        ("handoff.values", [], "unknown key handoff.values"),
        ("handoff.gradients.0.row", -1, "has -1 as handoff.gradients.0.row"),
        ("losses.0", 2**63, "has 9223372036854775808 as losses.0"),
        ("losses.0", 10**400, "as losses.0"),
        ("norms.w", -0.5, "has -0.5 as norms.w"),
        ("table.0.offset", 2**48 + 1, "as table.0.offset"),
        ("table.0.stride", [4], "w has 2 sizes and 1 stride"),
        ("table.0.array", "exp_avg", "w lies in an array that has no checksums"),
        ("later", 1, "unknown key later"),
    ],
)
def test_a_slot_s_record_is_refused_by_key(place: str, value: object, said: str) -> None:
    with pytest.raises(DamagedStoreError) as caught:
        SlotRecord.checked(with_value(SLOT, place, value), PATH)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("table.1.shape", [15, 20], "w in remainder is not the rest of a weight beside it"),
        ("table.1.stride", [20, 1], "w in remainder is not the rest of a weight beside it"),
        ("table.1.dtype", "float32", "w in remainder is not the rest of a weight beside it"),
        ("table.0.dtype", "float32", "w in remainder is not the rest of a weight beside it"),
        ("table.0.name", "v", "w in remainder is not the rest of a weight beside it"),
        ("table.2.dtype", "int8", "w in exp_avg_8bit does not lie as codes do"),
        ("table.2.stride", [1, 31], "w in exp_avg_8bit does not lie as codes do"),
        ("table.2.name", "v", "v has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.name", "v", "w has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.array", "exp_avg_8bit", "w has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.shape", [2], "w has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.shape", [4], "w has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.stride", [2], "w has codes in exp_avg_8bit and not their 3 scales"),
        ("table.3.dtype", "int32", "w has codes in exp_avg_8bit and not their 3 scales"),
    ],
)
def test_what_lies_apart_has_to_fit(place: str, value: object, said: str) -> None:
    """A weight and the rest of its master, codes and their scales: else a reader would read on."""
    assert len(SlotRecord.checked(CODED, PATH).table) == 4
    with pytest.raises(DamagedStoreError) as caught:
        SlotRecord.checked(with_value(CODED, place, value), PATH)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("zarr_format", 3.0, "has 3.0 as zarr_format"),
        ("node_type", "group", 'has "group" as node_type'),
        ("data_type", "float99", 'has "float99" as data_type'),
        ("shape", [2**49], "as shape.0"),
        ("shape", [1025], "is not made of chunks of [1024]"),
        ("chunk_grid.configuration.chunk_shape", [2], "has chunks of 8 bytes"),
        ("chunk_key_encoding.configuration.separator", ".", "separator, an impossible value"),
        ("fill_value", {}, "has an object as fill_value"),
        ("fill_value", 1, "another fill value than 0"),
        ("codecs", [{"name": "gzip"}], "other codecs than plain bytes"),
    ],
)
def test_an_array_s_metadata_is_refused_by_key(place: str, value: object, said: str) -> None:
    with pytest.raises(DamagedStoreError) as caught:
        array_shape(with_value(ARRAY, place, value), PATH)
    assert said in str(caught.value)
