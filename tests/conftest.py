"""What every test gets."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.machine import speeds
from swaptrain.machine.speeds import Machine
from swaptrain.planning import prepare
from swaptrain.run.steps.training import Training
from tests.support.captures import Captures
from tests.support.machines import MACHINE
from tests.support.plain import PlainRuns
from tests.support.serving import Server

TESTS = Path(__file__).parent
_CAPTURING = {"capture", "models", "whole/test_bad_input.py", "whole/test_exactness.py"}
_CAPTURING |= {"whole/test_generality.py", "whole/test_no_code.py", "whole/test_resume.py"}
"""Tests whose subject a capture is: they make each anew."""


SLOW_CASES = frozenset((TESTS / "slow_cases.txt").read_text().splitlines())
"""Cases of two seconds and more. They run in the proof; quicker ones show the same by default.

To make the list anew, `bash scripts/test.sh proof --durations=0`. The only case of a promise stays.
"""
SLOWEST_CASES = frozenset((TESTS / "slowest_cases.txt").read_text().splitlines())
"""Cases of ten seconds and more that run by hand alone: quicker ones show the same in the proof."""


class _Test:
    """The test that runs, and whether it may train."""

    name, may_train = "", True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let slow cases run in the proof, and the slowest by hand."""
    for item in items:
        if item.nodeid in SLOW_CASES:
            item.add_marker(pytest.mark.proof)
        if item.nodeid in SLOWEST_CASES:
            item.add_marker(pytest.mark.whole)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what the markers of a test allow, before its fixtures are made."""
    _Test.name = item.nodeid
    markers = {marker.name for marker in item.iter_markers()}
    _Test.may_train = not markers.isdisjoint({"trains", "proof", "whole"})


@pytest.fixture(scope="session", autouse=True)
def quick_tests_train_nothing() -> Iterator[None]:
    """Fail a test that trains in this process and is not marked so: the quick run would slow."""
    run = Training.run

    def checked(training: Training) -> None:
        if not _Test.may_train:
            pytest.fail(f"{_Test.name} trains: mark it `trains`")
        run(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "run", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> Iterator[None]:
    """Let collections pass by what imports made, a third of the time of a small run.

    A run freezes what it captured and lets go of everything at its end: not in these processes.
    """
    importlib.import_module("transformers.modeling_utils")
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def machine_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give all runs, those of other processes too, the same figures of the processor and the disk.

    To measure them takes six seconds. The user's are left alone.
    """
    there, threads = tmp_path_factory.mktemp("cache"), torch.get_num_threads()
    measure = speeds.measure

    def known(path: Path, device: torch.device, *given: Any) -> Machine:
        return MACHINE if device.type == "cpu" else measure(path, device, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(there))
        patch.setattr(speeds, "measure", known)
        with pytest.MonkeyPatch.context() as idle:
            idle.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
            for count in {1, threads}:
                torch.set_num_threads(count)
                speeds.machine(there, torch.device("cpu"), [*MACHINE.flops_per_s], lambda _: None)
        torch.set_num_threads(threads)
        yield


@pytest.fixture(scope="session")
def plain_runs() -> PlainRuns:
    """Return what makes each run of plain PyTorch once; a worker of the session has its own."""
    return PlainRuns()


@pytest.fixture(scope="session")
def captures() -> Captures:
    """Return what captures each model once; a worker of the session has its own."""
    return Captures()


@pytest.fixture(autouse=True)
def captured_once(
    request: pytest.FixtureRequest, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let runs begin from models that were captured before: a capture takes half of a small run."""
    path = request.path.relative_to(TESTS)
    if _CAPTURING.isdisjoint({path.parts[0], str(path)}):
        monkeypatch.setattr(prepare, "build", captures.build)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Yield the process that forks runs; it is begun by the first test that asks for it."""
    server = Server()
    yield server
    server.close()
