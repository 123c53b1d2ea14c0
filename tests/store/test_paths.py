"""The names in a run directory: written down once, and nowhere else in the package."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import swaptrain
from swaptrain.store.paths import (
    ASIDE,
    NEXT,
    SPEED_PROBE,
    SPEED_RECORD,
    TREES,
    ZARR_JSON,
    RunPaths,
    SpillFolder,
    link_text,
)

PACKAGE = Path(swaptrain.__file__).parent
OWNER = PACKAGE / "store" / "paths.py"
PATHS = RunPaths(Path("RUN"))
OF_OTHER_DIRECTORIES = {("data/tokens/token_cache.py", "lock")}
"""The tokens of a text have a lock of their own, in the run or in data.cache."""
OF_NO_PATH = "program/instructions.py"
"""The text of an object for a person: a program imports nothing of a store."""
JOINING = {"Path", "glob", "rglob", "joinpath", "with_name", "RunPaths"}


def every_path() -> Iterator[Path]:
    """Yield one path of each kind."""
    for name, kind in vars(RunPaths).items():
        found = getattr(PATHS, name) if isinstance(kind, property) else ()
        yield from found if isinstance(found, tuple) else (found,)
    for tree in TREES:
        yield PATHS.root_record(tree)
        yield PATHS.segments(tree)
    for folder in get_args(SpillFolder):
        yield PATHS.spill_folder(folder)
    yield PATHS.gradient_record(1)


NAMES = {part for path in every_path() for part in path.parts[1:]} - {"001"}
NAMES |= {ZARR_JSON, SPEED_PROBE, SPEED_RECORD}
TELLING = {name for name in NAMES if "." in name or "-" in name}
"""Names that are no word of something else: no text without blanks may have them."""


def written_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names of a run directory that a file spells out, with their lines.

    Words such as "store" count where a path is put together, other names everywhere.
    """
    tree = ast.parse(source)
    of_paths: set[ast.AST] = set()
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            operands = [node.right]
        elif isinstance(node, ast.Call) and _called(node.func) in JOINING:
            operands = node.args
        of_paths.update(inner for operand in operands for inner in ast.walk(operand))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            wanted = NAMES if node in of_paths else TELLING
            if not set(node.value) & {" ", "\n"}:
                yield from ((node.lineno, name) for name in set(node.value.split("/")) & wanted)


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_no_other_file_spells_a_name_out() -> None:
    """What is renamed or moved in a run directory changes in one file."""
    found = [
        f"{file.relative_to(PACKAGE)}:{line} has {name!r}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != OWNER
        for line, name in written_names(file.read_text(encoding="utf-8"))
        if (str(file.relative_to(PACKAGE)), name) not in OF_OTHER_DIRECTORIES
    ]
    assert not found, "take it from store/paths.py: " + "; ".join(found)


def written_numbers(source: str) -> Iterator[int]:
    """Yield the lines where a number is put in the form of a name in a run directory."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            specs = (s.value for s in node.format_spec.values if isinstance(s, ast.Constant))
            yield from (node.lineno for spec in specs if spec in {"03d", "08d"})


def test_no_other_file_writes_a_number_of_a_name() -> None:
    """How a segment, a slot, a rank or a snapshot is numbered changes in one file."""
    found = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file not in {OWNER, PACKAGE / OF_NO_PATH}
        for line in written_numbers(file.read_text(encoding="utf-8"))
    ]
    assert not found, "take the name from store/paths.py: " + "; ".join(found)


def test_the_search_finds_a_number_that_is_written() -> None:
    """Of three digits or eight; others are no names of a run directory."""
    source = 'a = f"{k:03d}"\nb = run / f"x/{step:08d}"\nc = f"{n:05d}, {n:,}, {n}"'
    assert list(written_numbers(source)) == [1, 2]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('path = run_dir / "store" / "segments"', ["segments", "store"]),
        ('file = f"{run_dir}/spill/finished/{k:03d}/record.json"', ["record.json"]),
        ('_NAME = "metrics.jsonl"', ["metrics.jsonl"]),
        ('for file in run_dir.glob("slots/*/zarr.json"): file.unlink()', ["slots", "zarr.json"]),
        ('raise ValueError("it has no config.yaml")', []),
        ('row = record["segments"][0]', []),
    ],
)
def test_the_search_finds_a_name_that_is_spelled_out(source: str, names: list[str]) -> None:
    """Words count in paths only, and text for a person does not."""
    assert sorted(name for _, name in written_names(source)) == names


def test_the_description_has_every_name() -> None:
    """The tree in the docstring is what a person reads of a run directory."""
    text = ast.get_docstring(ast.parse(OWNER.read_text(encoding="utf-8")))
    assert text is not None
    words = {part for word in text.replace(",", " ").split() for part in word.split("/")}
    bare = {name: name.removesuffix(ASIDE).removesuffix(NEXT) for name in NAMES}
    assert not [name for name in NAMES if words.isdisjoint({name, bare[name]})]


def test_a_link_leads_to_its_target_where_the_run_is_moved(tmp_path: Path) -> None:
    """Its text is relative, from each depth of a run directory."""
    paths = RunPaths(tmp_path / "before")
    paths.slot("00000000-001").mkdir(parents=True)
    for link in (paths.live_link(1), paths.live_link(1, "b"), paths.snapshot(4) / "001"):
        link.parent.mkdir(parents=True)
        link.symlink_to(link_text(link, paths.slot("00000000-001")))
    (tmp_path / "before").rename(tmp_path / "after")
    moved = RunPaths(tmp_path / "after")
    for link in (moved.live_link(1), moved.live_link(1, "b"), moved.snapshot(4) / "001"):
        assert link.is_dir() and not os.path.isabs(os.readlink(link))
