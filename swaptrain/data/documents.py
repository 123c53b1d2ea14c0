"""What a file of `data.text` has to be: text. Byte order marks are dropped, binary is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swaptrain.chat.files import SUFFIXES

__all__ = ["NotTextError", "check_name", "read_document"]

_PIECE_BYTES = 2**20
_NAMES = {
    **dict.fromkeys((".feather", ".orc", ".avro"), "a table"),
    **dict.fromkeys((".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z"), "compressed"),
    **dict.fromkeys((".tar", ".rar"), "an archive"),
}
_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = (  # the longer ones first: UTF-32's begins like UTF-16's
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_BEGINNINGS = (
    (b"\x1f\x8b", "compressed by gzip"), (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"\xfd7zXZ\x00", "compressed by xz"), (b"BZh91AY&SY", "compressed by bzip2"),
    (b"PK\x03\x04", "a zip archive"), (b"PAR1", "Parquet"), (b"%PDF-", "PDF"),
    (b"\x89PNG", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF"), (b"\x89HDF", "HDF5"),
    (b"\x7fELF", "a program"), (b"ARROW1", "Arrow"),
)  # fmt: skip
_CURE = (
    "extract its text into a file of its own, leave it out of the globs, or read it with "
    "data.python; data.text_as_is: true takes every file as it is"
)


class NotTextError(ValueError):
    """A file is no text; the message says why, and what to do, and follows the file's name."""


def check_name(name: str) -> None:
    """Raise NotTextError for a name that says that the file holds records or is compressed."""
    suffix = Path(name).suffix.lower()
    if suffix in SUFFIXES:
        raise NotTextError(
            f"ends in {suffix}, so it holds rows: name it under data.chat, which reads rows of "
            "conversations, prompts or text; data.text_as_is: true takes every file as it is"
        )
    if suffix in _NAMES:
        raise NotTextError(f"ends in {suffix}, so it is {_NAMES[suffix]} and no text: {_CURE}")


def read_document(path: Path, *, as_is: bool) -> Iterator[bytes]:
    """Yield the bytes of one document, at most 1 MiB at a time, without a UTF-8 byte order mark.

    Line ends stay as they are. Raises OSError, and NotTextError for what is no text; `as_is` takes
    every byte of any file.
    """
    offset = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            if not as_is:
                if offset == 0:
                    _check_beginning(piece)
                if (found := piece.find(b"\0")) >= 0:
                    place = f"byte {offset + found}"
                    raise NotTextError(f"holds a NUL at {place}, so it is no text: {_CURE}")
            offset += len(piece)
            if offset == len(piece) and not as_is:
                piece = piece.removeprefix(_MARK)
            if piece:
                yield piece


def _check_beginning(piece: bytes) -> None:
    for mark, encoding in _OTHER_MARKS:
        if piece.startswith(mark):
            raise NotTextError(
                f"begins with the byte order mark of {encoding}: convert it to UTF-8, such as with "
                f"iconv -f {encoding} -t UTF-8"
            )
    for beginning, what in _BEGINNINGS:
        if piece.startswith(beginning):
            raise NotTextError(f"is {what} by its first bytes, and no text: {_CURE}")
