"""Every name in a run directory, once.

    RUN/
      config.yaml             config of the run, resolved
      metrics.jsonl           one line a step
      samples.jsonl           texts of `eval.samples`, one line an evaluation
      starts.jsonl            one line a start of training: machine, versions, forecast
      trace.json              times of the instructions of a few steps, with run.trace
      memory.json             what held memory during the last step, with run.memory
      report.html             charts of the run, made by `report`
      tensorboard/            event files of TensorBoard, with train.report_to
      trackio                 name of the run in trackio, with train.report_to
      lock                    pid, host and boot id of the process that trains
      id                      tells this run's slots on other disks from those of other runs
      export.request          held by an exporter that waits for the end of a step
      measured.json           what a start measured of the model, for the next one
      last-machine.json       machine of the last start, if it is not that of the creation
      initial-weights.json    checkpoint that the run began from, if it did
      going-back.json         step to go back to, during --from-step
      starting-over           mark of a directory that is being emptied, during --fresh
      speed.tmp, speed.record written during a measurement of the disk
      data/train.json         files of the training data; data/eval.json those of the held-out data
      data/DIGEST/            tokens of a text, without data.cache
      store/                  zarr hierarchy of the live state, or a link to one of the trees
        zarr.json             record of the root
        segments/NNN          live name of a segment: a link to its slot
        frozen, buffers       links to the groups of static/
      trees/a, trees/b        two hierarchies like store/, with the unit step
      slots/ID/               one copy of one segment's state, or a link to it on another disk
        zarr.json             record of the slot
        ARRAY/zarr.json       metadata of an array, beside its chunks ARRAY/c/N
      static/frozen/NNN/      frozen parameters of a segment, like a slot
      static/buffers/         buffers that no step changes
      spill/                  objects of the step in progress; deleted at the end of the run
        values/NAME, evaluated/NAME, gradients/NAME, saved/NNN, accumulators/NNN, buffers/NNN
        finished/NNN          record.json of a finished gradient, and the buffers of its step
        journal               which rows of values/ and buffers/ can be believed
      rank-NNN/               run directory of a rank, where several train together, or a link to
                              DIR/swaptrain-ranks/RUN/rank-NNN; then RUN has nothing else
      joined/                 run directory of links, of what all ranks have
      reshard.tmp             ranks that are laid out anew; reshard.ready, once they are whole, and
                              reshard.moving, once those of before are in reshard.old
      evaluation/             a run directory of links, of the step that `eval` looks at
      snapshots/STEP/         earlier step: zarr.json, its record, and links NNN to slots

NAME.tmp and NAME.next are files and links before their rename to NAME.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ASIDE", "LINKS", "NEXT", "POOL_LINK", "SPEED_PROBE", "SPEED_RECORD", "TREES"]
__all__ += ["ZARR_JSON", "RunPaths", "SpillFolder", "link_text", "other_tree", "rank_dir"]
__all__ += ["rank_dirs", "rank_links", "rank_of", "segment_name", "slot_name", "snapshot_name"]

ZARR_JSON = "zarr.json"
"""Metadata of a zarr group or array; of the root, a slot and a snapshot it is the record."""

TREES = ("a", "b")
"""The two trees of a store with the unit `step`: one is live, the other one is being written."""

ASIDE = ".tmp"
"""End of the name of a file, or of a snapshot, before its rename."""

NEXT = ".next"
"""End of the name of a link before its rename."""

SPEED_PROBE = "speed.tmp"
"""Read and written to measure a disk: in the run directory, or in one of `store.paths`."""

SPEED_RECORD = "speed.record"
"""Written to measure the cost of a commit, beside `SPEED_PROBE`."""

SpillFolder = Literal[
    "values", "evaluated", "saved", "gradients", "accumulators", "buffers", "finished"
]
"""Folders of arrays in `RUN/spill`."""

_SLOT = r"[0-9a-f]{8}-[0-9]{3,9}"
"""Name of a slot: the digest of its shape class, and a number."""

_RANK = "rank-"

_LOOKED_AT = r"(evaluation/)?"

LINKS = (
    (_LOOKED_AT + r"store(\.next)?", r"trees/[ab]"),
    (_LOOKED_AT + r"store/segments/[0-9]{3,9}(\.next)?", rf"\.\./\.\./slots/{_SLOT}"),
    (r"store/(frozen|buffers)(\.next)?", r"\.\./static/(frozen|buffers)"),
    (
        _LOOKED_AT + r"trees/[ab]/segments/[0-9]{3,9}(\.next)?",
        rf"\.\./\.\./\.\./slots/{_SLOT}",
    ),
    (r"snapshots/[0-9]{8,}(\.tmp)?/[0-9]{3,9}", rf"\.\./\.\./slots/{_SLOT}"),
    (r"trees/[ab]/(frozen|buffers)(\.next)?", r"\.\./\.\./static/(frozen|buffers)"),
)
"""Patterns of the links inside a run directory, and of their targets."""

POOL_LINK = rf"slots/{_SLOT}(\.next)?"
"""Pattern of the only link that leads out of it: to a slot on another disk."""


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run directory; none of them has to exist."""

    run_dir: Path

    @property
    def config(self) -> Path:
        """Config of the run, resolved."""
        return self.run_dir / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.run_dir / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Texts of `eval.samples`, one line an evaluation."""
        return self.run_dir / "samples.jsonl"

    @property
    def starts(self) -> Path:
        """One line a start of training: what ran where, and the forecast of its steps."""
        return self.run_dir / "starts.jsonl"

    @property
    def trace(self) -> Path:
        """Times of instructions, with run.trace."""
        return self.run_dir / "trace.json"

    @property
    def memory(self) -> Path:
        """What held memory, with run.memory."""
        return self.run_dir / "memory.json"

    @property
    def report(self) -> Path:
        """Charts of the run, made by `report`."""
        return self.run_dir / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files, with train.report_to."""
        return self.run_dir / "tensorboard"

    @property
    def trackio(self) -> Path:
        """Name of the run in trackio, with train.report_to."""
        return self.run_dir / "trackio"

    @property
    def lock(self) -> Path:
        """Lock of the process that trains."""
        return self.run_dir / "lock"

    @property
    def run_id(self) -> Path:
        """Random text that stays with the run where it is moved."""
        return self.run_dir / "id"

    @property
    def export_request(self) -> Path:
        """Lock of a process that exports."""
        return self.run_dir / "export.request"

    @property
    def measured(self) -> Path:
        """What a start measured of the model, for the next one."""
        return self.run_dir / "measured.json"

    @property
    def last_machine(self) -> Path:
        """Machine of the last start, if it is not that of the creation."""
        return self.run_dir / "last-machine.json"

    @property
    def initial_weights(self) -> Path:
        """Files of the checkpoint that the run began from."""
        return self.run_dir / "initial-weights.json"

    @property
    def going_back(self) -> Path:
        """Record of the step to go back to, during --from-step: the next start completes it."""
        return self.run_dir / "going-back.json"

    @property
    def starting_over(self) -> Path:
        """Mark of a directory that is being emptied: the next start completes it."""
        return self.run_dir / "starting-over"

    @property
    def data(self) -> Path:
        """Tokens of the run's text."""
        return self.run_dir / "data"

    @property
    def train_data(self) -> Path:
        """Record of the training data."""
        return self.data / "train.json"

    @property
    def eval_data(self) -> Path:
        """Record of the held-out data."""
        return self.data / "eval.json"

    @property
    def store(self) -> Path:
        """Zarr hierarchy of the live state; with the unit `step` a link to a tree."""
        return self.run_dir / "store"

    @property
    def trees(self) -> Path:
        """Directory of the two trees of a store with the unit `step`."""
        return self.run_dir / "trees"

    def live_tree(self) -> str | None:
        """Return the name of the live tree; None where the store is no link to one."""
        return self.store.readlink().name if self.store.is_symlink() else None

    def hierarchy(self, tree: str | None = None) -> Path:
        """Return one of the two trees, or the live hierarchy."""
        return self.store if tree is None else self.trees / tree

    def root_record(self, tree: str | None = None) -> Path:
        """Return the record of the root: written last at creation, read first afterwards."""
        return self.hierarchy(tree) / ZARR_JSON

    def segments(self, tree: str | None = None) -> Path:
        """Return the directory of the live names."""
        return self.hierarchy(tree) / "segments"

    def live_link(self, segment: int, tree: str | None = None) -> Path:
        """Return a segment's live name, a link to its slot."""
        return self.segments(tree) / segment_name(segment)

    @property
    def slots(self) -> Path:
        """Directory of all slots: live, held by snapshots, and free."""
        return self.run_dir / "slots"

    def slot(self, name: str) -> Path:
        """Return a slot."""
        return self.slots / name

    @property
    def static(self) -> Path:
        """State that no step changes; every hierarchy has links to its groups."""
        return self.run_dir / "static"

    def static_group(self, name: str) -> Path:
        """Return a group of `static`."""
        return self.static / name

    @property
    def frozen(self) -> Path:
        """Group of the frozen parameters."""
        return self.static / "frozen"

    def frozen_slot(self, segment: int) -> Path:
        """Return the frozen parameters of a segment."""
        return self.frozen / segment_name(segment)

    @property
    def buffers(self) -> Path:
        """Group of the buffers that no step changes."""
        return self.static / "buffers"

    @property
    def spill(self) -> Path:
        """Objects of the step in progress; not there once the run is finished."""
        return self.run_dir / "spill"

    @property
    def journal(self) -> Path:
        """Journal of the spilled values and buffers."""
        return self.spill / "journal"

    def spill_folder(self, folder: SpillFolder) -> Path:
        """Return a folder of `spill`."""
        return self.spill / folder

    def spilled(self, folder: SpillFolder, name: str | int) -> Path:
        """Return the array of that name, or the arrays of that segment."""
        return self.spill / folder / (segment_name(name) if isinstance(name, int) else name)

    def gradient_record(self, segment: int) -> Path:
        """Return the record of a segment's finished gradient."""
        return self.spilled("finished", segment) / "record.json"

    @property
    def snapshots(self) -> Path:
        """Directory of the snapshots; there once the first one was made."""
        return self.run_dir / "snapshots"

    def snapshot(self, step: int) -> Path:
        """Return the snapshot of a step."""
        return self.snapshots / snapshot_name(step)

    @property
    def evaluation(self) -> Path:
        """Run directory of links, of the step that is looked at; there while that lasts."""
        return self.run_dir / "evaluation"

    @property
    def joined(self) -> Path:
        """Run directory of links, of what all ranks have together; there while that lasts."""
        return self.run_dir / "joined"

    @property
    def resharded(self) -> Path:
        """Directory of ranks, or of one run, that are being laid out anew."""
        return self.run_dir / "reshard.tmp"

    @property
    def reshard_ready(self) -> Path:
        """What `resharded` is called once it is whole: from then on it is the run."""
        return self.run_dir / "reshard.ready"

    @property
    def reshard_moving(self) -> Path:
        """What that is called once the ranks of before are in `reshard_old`."""
        return self.run_dir / "reshard.moving"

    @property
    def reshard_old(self) -> Path:
        """Directory of the ranks of before."""
        return self.run_dir / "reshard.old"

    def is_being_resharded(self) -> bool:
        """Whether a reshard was cut short that has to be completed."""
        return self.reshard_ready.exists() or self.reshard_moving.exists()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Directories that go when the run is started over: all but that of the data."""
        state = self.spill, self.slots, self.snapshots, self.static, self.trees, self.store
        return *state, self.tensorboard, self.evaluation

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that go when the run is started over."""
        return (
            *(self.metrics, self.samples, self.trace, self.memory, self.trackio, self.config),
            *(self.starts, self.report),
            *(self.last_machine, self.measured, self.going_back, self.initial_weights),
        )

    @property
    def others(self) -> tuple[Path, ...]:
        """Files that stay when the run is started over, and names before a rename."""
        marks = self.run_id, self.starting_over
        return (
            self.store.with_name(self.store.name + NEXT),
            *(path.with_name(path.name + ASIDE) for path in (*self.files, *marks)),
            *(self.lock, self.run_id, self.export_request),
            *(self.run_dir / SPEED_PROBE, self.run_dir / SPEED_RECORD),
        )


