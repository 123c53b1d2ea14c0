"""Ways to spoil a file of a run: bit by bit, or its values with the checksum made right again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from swaptrain.store.format.record import decode_record, encode_record

__all__ = ["NASTY", "metadata_files", "mutate_bytes", "mutate_tree", "rewrite"]

NASTY = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, 1, -1, 2, 7, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.0,
            -0.5, 1.5, 1e308, "", "0", "1", "weights", "../../../etc/passwd", "/etc/passwd", "..",
            "a/b", "\0", "\x1b[2J", "\u202e", "\ud800", "x" * 5000, "float32", "uint8", "object",
            "nan", [], {}, [[]], {"$float": "nan"}, {"$float": "1e9"}, {"$float": []}, {"": 0},
            [2**40, 2**40], [0], [-1], [1.0], [True], [None], [1] * 70,
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.recursive(
        st.integers(-3, 3) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
)  # fmt: skip


def metadata_files(run: Path) -> list[Path]:
    """Return every file of a run that is not a chunk, once, by its path in the run."""
    found = []
    for path in sorted(run.rglob("*")):
        if path.is_file() and not path.is_symlink() and "c" not in path.relative_to(run).parts:
            found.append(path.relative_to(run))
    return found


def mutate_bytes(content: bytes, draw: Any) -> bytes:
    """Return other bytes: a bit flipped, cut short, pieces put in, repeated or taken out."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "remove", "replace", "append"]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "flip" and content:
        flipped = content[at] ^ (1 << draw(st.integers(0, 7)))
        return content[:at] + bytes([flipped]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    other = draw(
        st.sampled_from([b"", b"\0" * 64, b"[" * 100_000, b"\xff\xfe", b"\n", b"{}", b"9"])
    )
    if kind == "insert":
        return content[:at] + other + content[at:]
    if kind == "append":
        return content + other
    if kind == "replace":
        return other
    until = min(len(content), at + draw(st.integers(1, 200)))
    return content[:until] + content[at:] if kind == "repeat" else content[:at] + content[until:]


def mutate_tree(tree: Any, draw: Any) -> Any:
    """Return a copy of plain values with one place changed, or taken out, or given twice."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return draw(NASTY)
    holder, key = places[draw(st.integers(0, len(places) - 1))]
    kind = draw(st.sampled_from(["set", "set", "set", "near", "delete", "again", "other"]))
    if kind == "near" and type(holder[key]) is int:
        holder[key] += draw(st.sampled_from([-1, 1, 64, -64, 4096]))
    elif kind == "delete":
        del holder[key]
    elif kind == "again" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif kind == "other":
        source, name = places[draw(st.integers(0, len(places) - 1))]
        try:
            holder[key] = copy.deepcopy(source[name])
        except KeyError:  # of the two, one holds the other
            holder[key] = None
    else:
        holder[key] = draw(NASTY)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    )
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def rewrite(path: Path, draw: Any) -> None:
    """Change values in a record or in JSON, and make the checksum right as a hostile writer can."""
    content = path.read_bytes()
    if b'"swaptrain":{"checksum"' in content:
        tree = mutate_tree(decode_record(content, path), draw)
        if not isinstance(tree, dict):
            tree = {"segments": tree}
        try:
            tree.pop("checksum", None)
            path.write_bytes(_padded(tree, content))
        except (TypeError, ValueError):
            return  # such a value cannot be in a record
        return
    lines = content.splitlines() or [b"{}"]
    number = draw(st.integers(0, len(lines) - 1)) if path.suffix == ".jsonl" else 0
    text = lines[number] if path.suffix == ".jsonl" else content
    try:
        tree = mutate_tree(json.loads(text), draw)
        made = json.dumps(tree).encode()
    except ValueError:
        made = mutate_bytes(text, draw)
    if path.suffix == ".jsonl":
        lines[number] = made
        made = b"\n".join(lines) + b"\n"
    path.write_bytes(made)


def _padded(tree: dict[str, Any], before: bytes) -> bytes:
    """Return a record of the size of the one before, or of its own if it does not fit."""
    made = encode_record(tree)
    return encode_record(tree, len(before)) if len(made) < len(before) else made
