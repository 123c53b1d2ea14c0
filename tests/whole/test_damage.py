"""What does not verify stops a run before it computes with it, and `store.verify` says when."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import DamagedStoreError
from swaptrain.planning import roofline as floor
from swaptrain.planning.planner import Plan, Planner
from swaptrain.store.disk.direct import DirectIO
from tests.support.damaging import KINDS
from tests.support.killing import final_state, metrics_key
from tests.support.matrix import proof_but
from tests.support.runs import config_of, trained
from tests.support.serving import Server
from tests.support.stores import CODED, NO_MASTER

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 2}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 2},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 2},
}
MODES = {
    "fused": GPT,
    "clipped": {**CNN, "optimizer": {"clip_norm": 0.3}},
    "trees": {**GPT, "store": {"commit": {"every": 2}}},
    "frozen": {
        **GPT,
        "model": {"python": "tests.support.models:frozen_mlp"},
        "data": {"python": "tests.support.datasets:vectors"},
        "memory": {"segment": "1KiB"},
    },
}


def smallest_pool(patch: pytest.MonkeyPatch) -> None:
    """Let slabs be for one instruction only, so that nearly all is spilled and read back."""
    plan = Planner.plan

    def smallest(planner: Planner) -> Plan:
        found = plan(planner)
        return dataclasses.replace(found, pool_bytes=found.peaks.instruction_bytes)

    patch.setattr(Planner, "plan", smallest)


class Reads:
    """Counts the chunks that are read, by whether their checksum is compared."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count: Counter[bool] = Counter()
        self.files: Counter[Path] = Counter()
        original = DirectIO.read

        def read(io: DirectIO, path: Path, buffer: memoryview, **options: Any) -> Future[None]:
            compared = options.get("checksum") is not None
            self.count[compared] += 1
            self.files[path] += compared
            return original(io, path, buffer, **options)

        patch.setattr(DirectIO, "read", read)


def trained_and_counted(config: Config, monkeypatch: pytest.MonkeyPatch) -> Reads:
    with monkeypatch.context() as patch:
        smallest_pool(patch)
        patch.setattr(floor, "machine", lambda *_: None)  # whose measuring reads too
        reads = Reads(patch)
        trained(config)
    assert sum(reads.count.values()) > 50
    return reads


@pytest.mark.parametrize("mode", proof_but([mode for mode in MODES if mode != "fused"], "clipped"))
def test_always_compares_every_read(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nearly all spilled, no chunk is read without its writer's checksum."""
    store = {**MODES[mode].get("store", {}), "verify": "always"}
    reads = trained_and_counted(
        config_of(tmp_path / "run", {**MODES[mode], "store": store}), monkeypatch
    )
    assert reads.count[False] == 0


@pytest.mark.proof
def test_first_read_compares_once_and_never_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three ways give the same bits."""
    ends = []
    for verify in ("first_read", "never", "always"):
        config = config_of(tmp_path / verify, {**GPT, "store": {"verify": verify}})
        reads = trained_and_counted(config, monkeypatch)
        if verify == "first_read":
            assert set(reads.files.values()) == {0, 1}
        if verify == "never":
            assert reads.count[True] == 0
        ends.append((final_state(config.run.dir), metrics_key(config.run.dir)))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("folder", proof_but(["values", "gradients", "accumulators"], "gradients"))
def test_always_finds_what_changed_under_a_running_run(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips between this process's own write and its read stops the run."""
    smallest_pool(monkeypatch)
    tree = {**GPT, "optimizer": {"clip_norm": 0.3}, "store": {"verify": "always"}}
    config = config_of(tmp_path / "run", tree)
    original = DirectIO.read
    flipped: list[Path] = []

    def read(io: DirectIO, path: Path, *args: Any, **options: Any) -> Future[None]:
        if folder in path.parts and not flipped:
            flipped.append(path)
            content = bytearray(path.read_bytes())
            content[5] ^= 4
            path.write_bytes(content)
        return original(io, path, *args, **options)

    monkeypatch.setattr(DirectIO, "read", read)
    with pytest.raises(DamagedStoreError, match=r"a checksum is wrong") as damage:
        trained(config)
    assert damage.value.path == flipped[0]
    assert damage.value.array is not None
    assert damage.value.chunk == int(flipped[0].name)


SWEPT: dict[str, tuple[dict[str, Any], str]] = {
    "frozen": (
        {
            "model": {"python": "tests.support.models:part_frozen"},
            "data": {"python": "tests.support.datasets:vectors"},
            "memory": {"segment": "1KiB"},
            "train": {"steps": 3},
        },
        "inside",
    ),
    "clipped": ({**CNN, "train": {"steps": 3}, "optimizer": {"clip_norm": 0.3}}, "inside"),
    "tied": ({**GPT, "memory": {"segment": "32KiB"}, "train": {"steps": 3}}, "inside"),
    "trees": ({**GPT, "store": {"commit": {"every": 2}}, "train": {"steps": 4}}, "between"),
    "coded": ({**CODED, "train": {"steps": 3}}, "inside"),
    "coded, clipped": (
        {**CODED, "train": {"steps": 3}, "optimizer": {"state": "8bit", "clip_norm": 0.3}},
        "inside",
    ),
    "no master": ({**NO_MASTER, "train": {"steps": 3}}, "inside"),
}


def swept(
    server: Server, folder: Path, mode: str, kinds: list[str] | None, stride: int = 1
) -> dict[str, Any]:
    """Damage the files of an interrupted run, in a process that forks the resumed ones."""
    tree, state = SWEPT[mode]
    plan = {"folder": str(folder), "tree": tree, "pool": 1.3, "state": state}
    plan |= {"kinds": kinds, "stride": stride}
    return server.ask("tests.support.damaging", do="damage", **plan)


@pytest.mark.proof
def test_a_damaged_file_is_named_or_does_not_matter(server: Server, tmp_path: Path) -> None:
    """Every second file, in one way: exit 3 with its name, or the bits of an undamaged run."""
    report = swept(server, tmp_path, "frozen", None, stride=2)
    assert not report["wrong"]
    assert report["outcomes"]["stopped"] > 5
    assert report["outcomes"]["no matter"] > 5


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", SWEPT)
def test_no_damage_to_any_file_goes_unseen(mode: str, server: Server, tmp_path: Path) -> None:
    """Each file in every way: flipped, truncated, missing, exchanged, and of an earlier step."""
    report = swept(server, tmp_path, mode, list(KINDS))
    assert not report["wrong"]
    assert report["outcomes"]["stopped"] > 50
