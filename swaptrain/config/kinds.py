"""The kinds of values that a config key takes: each with its parser, its name and an example."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from swaptrain.config.paths import cached_model, expand_path
from swaptrain.errors import ConfigError
from swaptrain.units import parse_size

__all__ = ["BatchCount", "Count", "Device", "EntryPoint", "Files", "Folder", "Folders", "Fraction"]
__all__ += ["Globs", "Layers", "Names", "NamesOrPattern", "Patterns"]
__all__ += ["BytesOrPath", "HfModel", "Mask", "Number", "OptimizerName", "Positive", "Prompts"]
__all__ += ["REPORTERS", "PositiveNumber", "Reporters", "Seed", "ValueKind"]
__all__ += ["Size", "Text", "Weights", "describe"]


@dataclass(frozen=True)
class ValueKind:
    """An annotation that parses what YAML gives; `wanted` and `example` go into its messages.

    `parse` returns the value, or raises TypeError if it is of another kind, or ValueError with a
    message of its own.
    """

    wanted: str
    example: str
    parse: Callable[[Any], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, found: Any) -> Any:
        try:
            return self.parse(found)
        except TypeError:
            advice = ""
            if self.wanted.startswith("text") and isinstance(found, int | float):
                advice = " (put quotes around it if it is meant as text)"
            raise ValueError(
                f"found {describe(found)}; wanted {self.wanted}, such as {self.example}{advice}"
            ) from None


def describe(found: Any) -> str:
    """Name a value of a config for a message: `the text 'fast'`, `a list`, `nothing (null)`."""
    if found is None:
        return "nothing (null)"
    if isinstance(found, dict):
        return "a mapping (nested keys)"
    if isinstance(found, list | tuple):
        return "a list"
    shown = str(found) if len(str(found)) <= 60 else str(found)[:57] + "..."
    if isinstance(found, bool):
        return shown.lower()
    return f"the text {shown!r}" if isinstance(found, str) else f"the number {shown}"


def _number(found: Any) -> float:
    """Accept a number, and text that spells one (quoted, it is still meant as a number)."""
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        raise TypeError
    try:
        value = float(found)
    except (ValueError, OverflowError):
        raise TypeError from None
    if not math.isfinite(value):
        raise ValueError(f"found {describe(found)}; wanted a finite number")
    return value


def _whole(found: Any) -> int:
    """Accept a whole number in any spelling: 100, 1e3, 1_000, "100"."""
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    value = _number(found)
    if not value.is_integer():
        raise TypeError
    return int(value)


def _count_or_all(found: Any) -> int | str:
    return "all" if found == "all" else _at_least(1)(found)


def _at_least(minimum: int) -> Callable[[Any], int]:
    def parse(found: Any) -> int:
        value = _whole(found)
        if value < minimum:
            raise ValueError(f"is {value}; it must be {minimum} or more")
        if value >= 2**63:
            raise ValueError(f"is {describe(value)}; it must be less than 2^63")
        return value

    return parse


def _positive_number(found: Any) -> float:
    value = _number(found)
    if value <= 0:
        raise ValueError(f"is {value:g}; it must be greater than 0")
    return value


def _not_negative_number(found: Any) -> float:
    value = _number(found)
    if value < 0:
        raise ValueError(f"is {value:g}; it must be 0 or more")
    return value


def _mask(found: object) -> float:
    part = _fraction(found)
    if not 0 < part < 1:
        raise TypeError
    return part


def _fraction(found: Any) -> float:
    value = _number(found)
    if not 0 <= value <= 1:
        raise ValueError(f"is {value:g}; it must lie between 0 and 1")
    return value


def _size(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        raise TypeError
    try:
        value = parse_size(found)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not 0 < value < 2**63:
        raise ValueError(f"is {found}; a size must be greater than 0 and less than 8 EiB")
    return value


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError
    if not found.strip():
        raise ValueError("is empty text")
    return found


def _texts(found: Any) -> tuple[str, ...]:
    """Accept a list of texts; one text alone is a list of one."""
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list | tuple):
        raise TypeError
    if not found:
        raise ValueError("is an empty list")
    return tuple(_text(item) for item in found)


def _reporters(found: Any) -> tuple[str, ...]:
    """Accept a list of names, empty too; one name alone is a list of one."""
    names = () if found in ([], ()) else _texts(found)
    for name in names:
        if name not in REPORTERS:
            close = difflib.get_close_matches(name.lower(), REPORTERS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"choose {' or '.join(REPORTERS)}"
            raise ValueError(f"found {describe(name)}; {advice} ([] for none)")
    return tuple(dict.fromkeys(names))


def _text_or_texts(found: Any) -> str | tuple[str, ...]:
    return _text(found) if isinstance(found, str) else _texts(found)


def _layers(found: Any) -> tuple[int, ...]:
    """Accept a list of whole numbers; one alone is a list of one."""
    found = found if isinstance(found, list | tuple) else [found]
    if not found:
        raise ValueError("is an empty list")
    return tuple(_at_least(0)(item) for item in found)


def _path(found: Any) -> str:
    return expand_path(_text(found))


def _paths(found: Any) -> tuple[str, ...]:
    return tuple(map(expand_path, _texts(found)))


def _entry(found: Any) -> str:
    text = _text(found)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text):
        raise ValueError(
            f"found {describe(text)}; wanted package.module:name, such as my_models.cnn:build"
        )
    return text


def _hf(found: Any) -> str | dict[str, Any]:
    if isinstance(found, dict):
        if not isinstance(found.get("model_type"), str):
            raise ValueError("a model given inline needs model_type, such as model_type: llama")
        return found
    return cached_model(_path(found), weights=True)


def _device(found: Any) -> str:
    text = _text(found)
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", text, re.ASCII):
        raise ValueError(f"found {describe(text)}; choose auto, cpu, cuda or cuda:N")
    return text


REPORTERS = ("tensorboard", "trackio")

Count = Annotated[int, ValueKind("a whole number from 0 on", "100", _at_least(0))]
Positive = Annotated[int, ValueKind("a whole number from 1 on", "100", _at_least(1))]
BatchCount = Annotated[
    int | Literal["all"], ValueKind("a whole number from 1 on, or all", "8", _count_or_all)
]
Seed = Annotated[int, ValueKind("a whole number from 0 on", "0", _at_least(0))]
Number = Annotated[float, ValueKind("a number from 0 on", "0.1", _not_negative_number)]
PositiveNumber = Annotated[float, ValueKind("a number greater than 0", "3e-4", _positive_number)]
Fraction = Annotated[float, ValueKind("a number from 0 to 1", "0.1", _fraction)]
Mask = Annotated[float, ValueKind("a number between 0 and 1", "0.15", _mask)]
Size = Annotated[int, ValueKind("a size with its unit", "4GiB", _size)]
Text = Annotated[str, ValueKind("text", "bytes", _text)]
BytesOrPath = Annotated[
    str, ValueKind("text (bytes, or a path)", "bytes", lambda found: cached_model(_path(found)))
]
Globs = Annotated[tuple[str, ...], ValueKind("a list of globs", '["corpus/**/*.txt"]', _paths)]
Patterns = Annotated[
    tuple[str, ...], ValueKind("a list of globs of names", '["model.embed_tokens*"]', _texts)
]
Names = Annotated[tuple[str, ...], ValueKind("a list of names", "[lm_head]", _texts)]
Prompts = Annotated[tuple[str, ...], ValueKind("a list of texts", '["def "]', _texts)]
NamesOrPattern = Annotated[
    str | tuple[str, ...],
    ValueKind("text or a list of names", "[q_proj, v_proj]", _text_or_texts),
]
Reporters = Annotated[tuple[str, ...], ValueKind("a list of names", "[tensorboard]", _reporters)]
Layers = Annotated[
    tuple[int, ...], ValueKind("a list of whole numbers from 0 on", "[0, 1]", _layers)
]
Files = Annotated[tuple[str, ...], ValueKind("a list of files", "[tokens/train.bin]", _paths)]
OptimizerName = Annotated[str, ValueKind("text (a class of torch.optim)", "adamw", _text)]
EntryPoint = Annotated[str, ValueKind("text (package.module:name)", "my_models.cnn:build", _entry)]
Folder = Annotated[Path, ValueKind("text (a path)", "runs/first", lambda found: Path(_path(found)))]
Folders = Annotated[
    tuple[Path, ...],
    ValueKind("a list of paths", "[/mnt/a, /mnt/b]", lambda found: tuple(map(Path, _paths(found)))),
]
HfModel = Annotated[
    str | dict[str, Any], ValueKind("text (a directory) or a config mapping", "path/to/model", _hf)
]
Weights = Annotated[
    Path,
    ValueKind(
        "text (a path)",
        "weights/model.safetensors",
        lambda found: Path(cached_model(_path(found), weights=True)),
    ),
]
Device = Annotated[str, ValueKind("text (a device)", "cuda:0", _device)]
