"""The verbs with which one begins, `init` and `migrate`, and their arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from swaptrain.commands.arguments import Arguments, say
from swaptrain.config.paths import expand_argument
from swaptrain.errors import ConfigError
from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["init", "init_arguments", "migrate", "migrate_arguments"]


def init(given: Arguments) -> None:
    """Write a commented config for a model directory and files, after looking at both.

    Adapters or all weights, dtype, memory, lengths and batches are chosen by what the machine has;
    the comments say why, and what a run will take. The disk is measured, for six seconds. No file
    is overwritten.
    """
    set_up_torch()
    if given.lora and given.full:
        raise ConfigError("give one of --lora and --full")
    from swaptrain.verbs.init import init

    init(
        expand_argument(given.to),
        expand_argument(given.model),
        given.data,
        template=None if given.chat_template is None else expand_argument(given.chat_template),
        method="lora" if given.lora else "full" if given.full else None,
        note=say,
    )


def init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.add_argument("to", type=Path, metavar="CONFIG", help="the YAML file to write")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="as the hub has it: config.json"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="rows (.jsonl, .json, .csv, .parquet) or text; globs are taken too",
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja, instead of the tokenizer's own"
    )
    parser.add_argument("--lora", action="store_true", help="train adapters, whatever would fit")
    parser.add_argument("--full", action="store_true", help="train all weights")


def migrate(given: Arguments) -> None:
    """Print the config that a file of Axolotl, LLaMA-Factory or TRL means here.

    What it says otherwise than that tool does, or not at all, is in comments at its end. Nothing is
    written or downloaded.
    """
    from swaptrain.migrate import migrate

    print(migrate(expand_argument(given.file), given.tool), end="")


def migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `migrate`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the YAML file of the other tool")
    parser.add_argument(
        "--from",
        dest="tool",
        metavar="TOOL",
        help="axolotl, llamafactory or trl, for which it was written; else its keys show it",
    )
