"""From another tool's file to the text of a config."""

from __future__ import annotations

import re
from pathlib import Path

from swaptrain.config.commented import shown
from swaptrain.config.load import parse_config
from swaptrain.config.other_tools import elsewhere
from swaptrain.config.paths import cached_model
from swaptrain.config.yaml_text import read_yaml
from swaptrain.errors import ConfigError
from swaptrain.migrate.axolotl import add_axolotl
from swaptrain.migrate.draft import Draft
from swaptrain.migrate.given import Given
from swaptrain.migrate.llamafactory import add_llamafactory
from swaptrain.migrate.recognise import TOOLS, recognised
from swaptrain.migrate.trl import add_trl

__all__ = ["migrate"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_TOOLS = {
    "axolotl": ("Axolotl", add_axolotl),
    "llamafactory": ("LLaMA-Factory", add_llamafactory),
    "trl": ("TRL", add_trl),
}
_NEEDED = {
    "axolotl": ("base_model", "datasets"),
    "llamafactory": ("model_name_or_path", "dataset"),
    "trl": ("model_name_or_path", "dataset_name"),
}


def migrate(path: Path, tool: str | None = None) -> str:
    """Return the YAML of what a file of `tool` (None: it is recognised) means here, commented.

    Raises ConfigError for a file that cannot be read, names no model or data, or asks for what
    swaptrain does not do at all.
    """
    if tool is not None and tool not in TOOLS:
        raise ConfigError(f"--from {tool}: give one of {', '.join(TOOLS)}")
    tree = read_yaml(path, advice="give a YAML file of another tool")
    source = str(path)
    if not isinstance(tree.values, dict):
        raise ConfigError(f"{source}: it is no mapping of keys, as configs of these tools are")
    named = tool or recognised(tree.values, source)
    name, add = _TOOLS[named]
    draft = Draft(Given(source, tree), name)
    add(draft)
    model, data = _NEEDED[named]
    if draft.config.get("model.hf") is None:
        raise ConfigError(f"{source}: it names no model: give {model}")
    if not any(draft.config.get(f"data.{kind}") for kind in ("chat", "text")):
        raise ConfigError(f"{source}: it names no data: give {data}")
    _ask_for_model(draft, str(draft.config.get("model.hf")))
    text = draft.config.text(_head(draft, named, tool is not None), _tail(draft))
    parse_config(text, source=f"{source}, as a config of swaptrain")
    return text


def _head(draft: Draft, named: str, is_told: bool) -> list[str]:
    how = "as --from says" if is_told else f"recognised by its keys; else --from {named} says it"
    lines = [
        f"What {shown(draft.given.source)}, a config of {draft.tool} ({how}), means to swaptrain.",
        "",
        "python -m swaptrain plan --config THIS FILE   says what it takes.",
        "The rate of step s is the Trainer's of its step s + 1. A seed draws other numbers here.",
        "memory.host, 4GiB unless it is set, is the RAM that the run may take.",
    ]
    if draft.tool == "TRL":
        lines.append("The Trainer itself has lr 5e-5 and float32 where TRL has 2e-5 and bfloat16.")
    return [*lines, *([""] if draft.first else []), *draft.first]


def _ask_for_model(draft: Draft, name: str) -> None:
    if _HUB_NAME.fullmatch(name) and cached_model(name) == name and not Path(name).exists():
        draft.do_first(f"{name} is not in the hub's local cache.", f"hf download {name}")


def _tail(draft: Draft) -> list[str]:
    """Return what differs, and every key that nothing was made of."""
    paragraphs = []
    if draft.remarks:
        paragraphs += ["Not the same here:", *draft.remarks]
    left = draft.given.left()
    if left:
        paragraphs += ["Without a key in this config:"]
        paragraphs += [
            f"  {shown(key)}: {shown(value)} -> {_answer(key)}" for key, value in left.items()
        ]
    return paragraphs


def _answer(key: str) -> str:
    return elsewhere(key) or "unknown to swaptrain: see whether it changes what is trained"