def other_tree(live: str | None) -> str:
    """Return the name of the tree that is not live: tree a where neither is."""
    return TREES[1] if live == TREES[0] else TREES[0]


def rank_dir(run_dir: Path, rank: int) -> Path:
    """Return the directory of a rank, which is a run directory of its own."""
    return run_dir / f"{_RANK}{rank:03d}"


def rank_dirs(run_dir: Path) -> list[Path]:
    """Return the directories of ranks that a run directory has, in their order."""
    return sorted(path for path in run_dir.glob(f"{_RANK}[0-9][0-9][0-9]") if path.is_dir())


def rank_links(run_dir: Path) -> list[Path]:
    """Return those of them that are links to other disks, also to disks that are not there."""
    return sorted(p for p in run_dir.glob(f"{_RANK}[0-9][0-9][0-9]") if p.is_symlink())


def rank_of(directory: Path) -> int:
    """Return the rank that a directory of `rank_dirs` is of."""
    return int(directory.name.removeprefix(_RANK))


def link_text(link: Path, target: Path) -> str:
    """Return the relative text of a link to a path in the same run directory."""
    return os.path.relpath(target, link.parent)


def slot_name(shape_class: str, number: int) -> str:
    """Return the name of a slot."""
    return f"{shape_class}-{number:03d}"


def snapshot_name(step: int) -> str:
    """Return the name of the snapshot of a step; names are in the order of the steps."""
    return f"{step:08d}"


def segment_name(segment: int) -> str:
    """Return the name of a segment: of a link to its slot, and of a folder of its arrays."""
    return f"{segment:03d}"
