"""A disk that remembers what was flushed, and what it may show after the power fails.

The model is stricter than any file system in use. The bytes of a write count only after an fsync or
fdatasync of its file, or a syncfs of its disk, that began after the write had returned; a size that
was reserved only after fsync or syncfs; a name (created, renamed, deleted) only after an fsync of
its directory or a syncfs. Everything else may be there, or not, or a write in part, in any
combination; what is reserved or missing reads as zeros.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tests.support.recording import Event

__all__ = ["Blobs", "Disk", "Item", "Pending", "State"]

_SECTOR_BYTES = 512
_PAGE_BYTES = 4096

Item = tuple[str, str]
"""What a path is: ("directory", ""), ("symlink", target) or ("file", digest of its bytes)."""

State = dict[str, Item]
"""A disk's contents by path."""


class Blobs:
    """The bytes of files, by digest."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    def add(self, content: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(content)
        self._contents.setdefault(digest, content)
        return digest

    def __getitem__(self, digest: str) -> bytes:
        return self._contents[digest]

    def __deepcopy__(self, _: object) -> Blobs:
        return self  # what is in it never changes


@dataclass(eq=False)
class Node:
    """A file, directory or symlink, whatever its names are."""

    kind: str
    disk: str
    """The root of the disk it is on."""
    target: str = ""
    content: bytes = b""
    """Flushed."""
    entries: dict[str, Node] = field(default_factory=dict)
    """Flushed names."""
    seen: dict[str, Node] = field(default_factory=dict)
    """Names as the running system sees them."""
    changes: int = 0
    """How often what is flushed has changed."""


@dataclass(eq=False)
class Pending:
    """A change that is not flushed."""

    number: int
    kind: str
    """write, truncate, allocate; names."""
    node: Node
    """Of the file, or of the directory."""
    offset: int = 0
    data: bytes = b""
    names: tuple[tuple[Node, str, Node | None], ...] = ()
    """(directory, name, what it names afterwards) of a change of names."""
    waiting: set[Node] = field(default_factory=set)
    """Directories that have to be flushed before a change of names counts."""

    @property
    def variants(self) -> tuple[str, ...]:
        """What may be on the disk of it, beside nothing: all, or of a write a part."""
        if self.kind != "write" or len(self.data) < 2:
            return ("all",)
        return ("all", "head", "tail", "zeros")

    def part(self, variant: str) -> tuple[int, bytes]:
        """Return where which bytes are on the disk; half of the pages, or sectors, or bytes."""
        if variant == "all":
            return self.offset, self.data
        if variant == "zeros":
            # The file has its new size, and not its bytes.
            return self.offset, b""
        size = len(self.data)
        grain = next((g for g in (_PAGE_BYTES, _SECTOR_BYTES) if size > g), 1)
        half = -(-size // grain) // 2 * grain
        if variant == "head":
            return self.offset, self.data[:half]
        return self.offset + half, self.data[half:]


class Disk:
    """Replays events; knows what is flushed and, in order, what is not."""

    def __init__(self, roots: Sequence[Path], blobs: Blobs) -> None:
        """Begin with what the directories hold now, all of it flushed."""
        self.blobs = blobs
        self.pending: dict[int, Pending] = {}
        self._number = 0
        self._flushes: dict[int, tuple[Node, list[Pending]]] = {}
        self._roots = {os.path.realpath(root): Node("directory", str(root)) for root in roots}
        self._digests: dict[tuple[object, ...], Item] = {}
        self._walks: dict[tuple[object, ...], list[tuple[str, Node]]] = {}
        self._name_changes = 0
        for path, node in self._roots.items():
            self._load(Path(path), node)

    def _load(self, path: Path, node: Node) -> None:
        for child in sorted(path.iterdir()):
            kind = "directory"
            if child.is_symlink():
                kind = "symlink"
            elif child.is_file():
                kind = "file"
            made = Node(kind, node.disk)
            if kind == "symlink":
                made.target = os.readlink(child)
            elif kind == "file":
                made.content = child.read_bytes()
            else:
                self._load(child, made)
            node.entries[child.name] = node.seen[child.name] = made

    # What the running system does

    def apply(self, event: Event) -> None:
        """Take in the next event; `mark` changes nothing."""
        match event.kind:
            case "create":
                self._make(event.path, "file")
            case "mkdir":
                self._make(event.path, "directory")
            case "symlink":
                self._make(event.path, "symlink", event.other)
            case "unlink" | "rmdir":
                folder, name = self._parent(event.path)
                self._names((folder, name, None))
            case "rename":
                (old, before), (new, after) = self._parent(event.path), self._parent(event.other)
                self._names((old, before, None), (new, after, old.seen[before]))
            case "link":
                (old, before), (new, after) = self._parent(event.path), self._parent(event.other)
                self._names((new, after, old.seen[before]))
            case "write" | "truncate" | "allocate":
                node = self._node(event.path)
                self._add(Pending(0, event.kind, node, event.offset, event.data))
            case "begin":
                self._flushes[event.offset] = self._covered(event)
            case "end":
                self._end_flush(event)
            case "mark":
                pass
            case _:
                raise ValueError(event.kind)

    def _add(self, change: Pending) -> None:
        self._number += 1
        change.number = self._number
        self.pending[change.number] = change

    def _make(self, path: str, kind: str, target: str = "") -> None:
        folder, name = self._parent(path)
        self._names((folder, name, Node(kind, folder.disk, target)))

    def _names(self, *names: tuple[Node, str, Node | None]) -> None:
        folders = {folder for folder, _, _ in names}
        self._add(Pending(0, "names", names[0][0], names=names, waiting=folders))
        for folder, name, node in names:
            if node is None:
                del folder.seen[name]
            else:
                folder.seen[name] = node

    def _node(self, path: str) -> Node:
        root = next(r for r in self._roots if path == r or path.startswith(r + "/"))
        node = self._roots[root]
        for name in path[len(root) :].split("/"):
            if name:
                node = node.seen[name]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        folder, name = os.path.split(path)
        return self._node(folder), name

    def _covered(self, event: Event) -> tuple[Node, list[Pending]]:
        """Return what is flushed, and which changes are: those that have returned by now."""
        node = self._node(event.path)
        return node, self._changes_of(node, event.other)

    def _changes_of(self, node: Node, flush: str) -> list[Pending]:
        changes = self.pending.values()
        if flush == "syncfs":
            return [change for change in changes if change.node.disk == node.disk]
        if node.kind == "directory":
            return [change for change in changes if node in change.waiting]
        data = [change for change in changes if change.node is node]
        if flush == "fdatasync":
            return [change for change in data if change.kind != "allocate"]
        return data

    def _end_flush(self, event: Event) -> None:
        node, changes = self._flushes.pop(event.offset)
        for change in changes:
            if change.number not in self.pending:
                continue  # another flush has had it
            if change.kind == "names":
                change.waiting -= change.waiting if event.other == "syncfs" else {node}
                if change.waiting:
                    continue
                for folder, name, made in change.names:
                    _put(folder.entries, name, made)
                self._name_changes += 1
            else:
                change.node.content = _changed(change.node.content, [(change, "all")])
                change.node.changes += 1
            del self.pending[change.number]

    def everything(self) -> State:
        """Return what the running system sees, and a process that is killed leaves."""
        return self.state(dict.fromkeys(self.pending, "all"))

    # What the disk may show

    def state(self, choice: Mapping[int, str]) -> State:
        """Return what the disk shows when these pending changes are on it, in these variants."""
        kept = [(self.pending[n], choice[n]) for n in sorted(choice)]
        parts: dict[Node, list[tuple[Pending, str]]] = {}
        for change, variant in kept:
            if change.kind != "names":
                parts.setdefault(change.node, []).append((change, variant))
        names = [change for change, _ in kept if change.kind == "names"]
        return {path: self._item(node, parts.get(node, ())) for path, node in self._walk(names)}

    def _item(self, node: Node, parts: Sequence[tuple[Pending, str]]) -> Item:
        if node.kind != "file":
            return (node.kind, node.target)
        key = (node, node.changes, tuple((change.number, variant) for change, variant in parts))
        if key not in self._digests:
            self._digests[key] = "file", self.blobs.add(_changed(node.content, parts))
        return self._digests[key]

    def _walk(self, names: Sequence[Pending]) -> list[tuple[str, Node]]:
        key = (self._name_changes, tuple(change.number for change in names))
        if key not in self._walks:
            if len(self._walks) > 2000:
                self._walks.clear()
            shown: dict[Node, dict[str, Node]] = {}
            for change in names:
                for folder, name, node in change.names:
                    _put(shown.setdefault(folder, dict(folder.entries)), name, node)
            walk: list[tuple[str, Node]] = []
            for path, root in self._roots.items():
                walk += _below(path, root, shown)
            self._walks[key] = walk
        return self._walks[key]


def _below(
    path: str, folder: Node, shown: Mapping[Node, Mapping[str, Node]]
) -> Iterator[tuple[str, Node]]:
    for name, node in shown.get(folder, folder.entries).items():
        yield f"{path}/{name}", node
        if node.kind == "directory":
            yield from _below(f"{path}/{name}", node, shown)


def _put(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _changed(content: bytes, changes: Iterable[tuple[Pending, str]]) -> bytes:
    """Return a file's bytes after some changes, in their order."""
    result = bytearray(content)
    for change, variant in changes:
        if change.kind == "truncate":
            del result[change.offset :]
            end = change.offset
        elif change.kind == "allocate":
            end = change.offset
        else:
            offset, data = change.part(variant)
            end = change.offset + len(change.data) if variant != "head" else offset + len(data)
            result.extend(bytes(max(0, end - len(result))))
            result[offset : offset + len(data)] = data
        result.extend(bytes(max(0, end - len(result))))
    return bytes(result)
