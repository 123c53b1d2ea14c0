"""Files of token ids as users have them: raw, NumPy, zarr; read in place, not copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from swaptrain.data.tokens.bin_files import BinForm, bin_form, likely_forms
from swaptrain.data.tokens.token_array import Array, expect_at, read_at
from swaptrain.errors import ConfigError, RunError
from swaptrain.store.paths import ZARR_JSON
from swaptrain.strict_json import read_json

__all__ = ["FlatFile", "Joined", "TokenSource", "ZarrFile", "open_token_file", "scan"]

_SCAN_TOKENS = 2**18
_LARGEST_CHUNK_BYTES = 64 * 2**20
_MOST_METADATA_BYTES = 2**24
_CODECS = frozenset({
    "adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta",
    "fixedscaleoffset", "fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits",
    "pcodec", "quantize", "sharding_indexed", "shuffle", "transpose", "zlib", "zstd",
})  # fmt: skip


class TokenSource(Protocol):
    """A sequence of token ids of which any few can be read."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def expect(self, start: int, stop: int) -> None:
        """Begin to read tokens [start, stop), which `read` will be asked for, where that helps."""

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop) as int64; raises RunError."""


class FlatFile:
    """Numbers that follow each other in one file, from `offset_bytes` on."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset_bytes: int, length: int) -> None:
        self._path, self._dtype = path, dtype
        self._offset_bytes, self._length = offset_bytes, length

    @property
    def form(self) -> str:
        """What the digest of raw ids takes in; empty for uint16 from the first byte on."""
        name = f"{self._dtype.name} at {self._offset_bytes}"
        return "" if name == "uint16 at 0" or self._path.suffix != ".bin" else name

    def hint(self, vocabulary: int) -> str:
        """Return what raw ids beyond a vocabulary may be instead."""
        if self._path.suffix != ".bin":
            return ""
        return likely_forms(
            self._path, BinForm(self._dtype, self._offset_bytes, self._length), vocabulary
        )

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    def expect(self, start: int, stop: int) -> None:
        """Begin to read tokens [start, stop), which `read` will be asked for."""
        offset_bytes = self._offset_bytes + start * self._dtype.itemsize
        expect_at(self._path, offset_bytes, stop - start, self._dtype)

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop) as int64; raises RunError."""
        offset_bytes = self._offset_bytes + start * self._dtype.itemsize
        return read_at(self._path, offset_bytes, stop - start, self._dtype).astype(np.int64)


class ZarrFile:
    """A zarr array, with whatever codecs it has; a read decodes the chunks that it touches."""

    def __init__(self, path: Path, array: zarr.Array[Any]) -> None:
        self._path, self._array = path, array

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._array.shape[0])

    def expect(self, start: int, stop: int) -> None:
        """Do nothing: which bytes a read takes, its codecs decide."""

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop) as int64; raises RunError."""
        try:
            return np.asarray(self._array[start:stop]).astype(np.int64)
        except Exception as error:  # each codec has exceptions of its own
            raise RunError(f"cannot read the tokens in {self._path}: {error}") from error


class Joined:
    """Several sources, one after the other."""

    def __init__(self, sources: list[TokenSource]) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._ends[-1])

    def expect(self, start: int, stop: int) -> None:
        """Begin to read tokens [start, stop), which `read` will be asked for."""
        for source, begin, end in self._pieces(start, stop):
            source.expect(begin, end)

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop) as int64; raises RunError."""
        return np.concatenate([s.read(begin, end) for s, begin, end in self._pieces(start, stop)])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[TokenSource, int, int]]:
        """Yield each source that holds some of the tokens, and which of its own they are."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[number])
            begin = end - len(self._sources[number])
            until = min(stop, end)
            if start < until:
                yield self._sources[number], start - begin, until - begin
            start, number = until, number + 1


