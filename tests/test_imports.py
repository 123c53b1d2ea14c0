"""The house's floor plan: imports go one way, and what should be light imports nothing heavy."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import swaptrain

PACKAGE = Path(swaptrain.__file__).parent
ORDER = [
    *("errors", "units", "spans", "strict_json", "processes", "generators", "program", "capture"),
    *("config", "memory", "chat", "migrate"),
    *("store.paths", "store.disk", "store.access", "store.format", "store.slots", "store.read"),
    *("store.check", "data", "models", "observe", "machine", "compute", "durable"),
    *("ranks", "planning", "planning.check_capture", "start", "run", "generate", "reference"),
    *("report", "verbs", "given", "api", "hf", "commands", "cli"),
]
"""Rooms from the ground up: each may import those before it. docs/design.md has them in words."""
TOP = {"__init__", "__main__"}
HEAVY = {"torch", "transformers", "zarr", "numpy", "tensorstore", "sklearn", "matplotlib"}
MOST_FILES = 20
"""Files of one folder, its face not counted."""


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


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of a module, given its names below the package: the longest in ORDER."""
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in ORDER:
            return room
    return parts[0]


def name_of(path: Path) -> tuple[str, ...]:
    """Return the names of a file's module below the package; a folder's face is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


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
                for name in child.names:
                    inner = f"{child.module}.{name.name}"
                    module = inner if inner in MODULES else child.module
                    yield Import(path, child.lineno, module, at_import)
            inner_node = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner_node = True
            yield from walk(child, at_import and not inner_node)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(("swaptrain", *name_of(path))): path for path in FILES}


def test_every_file_belongs_to_a_room() -> None:
    """A new module is put into the order before anything imports it."""
    rooms = {room_of(name_of(path)) for path in FILES} - {"store"}  # its face
    assert rooms <= {*ORDER, *TOP}, "add the room to ORDER in this test and to docs/design.md"


def test_imports_go_one_way() -> None:
    """No room imports one that comes after it, not even inside a function."""
    wrong = []
    for path in FILES:
        room = room_of(name_of(path))
        if room in TOP:
            continue
        for found in imports(path):
            parts = found.module.split(".")
            if parts[0] != "swaptrain" or len(parts) == 1:
                continue
            target = room_of(tuple(parts[1:]))
            if target in TOP or ORDER.index(target) > ORDER.index(room):
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other() -> None:
    """No circle of files, not even one that closes inside a function."""
    graph = {
        module: {found.module for found in imports(path) if found.module in MODULES} - {module}
        for module, path in MODULES.items()
        if module != "swaptrain"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_folder_is_crowded() -> None:
    """A folder has a face and at most so many files, and no folder a fifth of the house."""
    files: Counter[Path] = Counter()
    lines: Counter[Path] = Counter()
    for path in FILES:
        if path.name != "__init__.py":
            files[path.parent] += 1
            lines[path.parent] += len(path.read_text(encoding="utf-8").splitlines())
    assert {folder: n for folder, n in files.items() if n > MOST_FILES} == {}
    assert {folder: n for folder, n in lines.items() if n > lines.total() / 5} == {}
    faceless = [folder for folder in files if not ast.get_docstring(face_of(folder))]
    assert faceless == []


def face_of(folder: Path) -> ast.Module:
    """Return the parsed `__init__.py` of a folder."""
    return ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))


def test_program_is_pure() -> None:
    """What decides imports neither torch nor anything that does I/O."""
    forbidden = HEAVY | {"os", "io", "pathlib", "subprocess", "socket", "shutil", "tempfile"}
    forbidden |= {"threading", "time", "random", "mmap"}
    wrong = [
        str(found)
        for path in FILES
        if room_of(name_of(path)) == "program"
        for found in imports(path)
        if found.module.split(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", ["cli", "config.load", "config.reference", "__main__"])
def test_the_command_line_imports_nothing_heavy(start: str) -> None:
    """--help must answer within a second, so torch waits for the verb that needs it."""
    reached: set[Path] = set()
    waiting = [PACKAGE / f"{start.replace('.', '/')}.py"]
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
            parts = found.module.split(".")
            for length in range(1, len(parts) + 1):  # a folder's face is imported with its files
                if (module := MODULES.get(".".join(parts[:length]))) is not None:
                    waiting.append(module)
    assert not wrong, "\n".join(wrong)
    assert len(reached) > 2
