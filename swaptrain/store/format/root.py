"""The root of a run's zarr hierarchy: written last at creation, read first afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray
from pydantic import Field, model_validator

from swaptrain.errors import ConfigError, DamagedStoreError, Where
from swaptrain.program.quantized import QuantizedAs
from swaptrain.program.row_ranges import RangeSizes
from swaptrain.store.disk.durable_files import (
    existing_parent,
    flush_directory,
    flush_file_system,
    free_bytes,
    make_directory,
    replace_link,
    run_error,
    write_aside,
)
from swaptrain.store.disk.flush import file_system_type
from swaptrain.store.format.bfloat16 import numpy_dtype, register
from swaptrain.store.format.record import read_record
from swaptrain.store.format.schema import (
    PRINTABLE,
    AtLeastOne,
    Dtype,
    Items,
    JsonNumber,
    Name,
    Record,
    ShownText,
    Sizes,
    Whole,
)
from swaptrain.store.format.schema_static import StaticRecord, check_static_array
from swaptrain.store.paths import TREES, ZARR_JSON, RunPaths, link_text

__all__ = ["FORMAT", "AdapterRecord", "Choices", "MergeRecord", "QuantizedRecord"]
__all__ += ["RootRecord", "RootRow"]
__all__ += ["create_root", "damaged_buffers"]
__all__ += ["ensure_group", "free_bytes"]
__all__ += ["link_static", "lost_root", "read_buffers", "read_root", "refuse_tmpfs"]
__all__ += ["write_buffers"]

FORMAT = 7
"""The version of what is on disk; a store of another one is refused."""

_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


class RootRow(Record):
    """Row of the segment table."""

    segment: AtLeastOne
    module: ShownText
    """Path of the module that the segment covers, for a person; of several the first and last."""
    isomorphism: Whole
    """Segments of one number have the same graph."""
    parameters: Items[Name]
    """Names of the parameters that the segment owns; none, where another rank has it."""
    state: bool
    """Whether an update changes anything of the segment."""
    frozen: bool
    """Whether it has parameters that no update changes."""


class MergeRecord(Record):
    """A weight of the base, and the adapter that a merge adds to it, by the names of parameters."""

    weight: Name
    """In the merged model."""
    kind: Name
    """How the weight lies: linear [out, in], conv1d [in, out], embedding [rows, out]."""
    a: Name
    b: Name
    magnitude: Name | None = None
    """Of DoRA."""
    r: AtLeastOne
    alpha: JsonNumber


class QuantizedRecord(Record):
    """A weight that is stored as codes and scales."""

    form: QuantizedAs
    shape: Sizes
    dtype: Dtype
    """What it is decoded to."""


class AdapterRecord(Record):
    """Adapters on a base that stays as it is, as PEFT knows them."""

    fields: dict[str, Any]
    """Of PEFT's LoraConfig: what the modules are made with."""
    config: dict[str, Any]
    """What PEFT writes to adapter_config.json."""
    names: dict[Name, Name]
    """What PEFT's file holds: names of the model by those in it."""
    plain: dict[Name, Name | None]
    """Names in the merged model by those of the model, where they differ; null: left out."""
    untied: dict[Name, Name] | None
    """Where adapters change one of several names of a weight, so that the merged model ties none:
    what each further name in the merged model is stored under. null: there is no such weight."""
    merges: Items[MergeRecord]


class Choices(Record):
    """What was chosen at creation and holds since: the bits of the run depend on it."""

    cuts: Items[Whole]
    experts: AtLeastOne | None = None
    """Experts of a range, where stacks of experts are divided; null: they are whole."""
    rows: AtLeastOne | None = None
    """Rows of a range, where embeddings are divided; null: they are whole."""
    content: Name | None = None
    """Digest of the uncut graph and its constants."""
    thawed: Items[Name] = ()
    """Parameters that are trained though the constructor freezes them."""
    model: Name | None = None
    """Class of transformers, or the function that made the model."""
    trained: Annotated[str, Field(max_length=2**16, pattern=PRINTABLE)] | None = None
    """How much of the model is trained, for a person."""
    chunk: AtLeastOne
    """Largest chunk file, in bytes."""
    threads: Annotated[int, Field(ge=1, le=4096)]
    dtype: Dtype
    torch: Name
    """Version of torch."""
    update_device: Name
    deferred: bool = False
    """Whether the update of a segment waits for the gradients of all."""
    machine: dict[str, str] | None = None
    """Machine of the creation."""

    @property
    def ranges(self) -> RangeSizes:
        """How much a range of a parameter that is divided holds."""
        return RangeSizes(self.experts, self.rows)

    @model_validator(mode="after")
    def _rise(self) -> Self:
        if any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError(f"the cuts of the root's record do not rise: {self.cuts[:8]}")
        return self