def open_token_file(
    name: str, *, key: str, token_dtype: str | None = None, vocabulary: int | None = None
) -> TokenSource:
    """Open a .bin (raw little-endian ids), a .npy (1-D integers) or a zarr array (1-D integers).

    `token_dtype` and the model's `vocabulary` help to tell what a .bin holds. Raises ConfigError
    for anything else.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return _open_zarr(path, key)
        if path.suffix == ".npy":
            return _open_npy(path, key)
        if path.suffix == ".bin":
            form = bin_form(path, key, token_dtype, vocabulary)
            return FlatFile(path, form.dtype, form.offset_bytes, form.length)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error
    raise ConfigError(
        f"{key}: {path} is neither .bin (raw ids), .npy nor a zarr array: for text use data.text"
    )


def _open_npy(path: Path, key: str) -> FlatFile:
    # Only the header is wanted: nothing of the mapping is touched.
    mapped: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    _check(path, key, mapped.shape, mapped.dtype)
    size_bytes, said_bytes = os.stat(path).st_size, mapped.offset + mapped.nbytes
    if size_bytes != said_bytes:
        raise ConfigError(
            f"{key}: {path} has a header that says {len(mapped):,} ids, and {size_bytes:,} bytes "
            f"where these take {said_bytes:,}: write it again"
        )
    return FlatFile(path, mapped.dtype, mapped.offset, len(mapped))


def _open_zarr(path: Path, key: str) -> ZarrFile:
    try:
        _check_codecs(path, key)
        array = zarr.open_array(store=path, mode="r")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {path} does not open as a zarr array: {error}") from error
    _check(path, key, array.shape, array.dtype)
    chunk_bytes = array.chunks[0] * array.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise ConfigError(
            f"{key}: the chunks of {path} have {chunk_bytes / 2**20:.0f} MiB, and each read holds"
            f" one in memory: write it with chunks of {_LARGEST_CHUNK_BYTES // 2**20} MiB at most"
        )
    missing = array.nchunks - array.nchunks_initialized
    if missing > 0:
        raise ConfigError(
            f"{key}: {path} lacks {missing:,} of its {array.nchunks:,} chunks, which would be "
            f"read as {array.fill_value}: write it to its end, with "
            "zarr's write_empty_chunks"
        )
    return ZarrFile(path, array)


def _check_codecs(path: Path, key: str) -> None:
    """Refuse an array whose codecs can do more than decode numbers: one of them runs pickles.

    Raises ConfigError; ValueError or OSError for metadata that cannot be read.
    """
    name = ZARR_JSON if (path / ZARR_JSON).exists() else ".zarray"
    metadata = read_json(path / name, _MOST_METADATA_BYTES)
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not an object")
    version_2 = [*(metadata.get("filters") or ()), metadata.get("compressor") or {"id": "bytes"}]
    found = list(_codec_names(metadata.get("codecs", version_2)))
    unknown = [name for name in found if name.removeprefix("numcodecs.") not in _CODECS]
    if unknown:
        raise ConfigError(
            f"{key}: {path} has the codec {unknown[0]!r}, which is not used here: write it with one"
            " of " + ", ".join(sorted(_CODECS))
        )


def _codec_names(codecs: Any) -> Iterator[str]:
    """Yield the names of codecs, also of those inside of others (shards)."""
    for codec in codecs if isinstance(codecs, list) else ():
        if not isinstance(codec, dict):
            raise ValueError("a codec is not an object")
        yield str(codec.get("name", codec.get("id")))
        configuration = codec.get("configuration")
        for key in ("codecs", "index_codecs"):
            yield from _codec_names(
                configuration.get(key) if isinstance(configuration, dict) else ()
            )


def _check(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConfigError(
            f"{key}: {path} holds {dtype} of shape {list(shape)}: token ids are a 1-D array of"
            " integers"
        )


def scan(source: TokenSource) -> Iterator[Array]:
    """Yield all tokens in order, a few MiB at a time."""
    for start in range(0, len(source), _SCAN_TOKENS):
        yield source.read(start, min(start + _SCAN_TOKENS, len(source)))
