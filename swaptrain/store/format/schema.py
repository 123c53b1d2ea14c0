"""The base of every record of a store: typed, strict and frozen, and safe to read from a stranger.

A checksum shows that bytes are those that were written, not that somebody meant well: a run
directory may come from somebody else. So counts, sizes and text have bounds, unknown keys are
refused, and every surprise is a DamagedStoreError that names the file, the key and its value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails

from swaptrain.errors import DamagedStoreError
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.record import encode_record, read_record

__all__ = ["MOST_ELEMENTS", "PRINTABLE", "ArrayName", "Checksum", "Dtype", "Items", "Name"]
__all__ += ["AtLeastOne", "JsonNumber", "Record", "ShownText", "Sizes", "Whole"]

MOST_ELEMENTS = 2**48
"""Of one tensor or array: more than any disk holds."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Text that does nothing to a terminal which shows it."""
_MOST_NUMBER = 2**63 - 1
_MOST_ERRORS = 100
_SHOWN = 60

T = TypeVar("T")

Items = Annotated[tuple[T, ...], Field(strict=False), FailFast()]
"""A JSON array; the first bad item ends the check, since there may be millions."""
Whole = Annotated[int, Field(ge=0, le=_MOST_NUMBER)]
AtLeastOne = Annotated[int, Field(ge=1, le=_MOST_NUMBER)]


def _bounded(found: object) -> object:
    if isinstance(found, int) and abs(found) >= _MOST_NUMBER:
        raise ValueError("more than a whole number in place of a float has")
    return found


JsonNumber = Annotated[float, BeforeValidator(_bounded)]
"""A float, or a whole number: JSON's 1.0 may have been written as 1."""
Checksum = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""xxh3-64."""
ShownText = Annotated[str, Field(max_length=1024, pattern=PRINTABLE)]
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=PRINTABLE)]
ArrayName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(ITEMSIZE)})$")]
Sizes = Annotated[Items[Annotated[int, Field(ge=0, le=MOST_ELEMENTS)]], Field(max_length=64)]
"""Shape or strides of a tensor, in elements."""


class Record(BaseModel):
    """A record, or an object inside one: its fields are the keys, in the order of the bytes.

    A field with a default may be absent on the disk, and then stays absent.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    title: ClassVar[str] = "a record"
    """Subject of the messages."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the record of a file; raises DamagedStoreError, or RunError for a failing disk."""
        return cls.checked(read_record(path), path)

    @classmethod
    def checked(cls, found: object, path: Path, *, array: str | None = None) -> Self:
        """Return the record that a value of JSON is; raises DamagedStoreError."""
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            # The details of an error take a hundred times the bytes of the value that is wrong.
            count = error.error_count()
            if count <= _MOST_ERRORS:
                text = _sentence(cls.title, error.errors(include_url=False)[0])
            else:
                text = f"{cls.title} has {count:,} impossible values"
            raise DamagedStoreError(text, array=array, path=path) from None

    def attributes(self) -> dict[str, Any]:
        """Return the content of the record by key, as far as it is set."""
        return self.model_dump(exclude_unset=True)

    def encoded(self) -> bytes:
        """Return the bytes of a file with this record."""
        return encode_record(self.attributes())


def _sentence(title: str, detail: ErrorDetails) -> str:
    key = ".".join(map(_shown_key, detail["loc"]))
    match detail["type"]:
        case "missing":
            return f"{title} lacks {key}"
        case "extra_forbidden":
            return f"{title} has the unknown key {key}"
        case "value_error" if not key:
            return str(detail["ctx"]["error"])
        case _ if not key:
            return f"{title} is {_shown(detail['input'])} instead of an object"
    return f"{title} has {_shown(detail['input'])} as {key}, an impossible value"


def _shown_key(part: int | str) -> str:
    text = str(part)
    return text[:_SHOWN] if text.isascii() and text.isprintable() else ascii(text[:_SHOWN])


def _shown(found: Any) -> str:
    """Return a value for a message: short, and harmless to a terminal."""
    if isinstance(found, dict | list | tuple):
        return "an object" if isinstance(found, dict) else f"a list of {len(found)}"
    return json.dumps(found[:_SHOWN] if isinstance(found, str) else found)[:_SHOWN]
