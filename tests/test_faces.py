"""What the face of a room names, the docstring of its `__init__.py`, is there to be found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import swaptrain

PACKAGE = Path(swaptrain.__file__).parent
KEYS = PACKAGE.parent / "docs" / "config.md"
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)/?`")


def named(text: str) -> Iterator[str]:
    """Yield the files, rooms and names that a face has in backticks; keys of a config are none."""
    keys = KEYS.read_text(encoding="utf-8")
    for name in NAME.findall(text):
        if not name.endswith(".json") and ("." not in name or f"`{name}`" not in keys):
            yield name.removesuffix(".py")


def defined(file: Path) -> set[str]:
    """Return the classes and functions of a file, those that it imports too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


def is_inside(folder: Path, parts: list[str]) -> bool:
    """Whether a folder has a room, a file, or a name in one."""
    first, *rest = parts
    if (folder / first).is_dir() and (not rest or is_inside(folder / first, rest)):
        return True
    file = folder / f"{first}.py"
    return file.exists() and (not rest or rest[0] in defined(file))


def is_there(face: Path, name: str) -> bool:
    """Whether a name means something in a room: seen from it, from one around it, or in a file."""
    parts = name.split(".")
    if parts[0] == "swaptrain":
        return is_inside(PACKAGE, parts[1:]) or parts[1] in defined(PACKAGE / "__init__.py")
    around = [folder for folder in face.parents if folder.is_relative_to(PACKAGE)]
    if any(is_inside(folder, parts) for folder in around):
        return True
    is_name = len(parts) == 1 or parts[0][0].isupper()
    return is_name and any(parts[0] in defined(file) for file in face.parent.glob("*.py"))


def test_a_face_names_what_there_is() -> None:
    """A newcomer enters where the face says: a file that was renamed is renamed there too."""
    wrong = []
    for face in sorted(PACKAGE.rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))) or ""
        missing = [name for name in named(text) if not is_there(face, name)]
        wrong += [f"{face.relative_to(PACKAGE)} names {name}" for name in missing]
    assert not wrong, "; ".join(wrong)


def test_a_name_that_is_not_there_is_found() -> None:
    """Of a file, of a name in a file, and of a room; a key of a config and a record are neither."""
    face = PACKAGE / "store" / "slots" / "__init__.py"
    good = ["slots.Slots", "slot", "Committer", "store.disk", "errors", "swaptrain.plan"]
    bad = ["slots.Committer", "commits.Committer", "store.plan", "plan", "swaptrain.commit"]
    text = ", ".join(f"`{name}`" for name in (*good, "memory.host", "zarr.json", *bad))
    assert [name for name in named(text) if is_there(face, name)] == good
    assert [name for name in named(text) if not is_there(face, name)] == bad
