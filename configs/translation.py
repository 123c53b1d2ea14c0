"""The data of translation.yaml: what a function's documentation says, and the function's name."""

from __future__ import annotations

import ast
import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Pairs", "pairs"]

SOURCE, TARGET = 128, 32
"""Bytes of a text and of a name; longer ones are cut."""
PAD, END, FIRST = 0, 1, 3
"""Ids; byte b has the id b + 3."""


class Pairs:
    """Items of equal shapes, as one captured graph needs them."""

    def __init__(self, texts: list[tuple[str, str]]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, target = (padded(text, size) for text, size in
                          zip(self.texts[index], (SOURCE, TARGET), strict=True))  # fmt: skip
        return {
            "input_ids": source,  # [SOURCE]
            "attention_mask": (source != PAD).long(),  # [SOURCE]
            "labels": target.masked_fill(target == PAD, -100),  # [TARGET]
        }


def pairs(split: Literal["train", "test"]) -> Pairs:
    """Return nine tenths of the functions, or the last tenth."""
    found = documented()
    cut = len(found) * 9 // 10
    return Pairs(found[:cut] if split == "train" else found[cut:])


@cache
def documented() -> list[tuple[str, str]]:
    """Return documentation and name of the standard library's functions, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                found.append((" ".join(text.split()), node.name))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order.tolist()]


def padded(text: str, size: int) -> Tensor:
    """Return the ids of a text and its end, [size]."""
    ids = torch.full((size,), PAD)
    content = [byte + FIRST for byte in text.encode()[: size - 1]]
    ids[: len(content) + 1] = torch.tensor([*content, END])
    return ids
