"""One class, one name: a reader who searches for a class finds one definition in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import swaptrain

PACKAGE = Path(swaptrain.__file__).parent


def defined(source: str) -> Iterator[str]:
    """Yield the classes of a file, nested ones too, and its type aliases (`Rows = list[int]`)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
                if name.strip("_")[0].isupper() and not name.isupper():
                    yield name


def shared(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that several definitions share, with the files of each."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, source in sources.items():
        for name in defined(source):
            found[name].append(file)
    return {name: sorted(files) for name, files in found.items() if len(files) > 1}


def test_no_two_classes_share_a_name() -> None:
    """Private ones neither; an alias of a type counts as a class."""
    files = sorted(PACKAGE.rglob("*.py"))
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in files}
    assert shared(sources) == {}


def test_a_shared_name_is_found() -> None:
    """The check sees classes inside of functions, and aliases; constants it skips."""
    one = "class Row:\n    pass\nLIMIT = 3 | 4\n"
    other = "Row = tuple[int, int]\nLIMIT = 3 | 4\ndef f():\n    class _Walk:\n        pass\n"
    third = "class _Walk:\n    pass\n"
    assert shared({"a": one, "b": other, "c": third}) == {"Row": ["a", "b"], "_Walk": ["b", "c"]}
