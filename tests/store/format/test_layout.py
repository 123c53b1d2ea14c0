"""Layouts: tensors are aligned, do not overlap, and fit in the fewest equal chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swaptrain.errors import ConfigError
from swaptrain.program.tensors import ITEMSIZE, TensorSpec
from swaptrain.store.format.layout import Alike, SegmentLayout, lay_out

DTYPES = st.sampled_from(["float32", "bfloat16", "uint16", "int64", "bool", "complex128"])


@given(
    dtype=DTYPES,
    sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=8),
    limit_bytes=st.integers(4096, 2**20),
)
def test_layout_is_tight_and_aligned(dtype: str, sizes: list[int], limit_bytes: int) -> None:
    """Starts are 64-byte aligned, nothing overlaps, padding is below a page per chunk."""
    tensors = [TensorSpec(f"t{i}", (n,), (1,), dtype) for i, n in enumerate(sizes)]
    layout = lay_out("weights", dtype, tensors, chunk_limit_bytes=limit_bytes)
    itemsize = ITEMSIZE[dtype]
    for before, after in pairwise(layout.entries):
        assert before.offset + before.tensor.extent <= after.offset
    assert all(entry.offset * itemsize % 64 == 0 for entry in layout.entries)
    last = layout.entries[-1]
    used_bytes = (last.offset + last.tensor.extent) * itemsize
    assert layout.chunk_bytes <= limit_bytes
    assert layout.chunk_bytes % 4096 == 0
    assert used_bytes <= layout.nbytes == layout.length * itemsize
    assert layout.nbytes - used_bytes < 4096 * (layout.chunks + 1)
    largest_bytes = limit_bytes // 4096 * 4096
    assert layout.chunks == max(1, -(-used_bytes // largest_bytes))


@given(
    sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=6),
    limit_bytes=st.integers(8192, 2**18),
)
def test_arrays_of_the_same_tensors_have_the_same_parts(sizes: list[int], limit_bytes: int) -> None:
    """A chunk holds the same elements in each; those of all chunks are the whole tensors'."""
    arrays = []
    for dtype in ("float32", "uint16"):
        tensors = [TensorSpec(f"t{i}", (n,), (1,), dtype) for i, n in enumerate(sizes)]
        arrays.append(
            lay_out("a", dtype, tensors, chunk_limit_bytes=limit_bytes, alike=Alike(tensors, 4))
        )
    assert arrays[0].chunk_bytes == 2 * arrays[1].chunk_bytes <= limit_bytes
    assert arrays[1].chunk_bytes % 4096 == 0
    chunks = arrays[0].chunks
    found: dict[str, int] = {}
    for chunk in range(chunks):
        wide, narrow = (array.part(chunk, 1) for array in arrays)
        places = [
            [(e.tensor.name, e.tensor.numel, e.offset, e.start) for e in part.entries]
            for part in (wide, narrow)
        ]
        assert places[0] == places[1]
        for name, count, offset, start in places[0]:
            assert found.setdefault(name, 0) == start, "in the order of the tensor's memory"
            found[name] += count
            assert start % 16 == 0, "where blocks of a fused step begin"
            assert offset + count <= wide.length
    assert found == {f"t{i}": n for i, n in enumerate(sizes) if n}
    several = arrays[0].part(0, chunks)
    assert [e.tensor.numel for e in several.entries] == [n for n in sizes if n]


def test_extent_counts_spanned_storage() -> None:
    """A transposed tensor spans its elements, an expanded one a single copy, an empty one none."""
    assert TensorSpec("a", (3, 5), (1, 3), "float32").extent == 15
    assert TensorSpec("b", (3, 5), (0, 1), "float32").extent == 5
    assert TensorSpec("c", (0, 5), (5, 1), "float32").extent == 0
    assert TensorSpec("d", (), (), "float32").extent == 1


def test_shape_class_depends_on_arrays_alone() -> None:
    """Segments whose arrays have the same form share slots, whatever their tensors are called."""

    def segment(name: str, numel: int) -> SegmentLayout:
        tensor = TensorSpec(name, (numel,), (1,), "float32")
        return SegmentLayout((lay_out("weights", "float32", [tensor], chunk_limit_bytes=8192),))

    assert segment("layers.0", 3000).shape_class == segment("layers.1", 2999).shape_class
    assert segment("layers.0", 3000).shape_class != segment("layers.0", 9000).shape_class
    assert segment("x", 7).shape_class == segment("x", 7).shape_class


def test_wrong_requests_are_refused() -> None:
    """A chunk limit below a page is the user's error; mixed dtypes are the caller's."""
    tensor = TensorSpec("a", (3,), (1,), "float32")
    with pytest.raises(ConfigError, match=r"store\.chunk"):
        lay_out("weights", "float32", [tensor], chunk_limit_bytes=100)
    with pytest.raises(ValueError, match="is bfloat16"):
        lay_out("weights", "bfloat16", [tensor], chunk_limit_bytes=4096)
    with pytest.raises(ValueError, match="no tensors"):
        lay_out("weights", "bfloat16", [], chunk_limit_bytes=4096)
