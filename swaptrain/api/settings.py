"""Arguments of a call become a config, with the checks and errors of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from swaptrain.config.load import config_of
from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import Tree, read_yaml
from swaptrain.errors import ConfigError

__all__ = ["KEYS", "configured", "merged", "value_of"]

KEYS = {
    "base": "model.base",
    "chat_template": "data.chat_template",
    "device": "device",
    "dir": "run.dir",
    "dtype": "model.dtype",
    "epochs": "train.epochs",
    "eval_every": "eval.every",
    "lora": "lora",
    "memory": "memory.host",
    "micro_batch": "data.micro_batch",
    "micro_batches": "data.micro_batches",
    "optimizer": "optimizer",
    "seed": "train.seed",
    "sequence_length": "data.sequence_length",
    "steps": "train.steps",
    "tokenizer": "data.tokenizer",
}
"""Arguments of `train` and the keys of a config that they are."""


def configured(
    config: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Config:
    """Return the config of a file or of nested mappings, with arguments and dotted keys over it.

    An argument that is None counts as not given. Raises ConfigError with every problem at once.
    """
    tree, source = merged(config, overrides, arguments)
    return config_of(tree, source)


def merged(
    config: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> tuple[Tree, str]:
    """Return what `configured` checks, and what messages call it; raises ConfigError."""
    if isinstance(config, str | Path):
        tree, source = read_yaml(Path(config), advice="give a YAML file, or a mapping"), str(config)
    else:
        tree, source = Tree(deepcopy(dict(config or {}))), "swaptrain.train"
    if not isinstance(tree.values, dict):
        raise ConfigError(f"{source}: a config is a mapping of sections, such as model and data")
    given = {KEYS.get(name, name): value for name, value in arguments.items() if value is not None}
    for key, value in {**given, **(overrides or {})}.items():
        _set(tree, key, _plain(value))
    return tree, source


def value_of(tree: Tree, key: str) -> Any:
    """Return what is under a dotted key of values that are not checked; None: nothing."""
    found: Any = tree.values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key; what was there below it is gone."""
    keys = tuple(key.split("."))
    section: dict[str, Any] = tree.values
    for depth, name in enumerate(keys[:-1], 1):
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            above = ".".join(keys[:depth])
            raise ConfigError(f"{key}: {above} is a value, and has no keys inside")
    section[keys[-1]] = value
    for old in [old for old in tree.where if old[: len(keys)] == keys]:
        del tree.where[old]
    tree.where[keys] = "argument"


def _plain(value: Any) -> Any:
    """Return a value as YAML would hold it: paths as text, and torch's dtypes by name."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value
