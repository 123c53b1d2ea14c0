"""The verb verify: finds all that is damaged, raises no false alarm, and mends from snapshots."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swaptrain.cli import main
from swaptrain.errors import DamagedStoreError, RunError, Where
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.store.access.lock import RunLock
from swaptrain.store.check.findings import Verification
from swaptrain.store.check.scan import Chunk, Scanner
from swaptrain.store.check.verify import Verifier
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import create_root, read_root
from swaptrain.store.slots.slots import Slots
from swaptrain.verbs.train import train
from swaptrain.verbs.verify import verify_run
from tests.support.killing import final_state
from tests.support.runs import config_of, trained
from tests.support.stores import small_run

pytestmark = pytest.mark.trains

TREE: dict[str, Any] = {
    "model": {"python": "tests.support.models:part_frozen"},
    "data": {"python": "tests.support.datasets:vectors"},
    "memory": {"segment": "1KiB"},
    "train": {"steps": 4},
    "store": {"keep": {"every": 2, "last": 2}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of four steps, with snapshots of two and four."""
    return trained(config_of(tmp_path_factory.mktemp("finished") / "run", TREE))


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def looked_at(run_dir: Path) -> Verification:
    with DirectIO() as direct:
        return Verifier(run_dir, direct).verify()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


def live(run_dir: Path, segment: int) -> Path:
    """Return the path of a live slot as messages have it."""
    return run_dir / "slots" / os.readlink(run_dir / f"store/segments/{segment:03d}")[-12:]


