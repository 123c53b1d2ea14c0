"""The documents: short enough to read, in short sentences, and every path in them is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_COLUMNS = 160
MOST_WORDS_OF_A_SENTENCE = 25
FIRST_SCREEN = 30
"""Lines of a document in which sentences are short; in README they all are."""
MOST_WORDS = {"README.md": 1600, "design.md": 2500}
PATH = re.compile(r"`(?:bash |python )?((?:swaptrain|scripts|tests|configs|docs)/[\w/.-]+\w)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
NO_SENTENCE = re.compile(r"\s*$|[#<]")
SPAN = re.compile(r"`[^`]*`")
LINK_TEXT = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"((?<=[.?!])[\"')*]*\s+)")


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


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and item of a list with the number of its first line."""
    first, lines, last = 0, list[str](), 0
    for number, line in prose(text):
        begins = ITEM.match(line) is not None or number != last + 1 or NO_SENTENCE.match(line)
        if begins and lines:
            yield first, "\n".join(lines)
            lines = []
        if NO_SENTENCE.match(line) is None:
            first = first if lines else number
            lines.append(ITEM.sub("", line, count=1))
        last = number
    if lines:
        yield first, "\n".join(lines)


def long_sentences(text: str) -> list[tuple[int, int]]:
    """Return line and words of each long sentence; a span of code counts as one word."""
    found = []
    for first, paragraph in paragraphs(text):
        plain = SPAN.sub(lambda span: "code" + "\n" * span.group().count("\n"), paragraph)
        number = first
        for sentence in SENTENCE_END.split(LINK_TEXT.sub(r"\1", plain)):
            words = sum(re.search(r"\w", word) is not None for word in sentence.split())
            if words > MOST_WORDS_OF_A_SENTENCE:
                found.append((number, words))
            number += sentence.count("\n")
    return found


def missing_paths(text: str) -> list[str]:
    named = [*PATH.findall(text), *(f"docs/{target}" for target in LINK.findall(text))]
    return [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_can_be_read_and_names_what_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert long_lines(text) == []
    assert missing_paths(text) == []
    shown = len(text) if document.name == "README.md" else FIRST_SCREEN
    assert [found for found in long_sentences(text) if found[0] <= shown] == []
    assert len(text.split()) <= MOST_WORDS.get(document.name, 10_000)


def test_long_sentences_are_found() -> None:
    long, short = "word " * 26, "word " * 25
    assert long_sentences(f"{short}end. {long}end") == [(1, 26), (1, 27)]
    assert long_sentences(f"{short[:-5]} 16. {long}") == [(1, 26)], "a number ends a sentence too"
    assert long_sentences(f"a\n{short}") == [(1, 26)]
    assert long_sentences(f"One. `{long}`\n- {short}\n- {long}\n# {long}\n| {long}") == [(3, 26)]
    assert long_sentences(f"Two,\nlines. (Three.) {short.strip()}.\n{long}") == [(3, 26)]


def test_faults_are_found() -> None:
    long = "x" * (MOST_COLUMNS + 1)
    assert long_lines(f"short\n{long}\n| {long}\n```\n{long}\n```\n{long}") == [2, 7]
    text = (
        "`tests/nowhere.py`, `swaptrain/cli.py`, `bash scripts/none.sh`, [a](design.md) [b](no.md)"
    )
    assert missing_paths(text) == ["tests/nowhere.py", "scripts/none.sh", "docs/no.md"]
