"""Forks whose children look for garbage only in what they make themselves."""

from __future__ import annotations

import gc
import os

__all__ = ["fork"]


def fork() -> int:
    """Fork, as `os.fork` does.

    A child's collections would read all that was imported and captured, and copy its pages.
    """
    gc.freeze()
    child = os.fork()
    if child:
        gc.unfreeze()
    return child