def test_a_run_that_is_well(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, and what was read: live state, frozen parameters, snapshots, each slot once."""
    assert main(["verify", str(run_dir)]) == 0
    text = capsys.readouterr().out
    chunks = sum(1 for p in run_dir.rglob("c/*") if p.is_file() and "buffers" not in p.parts)
    assert re.search(rf"at step 4: 3 segments, \d+ arrays, {chunks} chunks, .* GB/s", text)
    assert "snapshot of step 2: whole" in text
    assert "snapshot of step 4: whole" in text
    assert "nothing is wrong" in text


def test_a_run_that_stopped_inside_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says where, as a sentence."""
    run_dir = small_run(tmp_path, "inside a step").copy()
    assert main(["verify", str(run_dir)]) == 0
    assert f"{run_dir} is inside step 1, after segment" in capsys.readouterr().out


def test_everything_that_is_wrong_is_listed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, with segment, array, chunk, file and what; then what to do; exit code 3."""
    slots = {k: live(run_dir, k) for k in (1, 3)}
    flip(slots[1] / "exp_avg" / "c" / "0")
    (slots[1] / "weights" / "c" / "0").unlink()
    os.truncate(slots[1] / "exp_avg_sq" / "c" / "0", 100)
    flip(slots[3] / "zarr.json")
    frozen = run_dir / "static" / "frozen" / "002" / "frozen"
    flip(frozen / "c" / "0")
    flip(frozen / "zarr.json")
    scale = next((run_dir / "static" / "buffers").glob("*/c/0"))
    flip(scale)
    snapshot = run_dir / "snapshots" / "00000004" / "003" / "weights" / "c" / "0"
    flip(snapshot)
    assert main(["verify", str(run_dir)]) == 3
    out, err = capsys.readouterr()
    for line in (
        f"segment 1, array exp_avg, chunk 0: {slots[1]}/exp_avg/c/0: a checksum is wrong",
        f"segment 1, array weights, chunk 0: {slots[1]}/weights/c/0: the file is missing",
        f"segment 1, array exp_avg_sq, chunk 0: {slots[1]}/exp_avg_sq/c/0: the file has 100 bytes",
        f"segment 3: {slots[3]}/zarr.json: a record does not verify",
        f"frozen, segment 2, array frozen, chunk 0: {frozen}/c/0: a checksum is wrong",
        f"frozen, segment 2, array frozen: {frozen}/zarr.json: ",
        f"buffers, array buffers/scale: {scale}: a checksum is wrong",
        "snapshot of step 4, segment 3, array weights, chunk 0: ",
    ):
        assert out.count(line) == 1, line
    assert err.count("\n") == 1
    assert "8 things are wrong" in err
    assert "--from-step 2 goes back" in err


def test_a_lost_root_is_no_store_that_was_never_finished(run_dir: Path) -> None:
    """Without it the run would be created anew, over the state of its steps."""
    (run_dir / "store" / "zarr.json").unlink()
    before = final_state(run_dir)
    with pytest.raises(DamagedStoreError, match="root's record is missing"):
        train(config_of(run_dir, {**TREE, "train": {"steps": 5}}))
    assert final_state(run_dir) == before
    assert [str(f.damage.path) for f in looked_at(run_dir).findings] == [
        str(run_dir / "store" / "zarr.json")
    ]


def test_a_message_says_what_can_be_done(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training over a damaged chunk names it, verify, the snapshots, and exits with 3."""
    path = live(run_dir, 1) / "exp_avg" / "c" / "0"
    flip(path)
    config_of(run_dir, {**TREE, "train": {"steps": 5}})
    assert main(["--config", str(run_dir.with_suffix(".yaml"))]) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"segment 1, array exp_avg, chunk 0, file {path}" in message
    assert f"verify {run_dir}` lists" in message
    assert "--from-step 4" in message


def test_repair_restores_what_a_snapshot_has(run_dir: Path) -> None:
    """Chunks, a record and metadata, of the live state and of the snapshot: all bits are back."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    slot = live(run_dir, 1)
    flip(slot / "weights" / "c" / "0")
    (slot / "exp_avg" / "c" / "0").unlink()
    os.truncate(slot / "exp_avg_sq" / "c" / "0", 4000)
    flip(live(run_dir, 3) / "zarr.json")
    (live(run_dir, 3) / "weights" / "zarr.json").unlink()
    (run_dir / "store" / "segments" / "zarr.json").unlink()
    flip(run_dir / "snapshots" / "00000004" / "003" / "exp_avg" / "c" / "0")
    assert main(["verify", str(run_dir), "--repair"]) == 0
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    after.pop(run_dir / "lock")
    before.pop(run_dir / "lock")
    assert after == before


def test_a_record_that_was_exchanged_is_damage_like_any_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each chunk that it is not true of is named, nothing is written, and a snapshot helps."""
    before = final_state(run_dir)
    link = run_dir / "snapshots" / "00000002" / "001"
    slots = live(run_dir, 1), run_dir / "slots" / Path(os.readlink(link)).name
    records = [slot / "zarr.json" for slot in slots]
    contents = [path.read_bytes() for path in records]
    for path, content in zip(records, reversed(contents), strict=True):
        path.write_bytes(content)
    damaged = {path: path.read_bytes() for path in (run_dir / "slots").rglob("*") if path.is_file()}
    wrong = {finding.damage.path for finding in looked_at(run_dir).findings}
    assert wrong >= {chunk for slot in slots for chunk in slot.glob("*/c/0")}
    with pytest.raises(DamagedStoreError, match="mixture") as refused:
        train(config_of(run_dir, {**TREE, "train": {"steps": 5}}))
    assert "--from-step 4 goes back" in "".join(refused.value.__notes__)
    assert main(["verify", str(run_dir), "--repair"]) == 3
    out, err = capsys.readouterr()
    assert "restored /" not in out
    assert "--from-step 4 goes back to a snapshot that verifies whole" in err
    assert {path: path.read_bytes() for path in damaged} == damaged
    train(config_of(run_dir, TREE), from_step=4)
    assert final_state(run_dir) == before


def test_a_record_of_frozen_parameters_is_no_states(tmp_path: Path) -> None:
    """Of the same segment, and whole: what it names is not there, and is not what is damaged."""
    tree = {
        "model": {"python": "tests.support.models:convolutional"},
        "data": {"python": "tests.support.datasets:image_labels"},
        "memory": {"segment": "4KiB"},
        "train": {"steps": 2},
    }
    run_dir = trained(config_of(tmp_path / "run", tree))
    frozen = next((run_dir / "static" / "frozen").glob("*/zarr.json"))
    record = live(run_dir, int(frozen.parent.name)) / "zarr.json"
    contents = record.read_bytes(), frozen.read_bytes()
    record.write_bytes(contents[1])
    frozen.write_bytes(contents[0])
    findings = looked_at(run_dir).findings
    assert {finding.damage.path for finding in findings} == {record, frozen}
    with pytest.raises(DamagedStoreError, match="names none of the arrays beside it") as refused:
        train(config_of(run_dir, {**tree, "train": {"steps": 3}}))
    assert refused.value.path in {record, frozen}


def test_a_slot_that_was_overwritten_is_mended_chunk_by_chunk(run_dir: Path) -> None:
    """Its record is of the step that the other live slots are of, so it is believed."""
    before = final_state(run_dir)
    chunks = list(live(run_dir, 1).glob("*/c/0"))
    for path in chunks:
        flip(path)
    assert {finding.damage.path for finding in looked_at(run_dir).findings} == set(chunks)
    assert main(["verify", str(run_dir), "--repair"]) == 0
    assert final_state(run_dir) == before


@pytest.mark.parametrize("copy", ["whole", "damaged", "alike in one chunk"])
def test_chunks_of_a_slot_with_another_steps_record_are_not_overwritten(
    run_dir: Path, copy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be right: what wrote the record need not have written them."""
    train(config_of(run_dir, {**TREE, "train": {"steps": 5}}))
    slot = live(run_dir, 1)
    link = run_dir / "snapshots" / "00000004" / "001"
    older = run_dir / "slots" / Path(os.readlink(link)).name
    (slot / "zarr.json").write_bytes((older / "zarr.json").read_bytes())
    if copy == "damaged":
        flip(older / "weights" / "c" / "0")
    if copy == "alike in one chunk":
        shutil.copyfile(older / "exp_avg" / "c" / "0", slot / "exp_avg" / "c" / "0")
    before = {path: path.read_bytes() for path in slot.glob("*/c/0")}
    assert main(["verify", str(run_dir), "--repair"]) == 3
    out, _ = capsys.readouterr()
    assert "no other copy: segment 1" in out
    assert "restored /" not in out
    assert {path: path.read_bytes() for path in before} == before


def test_a_record_of_another_step_is_not_taken_over(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where it is true of all chunks: the rest of the live state is not of that step."""
    train(config_of(run_dir, {**TREE, "train": {"steps": 5}}))
    slot = live(run_dir, 1)
    link = run_dir / "snapshots" / "00000004" / "001"
    older = run_dir / "slots" / Path(os.readlink(link)).name
    for path in older.glob("*/c/0"):
        shutil.copyfile(path, slot / path.relative_to(older))
    flip(slot / "zarr.json")
    assert main(["verify", str(run_dir), "--repair"]) == 3
    assert "restored /" not in capsys.readouterr().out


def test_chunks_without_a_copy_keep_no_others_from_being_mended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a slot whose every chunk is wrong, each is known by its own checksum."""
    slot, kept = live(run_dir, 1), run_dir / "snapshots" / "00000004" / "001"
    for path in (*slot.glob("*/c/0"), kept / "weights" / "c" / "0"):
        flip(path)
    assert main(["verify", str(run_dir), "--repair"]) == 3
    assert capsys.readouterr().out.count("restored ") == 2
    wrong = {str(finding.damage.path) for finding in looked_at(run_dir).findings}
    assert {Path(path).parts[-3] for path in wrong} == {"weights"}


def test_repair_ends_where_every_slot_is_another_models(run_dir: Path) -> None:
    """The records are whole, and true of their chunks, but the root says another model."""
    root = read_root(run_dir)
    assert root is not None
    create_root(run_dir, root.model_copy(update={"fingerprint": "another"}))
    before = {path: path.read_bytes() for path in run_dir.glob("slots/*/zarr.json")}
    assert main(["verify", str(run_dir), "--repair"]) == 3
    assert {path: path.read_bytes() for path in before} == before


def test_repair_says_what_it_cannot_do_and_where_to_go_back_to(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk that is damaged in both copies, and frozen parameters, have no other copy."""
    before = looked_at(run_dir)
    assert not before.findings
    for path in (live(run_dir, 1), run_dir / "snapshots" / "00000004" / "001"):
        flip(path / "weights" / "c" / "0")
    flip(run_dir / "static" / "frozen" / "002" / "frozen" / "c" / "0")
    flip(live(run_dir, 3) / "weights" / "c" / "0")
    assert main(["verify", str(run_dir), "--repair"]) == 3
    out, err = capsys.readouterr()
    assert out.count("no other copy: ") == 3
    assert out.count("restored ") == 1
    assert "--from-step 2 goes back to a snapshot that verifies whole" in err
    with RunLock(run_dir), pytest.raises(RunError, match="in use"):
        verify_run(run_dir, mend=True, console=Console(file=io.StringIO()))


@pytest.mark.proof
def test_a_running_run_raises_no_false_alarm(tmp_path: Path) -> None:
    """Slots switch, hand-offs and snapshots come and go while all of it is read again and again."""
    tree = {**TREE, "train": {"steps": 25}, "store": {"keep": {"every": 5, "last": 1}}}
    config_of(tmp_path / "run", {**tree, "data": {**tree["data"], "micro_batches": 1}})
    command = [sys.executable, "-m", "swaptrain", "--config", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        looks, findings, versions = 0, [], set()
        while process.poll() is None:
            if (tmp_path / "run" / "store" / "zarr.json").exists():
                result = looked_at(tmp_path / "run")
                findings += [str(finding) for finding in result.findings]
                versions.add(result.position)
                looks += 1
                time.sleep(0.05)  # the cores are the trainer's
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    assert not findings
    assert looks > 3
    assert len(versions) > 1


def test_a_slot_that_is_switched_while_it_is_read_is_read_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes become those of a later commit; the record then names other ones."""
    slots = Slots(run_dir)
    slot, other = live(run_dir, 1), run_dir / "slots" / (live(run_dir, 1).name[:-3] + "099")
    shutil.copytree(slot, other)
    original = Scanner.problem
    switched = False

    def problem(scanner: Scanner, chunk: Chunk) -> str | None:
        nonlocal switched
        if not switched and chunk.path.is_relative_to(slot):
            switched = True
            slots.switch(1, type(slots.live(1))(other))
            for path in (slot / "zarr.json", *slot.glob("*/c/*")):
                flip(path)
        return original(scanner, chunk)

    monkeypatch.setattr(Scanner, "problem", problem)
    result = looked_at(run_dir)
    assert switched
    assert not [str(f) for f in result.findings if "snapshot" not in f.title]


def test_memory_does_not_grow_with_the_chunk(tmp_path: Path) -> None:
    """A chunk of 1 GiB is hashed in pieces."""
    path = tmp_path / "chunk"
    with path.open("wb") as file:
        file.truncate(2**30)
    with DirectIO() as direct, Scanner(direct) as scanner:
        reset_peak()
        before = resident_bytes()
        problem = scanner.problem(Chunk(Where(1, "weights", 0), path, 1, 2**30))
        grown = peak_resident_bytes() - before
    assert problem is not None
    assert "a checksum is wrong" in problem
    assert grown < 2**26


def test_verify_does_not_import_torch() -> None:
    """It starts at once."""
    code = "import sys, swaptrain.verbs.verify; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("what", ["nothing", "config"])
def test_what_is_no_run_is_refused_or_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty directory is no run; one whose store was never begun has nothing to check."""
    if what == "config":
        (tmp_path / "config.yaml").write_text("")
    assert main(["verify", str(tmp_path)]) == (2 if what == "nothing" else 0)
    out, err = capsys.readouterr()
    assert "is no run" in err or "never finished" in out
