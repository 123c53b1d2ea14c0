"""One step of a run as a run directory of its own, made of links: for who only looks at it.

Chunks are linked, not copied, where the file system allows it. Nothing that only looks writes to
them, so that what is done there, and what is deleted there, leaves the run as it is. Records are
copied: where the run drops a snapshot and writes its slots again, they tell its chunks from others.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.access.lock import RunLock
from swaptrain.store.disk.durable_files import replace_link, run_error
from swaptrain.store.format.root import create_root, ensure_group
from swaptrain.store.paths import TREES, RunPaths, link_text
from swaptrain.store.read.live_store import LiveStore
from swaptrain.store.read.stored_segments import stored_segments
from swaptrain.units import format_size

__all__ = ["Copier", "delete", "step_in_links"]

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Another disk (store.paths), or a file system without hard links."""


@contextmanager
def step_in_links(store: LiveStore, step: int, note: Callable[[str], None]) -> Iterator[Path]:
    """Yield the directory of `step`, whose slots `store` names; it is deleted afterwards.

    `RUN/evaluation`: a kill leaves it, and the next one replaces it. The config is the caller's to
    write. Raises RunError, also where another process has made one of the same run.
    """
    run, there = RunPaths(store.run_dir), RunPaths(RunPaths(store.run_dir).evaluation)
    lock = RunLock(there.run_dir, note=note)
    try:
        for path in there.run_dir.iterdir():
            if path != there.lock:
                delete(path)
        copier = Copier(note)
        for path in (run.data, run.buffers, run.initial_weights, run.last_machine):
            copier.bring(path, there.run_dir / path.relative_to(run.run_dir))
        tree = TREES[0] if store.root.is_whole else None
        ensure_group(there.segments(tree))
        for one in store.segments:
            if one.frozen is not None:
                copier.bring(one.frozen.path, there.frozen_slot(one.segment))
            if one.state is not None:
                copier.bring(one.state.path, there.slot(one.state.id))
                link = there.live_link(one.segment, tree)
                link.symlink_to(link_text(link, there.slot(one.state.id)))
        root = store.root
        create_root(
            there.run_dir, root.model_copy(update={"step": step}) if tree else root, tree=tree
        )
        if tree is not None:
            replace_link(there.store, link_text(there.store, there.hierarchy(tree)))
        for one in stored_segments(there.run_dir, store.root):
            if one.version not in {None, step}:
                raise DamagedStoreError("a slot was written again", segment=one.segment)
        yield there.run_dir
    except OSError as error:
        raise run_error(error, there.run_dir, "lay out the step in") from error
    finally:
        lock.close()
        delete(there.run_dir)


class Copier:
    """Brings files and directories of them to another place: as links, else as copies."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._said = note, False

    def bring(self, source: Path, target: Path) -> None:
        """Bring a file, or a directory with all that it has; nothing, where it is not there.

        Raises OSError for the first file that cannot be brought.
        """
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._bring(source, target)

    def _bring(self, source: Path, target: Path) -> None:
        if not stat.S_ISDIR(source.stat().st_mode):
            self._bring_file(str(source), str(target))
            return
        target.mkdir(exist_ok=True)
        # Not by shutil.copytree, which goes on where a disk is full, and raises an error without
        # a number.
        for inner in sorted(source.iterdir()):
            self._bring(inner, target / inner.name)

    def _bring_file(self, source: str, target: str) -> None:
        if source.endswith(".json"):
            shutil.copyfile(source, target)
            return
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._said:
                self._said = True
                size = format_size(sum(e.stat().st_size for e in os.scandir(Path(source).parent)))
                self._note(f"{source} cannot be linked: copying, {size} and what is like it")
            shutil.copyfile(source, target)


def delete(path: Path) -> None:
    """Delete a file, a link, or a directory as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
