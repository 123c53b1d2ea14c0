"""The house's floor plan: imports go one way, and what should be light imports nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import swaptrain

PACKAGE = Path(swaptrain.__file__).parent
ORDER = [
    *("errors", "units", "spans", "strict_json", "config", "program", "capture", "store", "memory"),
    *("data", "observe", "models", "execute", "cli"),
]
# swaptrain.reference is the yardstick beside the house: plain PyTorch, with execute's optimizers.
TOP = {"reference", "__init__", "__main__"}
HEAVY = {"torch", "transformers", "zarr", "numpy", "tensorstore", "sklearn", "matplotlib"}


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    file: Path
    line: int
    module: str
    at_import: bool
    """Executed when the file is imported, not inside a function or under TYPE_CHECKING."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {self.module}"


def room_of(path: Path) -> str:
    """Return the room a file belongs to; config_kinds.py and its like are part of config."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "config" if first.startswith("config_") else first


def imports(path: Path) -> Iterator[Import]:
    """Yield all imports of a file, those inside functions too."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(path, child.lineno, name.name, at_import)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports are absolute"
                assert child.module is not None
                yield Import(path, child.lineno, child.module, at_import)
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = True
            yield from walk(child, at_import and not inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_belongs_to_a_room() -> None:
    """A new module is put into the order before anything imports it."""
    rooms = {room_of(path) for path in FILES}
    assert rooms <= {*ORDER, *TOP}, "add the room to ORDER in this test and to docs/design.md"


def test_imports_go_one_way() -> None:
    """No room imports one that comes after it, not even inside a function."""
    wrong = []
    for path in FILES:
        room = room_of(path)
        if room in TOP:
            continue
        for found in imports(path):
            parts = found.module.split(".")
            if parts[0] != "swaptrain" or len(parts) == 1:
                continue
            target = "config" if parts[1].startswith("config_") else parts[1]
            if target in TOP or ORDER.index(target) > ORDER.index(room):
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_program_is_pure() -> None:
    """What decides imports neither torch nor anything that does I/O."""
    forbidden = HEAVY | {"os", "io", "pathlib", "subprocess", "socket", "shutil", "tempfile"}
    forbidden |= {"threading", "time", "random", "mmap"}
    wrong = [
        str(found)
        for path in FILES
        if room_of(path) == "program"
        for found in imports(path)
        if found.module.split(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", ["cli", "config", "config_reference", "__main__"])
def test_the_command_line_imports_nothing_heavy(start: str) -> None:
    """--help must answer within a second, so torch waits for the verb that needs it."""
    reached: set[Path] = set()
    waiting = [PACKAGE / f"{start}.py"]
    wrong = []
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for found in imports(path):
            if not found.at_import and path.name != "__main__.py":  # whose function runs at once
                continue
            if found.module.split(".")[0] in HEAVY:
                wrong.append(str(found))
            if found.module.split(".")[0] == "swaptrain":
                inner = PACKAGE.joinpath(*found.module.split(".")[1:])
                waiting += [
                    file
                    for file in (inner.with_suffix(".py"), inner / "__init__.py")
                    if file.is_file()
                ]
    assert not wrong, "\n".join(wrong)
    assert len(reached) > 2
