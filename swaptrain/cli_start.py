"""Arguments of the verbs with which one begins: `init` and `migrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from swaptrain.config.paths import expand_argument

__all__ = ["migrate", "migrate_arguments"]


def migrate(given: argparse.Namespace) -> None:
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
