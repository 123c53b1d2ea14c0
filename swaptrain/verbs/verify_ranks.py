"""The verb `verify` on a run of several ranks: each of them is looked at."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from swaptrain.errors import DamagedStoreError
from swaptrain.ranks.layout import rank_trees
from swaptrain.store.paths import rank_dirs
from swaptrain.verbs.verify import verify_run

__all__ = ["verify_ranks"]


def verify_ranks(run_dir: Path, *, mend: bool = False, console: Console | None = None) -> None:
    """Check the directories of all ranks of a run, each whatever is wrong with the others.

    Of each the tree that it goes on from is read, which need not be the live one. Raises
    DamagedStoreError when something is wrong, ConfigError where ranks are missing, RunError where
    one trains.
    """
    console = console or Console()
    wrong, trees = [], dict[Path, str]()
    try:
        trees = {one.directory: one.tree for one in rank_trees(run_dir)}
    except DamagedStoreError as error:
        wrong.append(str(error))
    for directory in rank_dirs(run_dir):
        try:
            verify_run(directory, mend=mend, console=console, tree=trees.get(directory))
        except DamagedStoreError as error:
            wrong.append(str(error))
    if wrong:
        raise DamagedStoreError("\n  ".join(wrong))
