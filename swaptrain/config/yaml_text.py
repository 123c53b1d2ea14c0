"""YAML for configs: read with the line of every key and without YAML 1.1's traps, and written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from swaptrain.errors import ConfigError

__all__ = ["KeyPath", "Tree", "dump_yaml", "one_line_yaml", "parse_yaml", "plain", "read_yaml"]

KeyPath = tuple[str | int, ...]

_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_NODES = 200_000
_MAX_DEPTH = 64
_MAX_DIGITS = 300
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RESOLVERS = (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes with the scalars of YAML 1.2: `no`, `on`, `12:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either YAML 1.1 or `_Loader` would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _RESOLVERS:
    _exact = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _exact, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _exact, _first)


@dataclass
class Tree:
    """Plain values read from YAML, and where each key was written (`line 4`, `command line`)."""

    values: Any
    where: dict[KeyPath, str] = field(default_factory=dict)


def read_yaml(path: Path, *, advice: str = "give a YAML file with --config") -> Tree:
    """Read one YAML file; raises ConfigError if it is missing, no text, empty or malformed.

    `advice` is said of a file that is not there.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {advice}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; {advice}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(path)!r}: cannot be read: {reason}") from None
    if len(content) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than 4 MiB; this is not a config file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); "
            "a config is a YAML file, saved as UTF-8"
        ) from None
    tree = parse_yaml(text, source=str(path))
    if tree.values is None:
        raise ConfigError(f"{path}: is empty; a config needs model, data, optimizer, train and run")
    return tree


def parse_yaml(text: str, *, source: str) -> Tree:
    """Parse YAML text into plain values; `source` (a file name) begins each error message.

    Keys become text always, as in JSON. Raises ConfigError for a syntax error (with line and
    column), a key given twice, a tag, NaN, and for documents that are too deep or too large.
    """
    try:
        # The constructor reads the first characters already, so it can raise as well.
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        tree = Tree(None)
        if node is not None:
            tree.values = _Conversion(source, tree.where).value(node, ())
        return tree
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "malformed"
        hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
        raise ConfigError(f"{source}{at}: YAML syntax error: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: YAML syntax error: the character U+{_code(error.character):04X} "
            "is not allowed in a text file"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: the YAML is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        # PyYAML itself lets a few malformed escapes such as "\UFFFFFFFF" through to chr().
        raise ConfigError(f"{source}: YAML syntax error: {error}") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML that `parse_yaml` reads back to equal values."""
    text: str = yaml.dump(
        dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


def one_line_yaml(value: Any) -> str:
    """Write a plain value as one line that `parse_yaml` reads back, without control characters."""
    text: str = yaml.dump(
        plain(value),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=math.inf,
    )
    text = text.removesuffix("\n").removesuffix("\n...")
    if "\n" not in text:
        return text
    quoted: str = yaml.dump(
        plain(value), Dumper=_Dumper, default_style='"', default_flow_style=True, width=math.inf
    )
    return quoted.strip()


def plain(value: Any) -> Any:
    """Turn tuples into lists and paths into text: what YAML knows."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _code(character: str | bytes | int) -> int:
    return character if isinstance(character, int) else ord(character)


class _Conversion:
    """Turns composed nodes into plain values, and notes the line of every key."""

    def __init__(self, source: str, where: dict[KeyPath, str]) -> None:
        self.source, self.where, self.nodes = source, where, 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        # Aliases may contain themselves, or multiply: both limits are reached by a few bytes.
        if len(path) > _MAX_DEPTH:
            raise self._error(node, "the YAML is nested too deeply")
        if self.nodes > _MAX_NODES:
            raise ConfigError(f"{self.source}: more than {_MAX_NODES:,} values; not a config file")
        self.where.setdefault(path, f"line {node.start_mark.line + 1}")
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, tag)
        raise self._error(node, f"the tag {node.tag} is not supported; remove it")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a plain word, not a list or a mapping")
            key = self._text(key_node)
            inner = (*path, key)
            if key in values:
                name = ".".join(map(str, inner))
                first = self.where[inner]
                raise self._error(key_node, f"the key {name} is given twice (first in {first})")
            self.where[inner] = f"line {key_node.start_mark.line + 1}"
            values[key] = self.value(value_node, inner)
        return values

    def _scalar(self, node: yaml.ScalarNode, tag: str) -> Any:
        text = node.value
        if tag == "str":
            return self._text(node)
        if tag == "null":
            return None
        if tag == "bool" and text.lower() in {"true", "false"}:
            return text.lower() == "true"
        if len(text) > _MAX_DIGITS:
            raise self._error(node, f"a number of more than {_MAX_DIGITS} digits")
        if tag == "int" and _INT.fullmatch(text):
            return int(text, 16) if text.startswith("0x") else int(text)
        if tag in {"int", "float"} and _FLOAT.fullmatch(text):
            number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            if math.isnan(number):
                raise self._error(node, "NaN is not a value that any key takes")
            return number
        raise self._error(node, f"the tag {node.tag} is not supported here; remove it")

    def _text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._error(node, "text with half of a surrogate pair") from None
        if "\0" in text:
            raise self._error(node, "text with a NUL character")
        return text

    def _error(self, node: yaml.Node, what: str) -> ConfigError:
        return ConfigError(f"{self.source}:{node.start_mark.line + 1}: {what}")
