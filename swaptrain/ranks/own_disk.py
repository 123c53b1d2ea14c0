"""The directory of a rank on a disk of its own, by `distributed.dirs`, and the link that names it.

`RUN/rank-NNN` is a link to `DIR/swaptrain-ranks/RUN/rank-NNN` then, and everything else works in
`RUN/rank-NNN`. The folder of the run has a name of its own on each disk, as with `store.paths`: a
copy of a run, or one of somebody else, does not lead into this one.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.ranks.launch import Launch
from swaptrain.store.disk.durable_files import flush_directory, make_directory, replace_link
from swaptrain.store.paths import RunPaths, rank_dir, rank_links
from swaptrain.store.slots.slot_disks import run_token
from swaptrain.units import how_many

__all__ = ["RANKS", "OwnDisk", "check_rank_links", "refuse_rank_links"]

RANKS = "swaptrain-ranks"
"""The folder on each of `distributed.dirs` that holds ranks of all runs."""


def check_rank_links(run_dir: Path) -> None:
    """Raise ConfigError where a rank's directory is a link that leads nowhere, or to another run.

    Nobody follows a link that this run has not made: raises DamagedStoreError for one in the place
    of what several ranks have together.
    """
    paths = RunPaths(run_dir)
    moved = paths.resharded, paths.reshard_ready, paths.reshard_moving, paths.reshard_old
    for path in (paths.joined, *moved):
        if path.is_symlink():
            raise DamagedStoreError(
                f"a run directory holds a link that swaptrain did not make, to "
                f"{str(path.readlink())!r}: remove it, or do not use this run",
                path=path,
            )
    for link in rank_links(run_dir):
        _check(link)


def refuse_rank_links(run_dir: Path) -> None:
    """Raise ConfigError where a rank's directory lies elsewhere: what works inside RUN alone."""
    check_rank_links(run_dir)
    for link in rank_links(run_dir):
        name, there, new = map(shlex.quote, (str(link), str(link.readlink()), f"{link}.new"))
        raise ConfigError(
            f"{link} lies on another disk (distributed.dirs), and a run is divided anew inside of "
            "its directory: bring it there, with the others (mv -T "
            f"{there} {new} && rm {name} && mv -T {new} {name})"
        )


def _check(link: Path) -> None:
    """Refuse a rank's link that is not this run's own, or leads to a disk that is not there."""
    there, token = link.readlink(), run_token(link.parent)
    own = f"{RANKS}/{token}/{link.name}"
    again = f"ln -sfn {shlex.quote(f'DIR/{own}')} {shlex.quote(str(link))}"
    if not there.is_absolute() or there.parts[-3:] != (RANKS, token, link.name):
        raise ConfigError(
            f"{link} leads to {str(there)!r}, which is not where this run has a rank: that is "
            f"called {own}. A copy of a run needs copies of its ranks in place of their links. "
            f"Where {link.parent} was moved, give the folder that name, and say so: {again}"
        )
    if not link.is_dir():
        raise ConfigError(
            f"{link} leads to {there}, which is not there: mount its disk. Where that is mounted "
            f"elsewhere: {again}. Where it is lost: rm {shlex.quote(str(link))}, and begin anew "
            "with --fresh"
        )
    _refuse_detour(there)


def _refuse_detour(there: Path) -> None:
    """Raise ConfigError where a rank's directory, or a folder that this run has made, is a link."""
    for path in (there, *there.parents[:2]):
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link, and a rank is reached by the one in the run directory alone: "
                f"put the directory itself there, which is {path.resolve()}"
            )


class OwnDisk:
    """Where the directory of this rank lies, if not in the run directory itself."""

    def __init__(self, config: Config, launch: Launch) -> None:
        self._config, self._launch = config, launch
        self._link = rank_dir(config.run.dir, launch.ranks.rank)
        self._made: list[Path] = []
        """Directories that `make` has made, from below."""
        self._has_linked = False

    def make(self) -> None:
        """Make the directory and its link, where they are missing.

        Raises ConfigError, and writes nothing, where `distributed.dirs` has no directory for this
        rank, or the rank is somewhere else; where a link leads to a disk that is not there, and so
        is not what the rank has done; where a directory holds something that no link names.
        """
        try:
            if self._link.is_symlink():
                # Those of other ranks may lead to disks of other machines.
                _check(self._link)
                if self._config.store.paths is not None:
                    raise ConfigError(
                        f"{self._link} lies on a disk of its own (distributed.dirs): leave "
                        "store.paths out, which gives all ranks the same disks"
                    )
            target = self._target()
            if target is not None:
                self._make(target)
        except (OSError, RunError) as error:
            raise ConfigError(f"distributed.dirs: {self._link} cannot be made: {error}") from error

    def withdraw(self) -> None:
        """Remove what `make` has made, if it is empty: this start ends before the run began."""
        with suppress(OSError, RunError):  # what has content stays, and its link with it
            if self._has_linked and not any(self._link.iterdir()):
                self._link.unlink()
                flush_directory(self._link.parent)
                for path in self._made:
                    path.rmdir()

    def _make(self, target: Path) -> None:
        link = self._link
        name, there = shlex.quote(str(link)), shlex.quote(str(target))
        move = f"mkdir -p {shlex.quote(str(target.parent))} && mv -T {name} {there}"
        if link.is_symlink():
            if link.resolve() != target.resolve():
                raise ConfigError(
                    f"{link} leads to {link.readlink()}, and distributed.dirs to {target}: say "
                    "where it is, or move the directory and its link"
                )
            return
        if link.exists():
            if any(slot.is_symlink() for slot in RunPaths(link).slots.glob("*")):
                raise ConfigError(
                    f"{link} has slots on store.paths: leave distributed.dirs out, and name them"
                )
            raise ConfigError(
                f"{link} lies in the run directory, and distributed.dirs says {target}: leave that "
                f"out, or move it: {move} && ln -s {there} {name}"
            )
        _refuse_detour(target)
        if target.exists() and any(target.iterdir()):
            raise ConfigError(
                f"distributed.dirs: {target} holds something, and {link} does not lead there: if "
                f"it is this run's, ln -s {there} {name}; if its run is gone, delete it"
            )
        self._made = [path for path in (target, *target.parents) if not path.exists()]
        make_directory(target)  # first: a link that leads nowhere means a disk that is not there
        make_directory(link.parent)
        replace_link(link, str(target))
        self._has_linked = True

    def _target(self) -> Path | None:
        dirs, launch, run_dir = self._config.distributed.dirs, self._launch, self._config.run.dir
        if dirs is None:
            return None
        if launch.local_rank >= len(dirs):
            raise ConfigError(
                f"distributed.dirs has {how_many(len(dirs), 'directory', 'directories')} for the "
                f"{how_many(launch.local_count, 'rank')} of this machine, and none for local rank "
                f"{launch.local_rank}: give one for each of them"
            )
        directory = dirs[launch.local_rank].resolve()
        if directory == run_dir.resolve():
            return None
        if not directory.parent.is_dir():
            raise ConfigError(
                f"distributed.dirs: {directory.parent} is no directory: mount its disk, or make it"
            )
        return rank_dir(directory / RANKS / run_token(run_dir), launch.ranks.rank)
