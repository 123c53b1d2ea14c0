"""Every problem of a config as one line: the place, the full key, what is wrong, what to do."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from swaptrain.config.kinds import ValueKind, describe
from swaptrain.config.other_tools import elsewhere
from swaptrain.config.section import key_names, key_of
from swaptrain.config.yaml_text import KeyPath, Tree
from swaptrain.errors import ConfigError, Problem

__all__ = ["config_error", "known_keys", "nearest", "section_of"]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds (`EvalConfig | None` too), or None for a value."""
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def known_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key of the tree, sections before their keys."""
    for name, field in root.model_fields.items():
        key = prefix + key_of(name, field)
        yield key
        section = section_of(field.annotation)
        if section is not None:
            yield from known_keys(section, f"{key}.")


def nearest(name: str, root: type[BaseModel]) -> str | None:
    """Return the known dotted key that a misspelt or misplaced one most likely means."""
    keys = list(known_keys(root))
    parent, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == parent}
    anywhere: dict[str, str] = {}
    for key in keys:
        anywhere.setdefault(key.rpartition(".")[2], key)
    close = difflib.get_close_matches(last.lower(), siblings, n=1, cutoff=0.6)
    if close and last not in anywhere:
        return siblings[close[0]]
    if last in anywhere:
        return anywhere[last]
    close = difflib.get_close_matches(last.lower(), anywhere, n=1, cutoff=0.75)
    return anywhere[close[0]] if close else None


def config_error(
    source: str, tree: Tree, details: Sequence[ErrorDetails], root: type[BaseModel]
) -> ConfigError:
    """Join all problems that pydantic found into one ConfigError, in the order of the file."""
    problems = []
    for detail in details:
        path = detail["loc"]
        text = _message(detail, root)
        # A check over several keys names them itself; a missing key has no place of its own.
        name = ".".join(map(str, path))
        place = _place(path, tree)
        problems += [Problem(name, part, place) for part in text.split("\n")]
    lines = [_line(problem) for problem in problems]
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}", problems=tuple(problems))
    text = "\n".join(f"  {line}" for line in lines)
    return ConfigError(f"{source}: {len(lines)} problems\n{text}", problems=tuple(problems))


def _line(problem: Problem) -> str:
    if not problem.key:
        return problem.message
    place = f"{problem.place}: " if problem.place else ""
    return f"{place}{problem.key}: {problem.message}"


def _place(path: KeyPath, tree: Tree) -> str:
    if not path or path not in tree.where:
        return ""
    return tree.where[path]


def _message(detail: ErrorDetails, root: type[BaseModel]) -> str:
    path, found, kind = detail["loc"], detail["input"], detail["type"]
    context = detail.get("ctx", {})
    name = ".".join(map(str, path))
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"missing; {_how_to_set(path, root)}"
    if kind == "extra_forbidden":
        there = elsewhere(str(path[-1]))
        if there is not None:
            return f"another tool's key; here it is {there}"
        near = nearest(name, root)
        return (
            f"unknown key; did you mean {near}?" if near else f"unknown key; {_choices(path, root)}"
        )
    if kind == "literal_error":
        return f"found {describe(found)}; choose {context['expected']}"
    if kind == "bool_type":
        return f"found {describe(found)}; wanted true or false"
    if kind == "tuple_type":
        return f"found {describe(found)}; wanted a list"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        section = _section_at(path, root)
        keys = f" ({', '.join(key_names(section))})" if section else ""
        return f"found {describe(found)}; wanted a mapping of keys{keys}"
    return f"found {describe(found)}; {detail['msg']}"


def _section_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for key in path:
        field = section.model_fields.get(str(key)) if section else None
        section = section_of(field.annotation) if field else None
    return section


def _choices(path: KeyPath, root: type[BaseModel]) -> str:
    section = _section_at(path[:-1], root)
    return f"the keys here are {', '.join(key_names(section))}" if section else "remove it"


def _how_to_set(path: KeyPath, root: type[BaseModel]) -> str:
    section = _section_at(path, root)
    if section is not None:
        return f"add the section {path[-1]}, with the keys {', '.join(key_names(section))}"
    parent = _section_at(path[:-1], root)
    field = parent.model_fields.get(str(path[-1])) if parent else None
    kinds = field.metadata if field else ()
    example = next((kind.example for kind in kinds if isinstance(kind, ValueKind)), None)
    return f"set it, such as {'.'.join(map(str, path))}={example or '...'}"