class RootRecord(Record):
    """What holds for the life of a store."""

    title: ClassVar[str] = "the root's record"
    fingerprint: Name
    """Digest of the captured graph and of the cut."""
    segments: Annotated[Items[RootRow], Field(min_length=1)]
    """The segment table, in order."""
    commit_every: AtLeastOne
    unit: Literal["segment", "step"] = "segment"
    """What is committed together."""
    choices: Choices
    adapter: AdapterRecord | None = None
    """None: the model itself is trained."""
    quantized: dict[Name, QuantizedRecord] = Field(default_factory=dict)
    """By name: the weights that are stored as codes."""
    rank: Whole = 0
    """Of several processes that train one model: the one whose segments are here."""
    ranks: AtLeastOne = 1
    """How many there are."""
    step: Whole
    """The committed step, where the store is committed as a whole (else the slots' records say
    it)."""
    format: AtLeastOne

    @property
    def is_whole(self) -> bool:
        """Whether the state is committed as a whole, in one of two trees."""
        return self.unit == "step"

    @model_validator(mode="after")
    def _names_no_code(self) -> Self:
        """PEFT imports what these fields name, when somebody loads what an export writes."""
        written = {} if self.adapter is None else self.adapter.config
        named = [n for n in ("auto_mapping", "megatron_config") if written.get(n) is not None]
        if named:
            raise ValueError(f"the adapter's config sets {named[0]}, which names code")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.commit_every > 1 and not self.is_whole:
            raise ValueError("the root's record commits segments each few steps")
        for number, row in enumerate(self.segments, 1):
            if row.segment != number:
                raise ValueError(f"row {number} of the segment table is of segment {row.segment}")
        return self


def ensure_group(path: Path) -> None:
    """Make sure that a directory is a zarr group, durably."""
    make_directory(path)
    file = path / ZARR_JSON
    content = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    if not file.exists():
        write_aside(file, content)


def create_root(run_dir: Path, record: RootRecord, *, tree: str | None = None) -> None:
    """Write the root's zarr.json, durably: the store exists from this moment on.

    With a tree this is also how a committing step is recorded, before `Slots.switch_tree`.
    """
    path = RunPaths(run_dir).root_record(tree)
    make_directory(path.parent)
    # The names beside the root come first. A power loss that took one of them from a store with a
    # root would leave a damaged store; one without a root is created anew.
    flush_directory(path.parent)
    write_aside(path, record.encoded())
    # Then the names that lead to it, before any step is built on it. A power loss that took one of
    # them back would leave those steps without a root.
    flush_directory(path.parent.parent)
    flush_directory(run_dir)


def read_root(run_dir: Path, *, tree: str | None = None) -> RootRecord | None:
    """Return the root's record; None where the creation of the store was never finished.

    Raises DamagedStoreError when it does not verify or says what no root can say, ConfigError when
    its format is another one.
    """
    path = RunPaths(run_dir).root_record(tree)
    if not path.exists():
        return None
    attributes = read_record(path)
    number = attributes.get("format")
    if type(number) is int and number != FORMAT:
        raise ConfigError(
            f"the store {path.parent} has format {number}, this swaptrain reads "
            f"format {FORMAT}: use the version that made it, or start over with --fresh"
        )
    return RootRecord.checked(attributes, path)


def lost_root(run_dir: Path) -> DamagedStoreError | None:
    """Return what is wrong with a store whose root is not there, if a step was ever committed.

    A store without a root is one whose creation goes on, and writes the initial weights again.
    """
    paths = RunPaths(run_dir)
    directories = (paths.segments(tree) for tree in (None, *TREES))
    for link in (link for directory in directories for link in directory.glob("*")):
        try:
            version = read_record(link / ZARR_JSON)["version"] if link.is_symlink() else 0
        except DamagedStoreError:
            continue  # not written to its end
        if version > 0:
            return DamagedStoreError(
                f"the root's record is missing, but a segment is at step {version}",
                path=paths.root_record(),
            )
    return None


