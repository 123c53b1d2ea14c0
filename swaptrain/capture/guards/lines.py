"""Finds the line of the model's own code that is being executed."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

import swaptrain

__all__ = ["called_by_model", "is_models_file", "is_own_file", "line_of_code", "model_line"]

_ROOM = f"{Path(swaptrain.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
_KEEP_NO_STATE = frozenset(("torch", "numpy", "transformers"))
"""Packages whose classes and modules keep no state between two forwards."""


def model_line() -> str:
    """Return "file:line, in function" of the innermost frame that is the model's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_models_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a line that is not known"


def called_by_model(depth: int) -> bool:
    """Whether the frame `depth` above the caller's is the model's own code."""
    return is_models_file(sys._getframe(depth + 1).f_code.co_filename)


def line_of_code(code: CodeType | None) -> str:
    """Return where a function is defined, as "file:line"."""
    return "code without a file" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def is_own_file(filename: str | None, *, installed: bool = False) -> bool:
    """Whether a file is the user's own code: no library, or with `installed` no well-known one."""
    if filename is None or filename.startswith(("<", _ROOM)):
        return False
    for folder in _INSTALLED:
        if filename.startswith(folder):
            package = filename.removeprefix(folder).partition("/")[0]
            return installed and package not in _KEEP_NO_STATE
    return not filename.startswith(_STANDARD)


def is_models_file(filename: str) -> bool:
    """Whether a file may be part of a model: the user's own, or of a library of models."""
    if filename.startswith(("<", _ROOM, _TORCH)):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)
