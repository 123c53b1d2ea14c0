"""Globs as Python's own, but finite, each file once, and nothing that is no file."""

from __future__ import annotations

import glob
import os
import socket
from pathlib import Path

import pytest

from swaptrain.data import globs
from swaptrain.data.corpus import find_files, hash_files
from swaptrain.data.globs import matches
from swaptrain.errors import ConfigError

PATTERNS = [
    "*", "**", "**/*.txt", "*/*.txt", "a/**", "a/**/*", "**/b/*.txt", "*/*/*", "a/b/x.txt", ".*",
    "**/.h*", "[ab]/*.t?t", "a/../*.txt", "./*.txt", "none/*", "**/none", "a/*.txt/*",
    "**/**/x.txt", ".hidden/*", "a/**/b/**/*.txt", "*.md", "a/[!b]/*",
]  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "corpus"
    for name in ("x.txt", "a/x.txt", "a/b/x.txt", "a/c/y.txt", ".hidden/z.txt", "a/.h.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("absolute", [False, True])
def test_without_links_a_glob_is_pythons(pattern: str, absolute: bool, tree: Path) -> None:
    """The same files; of directories it is enough that a pattern that names them finds them."""
    if absolute:
        pattern = f"{tree}/{pattern}"
    expected = {os.path.abspath(n) for n in glob.glob(pattern, recursive=True) if os.path.isfile(n)}
    found = {os.path.abspath(n) for n in matches(pattern) if os.path.isfile(n)}
    assert found == expected


def names(root: Path, *patterns: str, notes: list[str] | None = None) -> list[str]:
    note = [].append if notes is None else notes.append
    found = find_files([f"{root}/{p}" for p in patterns], key="data.text", note=note)
    return [os.path.relpath(file.path, root) for file in found]


LOOPS: dict[str, dict[str, str]] = {
    "parent": {"a/up": ".."},
    "itself": {"a/self": "."},
    "absolute": {"a/b/top": "ROOT"},
    "above": {"a/out": "ROOT/.."},
    "two": {"a/b/one": "../c", "a/c/two": "../b"},
    "many": {f"a/l{number}": ".." for number in range(20)},
}
"""Links by name, with where they lead."""


@pytest.mark.parametrize("name", LOOPS)
def test_links_to_ancestors_add_nothing(name: str, tree: Path) -> None:
    """However many links lead up or to each other, each file comes once, and it ends."""
    expected = ["a/b/x.txt", "a/c/y.txt", "a/x.txt", "x.txt"]
    for link, target in LOOPS[name].items():
        (tree / link).symlink_to(target.replace("ROOT", str(tree)))
    assert names(tree, "**/*.txt") == expected
    if name == "two":
        assert set(matches("**/*.txt")) == {
            *expected, "a/b/one/y.txt", "a/c/two/x.txt",
        }  # fmt: skip


def test_other_links_are_followed_and_each_file_is_taken_once(tree: Path) -> None:
    """A linked directory elsewhere counts; a second name of a file, hard or soft, does not."""
    other = tree.parent / "other"
    other.mkdir()
    (other / "new.txt").write_text("new")
    (other / "back").symlink_to(tree.parent)
    (tree / "z").symlink_to(other)
    os.link(tree / "x.txt", tree / "hard.txt")
    (tree / "soft.txt").symlink_to("a/x.txt")
    notes: list[str] = []
    found = names(tree, "**/*.txt", "*.txt", notes=notes)
    assert found == ["a/b/x.txt", "a/c/y.txt", "a/x.txt", "hard.txt", "z/new.txt"]
    assert len(notes) == 1
    assert "2 of 7 names" in notes[0]
    assert "soft.txt is" in notes[0]


def test_what_is_no_file_is_refused_without_being_opened(tree: Path) -> None:
    """A pipe would block for ever; a socket and a device are named too, and a dangling link."""
    os.mkfifo(tree / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt is a named pipe"):
        names(tree, "*.txt")
    os.unlink(tree / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.txt")
        with pytest.raises(ConfigError, match=r"s\.txt is a socket"):
            names(tree, "*.txt")
    os.unlink(tree / "s.txt")
    with pytest.raises(ConfigError, match="/dev/null is a device"):
        find_files(["/dev/null"], key="data.text")
    (tree / "gone.txt").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.txt: it is a link to nowhere"):
        names(tree, "*.txt")
    (tree / "array").mkdir()
    os.mkfifo(tree / "array" / "c")
    with pytest.raises(ConfigError, match="array/c is a named pipe"):
        find_files([tree / "array"], key="data.tokens", directories=True)


def test_what_links_in_an_array_lead_to_is_part_of_it(tree: Path) -> None:
    """Chunks on another disk count in its size and digest; a link back into it ends."""
    array = tree / "array"
    array.mkdir()
    (array / "zarr.json").write_text("{}")
    (tree.parent / "chunks").mkdir()
    (tree.parent / "chunks" / "0").write_bytes(b"12345")
    (array / "c").symlink_to(tree.parent / "chunks")
    (tree.parent / "chunks" / "back").symlink_to(array)
    (found,) = find_files([array], key="data.tokens", directories=True)
    assert found.size_bytes == 7
    (first,) = hash_files([found], {}, key="data.tokens")
    (tree.parent / "chunks" / "0").write_bytes(b"54321")
    (second,) = hash_files([found], {}, key="data.tokens")
    assert first.content != second.content


def test_directories_in_each_other_without_end_are_refused(tree: Path) -> None:
    """A glob that would need too deep a call says so."""
    deep = tree
    for _ in range(600):
        deep = deep / "d"
    os.makedirs(deep)
    with pytest.raises(ConfigError, match="hundreds of directories"):
        names(tree, "**/*.txt")
    while deep != tree:  # pytest's own cleaning is as recursive
        deep.rmdir()
        deep = deep.parent


def test_a_directory_that_cannot_be_listed_and_an_endless_glob_are_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be left out in silence is named, but for lost+found; so is a glob of too much."""
    plain = os.scandir

    def scandir(path: str) -> object:
        if os.path.basename(path) in ("c", "lost+found"):
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(globs.os, "scandir", scandir)
    with pytest.raises(ConfigError, match="a/c, which cannot be listed"):
        names(tree, "**/*.txt")
    (tree / "lost+found").mkdir()
    assert names(tree, "*/*.txt", "a/b/**/*.txt") == ["a/b/x.txt", "a/x.txt"]
    monkeypatch.setattr(globs, "MOST_NAMES", 5)
    with pytest.raises(ConfigError, match="more than 5 names"):
        names(tree, "*/*/*.txt")
