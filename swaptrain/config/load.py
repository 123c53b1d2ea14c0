"""Load a config: one YAML file plus `key.sub=value` overrides, checked as a whole before use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swaptrain.config.messages import config_error
from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import Tree, parse_yaml, read_yaml
from swaptrain.errors import ConfigError

__all__ = ["config_of", "load_config", "parse_config"]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, put `key.sub=value` overrides (values are YAML) over it, and check all.

    Raises ConfigError with every problem at once: the line, the full key, what was found and what
    is wanted. Relative paths stay as they are: they are relative to the current directory.
    """
    tree = read_yaml(Path(path))
    if not isinstance(tree.values, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, such as model: and data:")
    for override in overrides:
        _apply(tree, override)
    return config_of(tree, str(path))


def parse_config(text: str, *, source: str) -> Config:
    """Check YAML text as `load_config` does a file; `source` begins each message."""
    return config_of(parse_yaml(text, source=source), source)


def config_of(tree: Tree, source: str) -> Config:
    """Return the config of nested values, checked as a whole; `source` begins each message."""
    try:
        return Config.model_validate(tree.values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise config_error(source, tree, details, Config) from None


def _apply(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(
            f"{override!r} is not an override: write key.sub=value, such as train.steps=100"
        )
    parsed = parse_yaml(text, source=f"override {override!r}")
    section: dict[str, Any] = tree.values
    for depth, name in enumerate(keys[:-1], 1):
        if section.get(name) is None:
            section[name] = {}
            tree.where.setdefault(keys[:depth], "command line")
        section = section[name]
        if not isinstance(section, dict):
            above = ".".join(keys[:depth])
            raise ConfigError(f"override {override!r}: {above} is a value, and has no keys inside")
    section[keys[-1]] = parsed.values
    # Whatever the file said below this key is gone, and so are its lines.
    for old in [old for old in tree.where if old[: len(keys)] == keys]:
        del tree.where[old]
    for inner in parsed.where:
        tree.where[keys + inner] = "command line"
