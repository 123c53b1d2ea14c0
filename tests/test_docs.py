"""The documents: short enough to read, and every path that they name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_COLUMNS = 160
MOST_WORDS = {"README.md": 1600, "design.md": 2500}
PATH = re.compile(r"`(?:bash |python )?((?:swaptrain|scripts|tests|configs|docs)/[\w/.-]+\w)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of tables and of blocks of code, numbered."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            yield number, line


def long_lines(text: str) -> list[int]:
    return [number for number, line in prose(text) if len(line) > MOST_COLUMNS]


def missing_paths(text: str) -> list[str]:
    named = [*PATH.findall(text), *(f"docs/{target}" for target in LINK.findall(text))]
    return [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_can_be_read_and_names_what_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert long_lines(text) == []
    assert missing_paths(text) == []
    assert len(text.split()) <= MOST_WORDS.get(document.name, 10_000)


def test_faults_are_found() -> None:
    long = "x" * (MOST_COLUMNS + 1)
    assert long_lines(f"short\n{long}\n| {long}\n```\n{long}\n```\n{long}") == [2, 7]
    text = (
        "`tests/nowhere.py`, `swaptrain/cli.py`, `bash scripts/none.sh`, [a](design.md) [b](no.md)"
    )
    assert missing_paths(text) == ["tests/nowhere.py", "scripts/none.sh", "docs/no.md"]