def write_buffers(
    run_dir: Path, buffers: Mapping[str, NDArray[Any]], *, name: str = "buffers"
) -> None:
    """Write tensors that never change as plain zarr arrays of the group `buffers`, durably.

    They lie in `RUN/static`, which every tree links to. Raises RunError.
    """
    register()
    directory = RunPaths(run_dir).static_group(name)
    make_directory(directory.parent)
    try:
        group = zarr.open_group(directory, mode="w", zarr_format=3)
        for key, value in buffers.items():
            # A copy in row-major order; ascontiguousarray would turn 0-D into 1-D.
            # All chunks are written, also of zeros: what is on the disk says how large it is.
            group.create_array(
                key,
                data=np.array(value, order="C"),
                compressors=None,
                config={"write_empty_chunks": True},
            )
        sums = {
            str(file.relative_to(directory)): xxhash.xxh3_64_intdigest(file.read_bytes())
            for file in sorted(directory.rglob("*"))
            if file.is_file() and file.parent != directory
        }
        (directory / ZARR_JSON).write_bytes(StaticRecord(checksums=sums).encoded())
    except OSError as error:
        needed_bytes = sum(value.nbytes for value in buffers.values())
        raise run_error(error, directory, "write", needed_bytes) from error
    flush_file_system(directory)
    link_static(run_dir, name)


def read_buffers(run_dir: Path, *, name: str = "buffers") -> dict[str, NDArray[Any]]:
    """Return the arrays that `write_buffers` wrote; none if it was never called.

    Raises DamagedStoreError.
    """
    register()
    directory = RunPaths(run_dir).static_group(name)
    if not directory.exists():
        return {}
    for damage in damaged_buffers(run_dir, name=name):
        raise damage
    # Every array has been checked by itself; a consolidated copy of the metadata has not.
    group = zarr.open_group(directory, mode="r", zarr_format=3, use_consolidated=False)
    return {
        key: np.asarray(array[...]).astype(numpy_dtype(str(array.metadata.to_dict()["data_type"])))
        for key, array in group.arrays()
    }


def damaged_buffers(run_dir: Path, *, name: str = "buffers") -> Iterator[DamagedStoreError]:
    """Yield what is wrong with the files that `write_buffers` wrote, by their record."""
    directory = RunPaths(run_dir).static_group(name)
    try:
        sums = StaticRecord.read(directory / ZARR_JSON).checksums
    except DamagedStoreError as error:
        yield error.within(Where(array=name))
        return
    there = {
        str(file.relative_to(directory))
        for file in directory.rglob("*")
        if file.is_file() and file.parent != directory
    }
    wrong = {Path(relative).parts[0] for relative in there ^ sums.keys()}
    for relative in sorted(there - sums.keys()):
        yield DamagedStoreError("a file has no checksum", array=name, path=directory / relative)
    for relative in sorted(sums.keys() - there):
        path = directory / relative
        yield DamagedStoreError("a file of the store is missing", array=name, path=path)
    for relative in sorted(there & sums.keys()):
        expected = sums[relative]
        file = directory / relative
        array = f"{name}/{Path(relative).parts[0]}"
        try:
            found = xxhash.xxh3_64_intdigest(file.read_bytes())
        except OSError as error:
            raise run_error(error, file, "read") from error
        if found != expected:
            wrong.add(Path(relative).parts[0])
            yield DamagedStoreError("a checksum is wrong", array=array, path=file)
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        if folder.name in wrong:
            continue
        try:
            check_static_array(folder)
        except DamagedStoreError as error:
            yield error.within(Where(array=f"{name}/{folder.name}"))


def link_static(run_dir: Path, name: str) -> None:
    """Let a group of `RUN/static` appear in the hierarchy of every tree."""
    paths = RunPaths(run_dir)
    trees = [tree for tree in map(paths.hierarchy, TREES) if tree.is_dir()] or [paths.store]
    for tree in trees:
        make_directory(tree)
        link = tree / name
        replace_link(link, link_text(link, paths.static_group(name)))


def refuse_tmpfs(path: Path) -> None:
    """Raise ConfigError when `path` lies, or would lie, on a file system that is RAM."""
    parent = existing_parent(path)
    kind = _MEMORY_FILE_SYSTEMS.get(file_system_type(parent) or 0)
    if kind is not None:
        raise ConfigError(
            f"{path} lies on {kind}, which is RAM: set run.dir (or store.paths) to a directory on "
            "an SSD"
        )
