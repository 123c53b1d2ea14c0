"""Checks everything that a run would go on from, and its snapshots, without disturbing a writer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.store.check.claims import Claim, frozen_claim, live_claim, slot_claim
from swaptrain.store.check.findings import Finding, Verification
from swaptrain.store.check.needed_files import needed_claims
from swaptrain.store.check.scan import Chunk, Scanner
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.origin import read_origin
from swaptrain.store.format.root import RootRecord, damaged_buffers, lost_root, read_root
from swaptrain.store.paths import TREES, ZARR_JSON, RunPaths
from swaptrain.store.read.run_position import RunPosition, position_text, read_position
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.snapshots import Snapshot, list_snapshots

__all__ = ["Verifier", "check_run"]

_TRIES = 12
_PAUSE_S = 0.05
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def check_run(run_dir: Path) -> None:
    """Raise ConfigError for a directory in which nothing is of a run."""
    paths = RunPaths(run_dir)
    if not any(path.exists() for path in (paths.store, paths.trees, paths.config)):
        raise ConfigError(
            f"{run_dir} is no run: it has neither store/ nor config.yaml; give the run.dir of a "
            "config"
        )


class Verifier:
    """One look at a run directory.

    Nothing is locked: what does not verify is looked at again until its record has stayed the same
    over two readings of the bytes, since a commit may have come between.
    """

    def __init__(
        self,
        run_dir: Path,
        io: DirectIO,
        *,
        tree: str | None = None,
        watch: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """`tree` is what a run goes on from; None: whichever is live.

        `watch` is called with the bytes read and those that are to be read in all.
        """
        self._run_dir, self._io, self._watch = run_dir.absolute(), io, watch
        self._tree = tree
        self._paths = RunPaths(self._run_dir)
        self._root: RootRecord | None = None
        self._total = 0
        self._done: dict[Path, tuple[object, bool]] = {}
        """By slot: the stamp that was checked, and whether all was well."""
        self.result = Verification()

    def verify(self) -> Verification:
        """Look at all there is; raises ConfigError for what is no run, RunError."""
        begun = time.perf_counter()
        result = self.result
        with Scanner(self._io) as self._scanner:
            self._read_root()
            live = [self._live_claim(k, self._fingerprint) for k in self._segments("state")]
            frozen = [
                frozen_claim(self._run_dir, k, self._fingerprint) for k in self._segments("frozen")
            ]
            result.segments = len({claim.segment for claim in (*live, *frozen)})
            if self._paths.going_back.exists():
                # Its live names are those of two steps until the next start has done the rest.
                result.notes.append("the live state: the run is going back to a snapshot")
                result.position, live = "on the way back to a snapshot", []
            self._total = sum(claim.nbytes for claim in (*live, *frozen))
            self._check([*live, *frozen])
            self._check_static()
            if live:
                self._check_position()
            self._check_snapshots()
        try:
            read_origin(self._run_dir)
        except DamagedStoreError as error:
            result.notes.append(f"where the weights came from, on which nothing depends: {error}")
        self._note_unchecked()
        result.seconds = time.perf_counter() - begun
        return result

    @property
    def _fingerprint(self) -> str | None:
        return self._root.fingerprint if self._root is not None else None

    def _read_root(self) -> None:
        run_dir = self._run_dir
        check_run(run_dir)
        for _ in range(_TRIES):
            try:
                self._root = read_root(run_dir, tree=self._tree)
                break
            except DamagedStoreError as error:
                damage = error
                time.sleep(_PAUSE_S)  # a tree may have been switched between two looks
        else:
            self.result.findings.append(Finding(damage, "the root"))
            return
        if self._root is None and (lost := lost_root(run_dir)) is not None:
            self.result.findings.append(Finding(lost, "the root"))
        elif self._root is None:
            self.result.notes.append(
                "the store was never finished: only what a first start goes on from was looked at"
            )

    def _live_claim(self, segment: int, fingerprint: str | None) -> Claim:
        return live_claim(self._run_dir, segment, fingerprint, tree=self._tree)

    def _segments(self, kind: str) -> list[int]:
        """Return the segments that have state, or frozen parameters."""
        if self._root is not None:
            rows = self._root.segments
            return [r.segment for r in rows if (r.state if kind == "state" else r.frozen)]
        folder = self._paths.frozen
        if kind == "state":
            folder = self._paths.segments(self._tree)
            if not folder.exists():
                folder = self._paths.segments(TREES[0])
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())

    def _check(self, claims: Sequence[Claim]) -> None:
        """Read the chunks of claims; what is wrong in the end is a finding."""
        wrong: dict[int, list[tuple[Chunk, str]]] = {}
        for number, chunk, problem in self._scan(
            (number, chunk) for number, claim in enumerate(claims) for chunk in claim.chunks
        ):
            if problem is not None:
                wrong.setdefault(number, []).append((chunk, problem))
        for number, claim in enumerate(claims):
            found: Iterable[Finding] = ()
            if claim.damages or number in wrong:
                claim, found = self._recheck(claim, wrong.get(number, []))
            self.result.arrays += len({chunk.path.parent for chunk in claim.chunks})
            self.result.findings.extend(found)
            self._done[claim.path] = claim.stamp, not found

    def _scan(self, chunks: Iterable[tuple[int, Chunk]]) -> Iterator[tuple[int, Chunk, str | None]]:
        for number, chunk, problem in self._scanner.scan(chunks):
            self.result.chunks += 1
            self.result.nbytes += chunk.size_bytes or 0
            self._watch(self.result.nbytes, max(self._total, self.result.nbytes))
            yield number, chunk, problem

    def _recheck(
        self, claim: Claim, wrong: Sequence[tuple[Chunk, str]]
    ) -> tuple[Claim, list[Finding]]:
        """Tell damage from a commit that came between two looks; return what is there now."""
        for _ in range(_TRIES):
            if claim.record is None:
                time.sleep(_PAUSE_S)  # its slot may be written by a commit of another segment
            now = claim.again()
            if now is None:
                return claim, []
            chunks = [chunk for chunk, _ in wrong] if now.stamp == claim.stamp else list(now.chunks)
            confirmed = [
                (chunk, problem)
                for _, chunk, problem in self._scanner.scan((0, chunk) for chunk in chunks)
                if problem is not None
            ]
            if not confirmed and not now.damages:
                return now, []
            after = now.again()
            if after is not None and after.stamp == now.stamp == claim.stamp:
                return now, self._findings(now, confirmed)
            claim, wrong = now, confirmed
        what = f"{claim.title or 'state'} of segment {claim.segment}"
        self.result.notes.append(f"{what}: changes faster than it can be read")
        return claim, []

    def _findings(self, claim: Claim, wrong: Sequence[tuple[Chunk, str]]) -> list[Finding]:
        findings = [Finding(damage, claim.title, claim) for damage in claim.damages]
        for chunk, problem in wrong:
            damage = DamagedStoreError(problem, path=chunk.path).within(chunk.where)
            findings.append(Finding(damage, claim.title, claim, chunk))
        return findings

    def _check_static(self) -> None:
        """Look at the small files that no record of a slot vouches for."""
        paths = self._paths
        for directory in (paths.segments(self._tree), paths.frozen):
            if self._root is not None and directory.is_dir():
                damage = _damaged_group(directory)
                if damage is not None:
                    content = json.dumps(_GROUP).encode()
                    self.result.findings.append(Finding(damage, "group", content=content))
        if paths.buffers.is_dir():
            for damage in damaged_buffers(self._run_dir):
                self.result.findings.append(Finding(damage, "buffers"))
        elif self._root is not None and self._links_to_buffers():
            damage = DamagedStoreError("a directory of the store is missing", path=paths.buffers)
            self.result.findings.append(Finding(damage, "buffers"))

    def _links_to_buffers(self) -> bool:
        return (self._paths.hierarchy(self._tree) / self._paths.buffers.name).is_symlink()

    def _position(self) -> RunPosition | None:
        """Return where the run is, from records that stayed the same over two looks at all."""
        root, before = self._root, None
        if root is None:
            return None
        for _ in range(_TRIES):
            claims = {k: self._live_claim(k, None) for k in self._segments("state")}
            live = {k: claim.record for k, claim in claims.items() if claim.record is not None}
            if len(live) < len(claims):
                return None
            now = read_position(self._paths, root, live)
            if before == now:
                return now
            before = now
            if root.is_whole:
                root = read_root(self._run_dir, tree=self._tree) or root
        self.result.notes.append(
            "what the step in progress needs changes faster than it can be read: not checked"
        )
        return None

    def _needed(self, title: str, segment: int) -> Claim | None:
        position = self._position()
        claims = self._needed_claims(position) if position is not None else ()
        return next((c for c in claims if (c.title, c.segment) == (title, segment)), None)

    def _needed_claims(self, position: RunPosition) -> list[Claim]:
        return list(needed_claims(self._paths, position, self._needed))

    def _check_position(self) -> None:
        position = self._position()
        if position is None:
            return
        self.result.position = position_text(position)
        self.result.findings += [Finding(damage) for damage in position.damages]
        needed = self._needed_claims(position)
        self._total = self.result.nbytes + sum(claim.nbytes for claim in needed)
        self._check(needed)

    def _check_snapshots(self) -> None:
        """Read what snapshots hold beside the live slots."""
        for snapshot in list_snapshots(self._run_dir):
            title = f"snapshot of step {snapshot.step}"
            try:
                slots = dict(snapshot.slots)
                _ = snapshot.record
            except DamagedStoreError as error:
                if snapshot.path.is_dir():
                    self.result.findings.append(Finding(error, title))
                    self.result.snapshots[snapshot.step] = False
                continue
            claims = [self._snapshot_claim(title, snapshot, slot, k) for k, slot in slots.items()]
            for claim in claims:
                if claim.version not in (None, snapshot.step) and snapshot.path.is_dir():
                    text = f"a slot of the snapshot is of step {claim.version}"
                    damage = DamagedStoreError(text, segment=claim.segment, path=claim.path)
                    self.result.findings.append(Finding(damage, title, claim))
            fresh = [c for c in claims if self._done.get(c.path, (None, False))[0] != c.stamp]
            self._total = self.result.nbytes + sum(claim.nbytes for claim in fresh)
            self._check(fresh)
            if snapshot.path.is_dir():  # not dropped meanwhile
                self.result.snapshots[snapshot.step] = all(
                    self._done[c.path][1] and c.version == snapshot.step for c in claims
                )

    def _snapshot_claim(self, title: str, snapshot: Snapshot, slot: Slot, k: int) -> Claim:
        def again() -> Claim | None:
            return make() if snapshot.path.is_dir() else None

        def make() -> Claim:
            return slot_claim(title, slot, k, self._fingerprint, again)

        return make()

    def _note_unchecked(self) -> None:
        """Say what was not looked at, and why that does no harm."""
        free = [path for path in self._paths.slots.glob("*") if path not in self._done]
        notes = self.result.notes
        if free:
            notes.append(f"{len(free)} free slots: nothing believes them before they are written")
        if self._paths.spill.is_dir():
            notes.append("what else lies in spill/: a run that goes on computes it again")


def _damaged_group(directory: Path) -> DamagedStoreError | None:
    """Return what is wrong with a zarr group that has no attributes."""
    path = directory / ZARR_JSON
    try:
        if json.loads(path.read_bytes()) == _GROUP:
            return None
    except (OSError, ValueError):
        pass
    return DamagedStoreError("a group's metadata is missing or damaged", path=path)
