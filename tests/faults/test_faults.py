"""Whatever a disk refuses, whenever: one message, a documented exit, the same bits later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import MODES
from tests.support.matrix import proof_but
from tests.support.serving import Server

pytestmark = pytest.mark.trains

_SPREAD = 12
"""Faults per mode and start in the proof; `-m whole` has all of them."""


def _ask(server: Server, folder: Path, mode: str, start: str, **more: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {"do": "sweep", "folder": str(folder), "tree": MODES[mode], "pool": 1.3}
    return server.ask("tests.faults.sweeping", **{**plan, "from": start, **more})


@pytest.mark.parametrize(
    ("mode", "start"),
    proof_but(
        [
            *(("fused", "nothing"), ("clipped", "interrupted"), ("trees", "nothing")),
            *(("parts", "interrupted"), ("parts-8bit", "nothing"), ("float16", "interrupted")),
            *(("8bit-clipped", "interrupted"), ("bfloat16-state", "nothing")),
            ("no-master", "interrupted"),
        ],
        ("clipped", "interrupted"),
        whole=[
            *(("trees", "nothing"), ("parts-8bit", "nothing"), ("float16", "interrupted")),
            *(("fused", "nothing"), ("8bit-clipped", "interrupted")),
            ("bfloat16-state", "nothing"),
        ],
    ),
)
def test_a_fault_ends_in_one_message_and_the_run_goes_on_to_the_same_bits(
    mode: str, start: str, server: Server, tmp_path: Path
) -> None:
    """A spread over all operations of a run: creation, training, the end, recovery."""
    report = _ask(server, tmp_path, mode, start, count=_SPREAD)
    assert not report["wrong"]
    assert sum(report["tally"].values()) == _SPREAD


@pytest.mark.proof
def test_slow_operations_change_nothing(server: Server, tmp_path: Path) -> None:
    """Every operation takes another few milliseconds: the order of the commits stays."""
    report = _ask(server, tmp_path, "fused", "nothing", do="delay", delay_s=0.0005)
    assert not report["wrong"]


@pytest.mark.whole
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", ["nothing", "interrupted"])
@pytest.mark.parametrize("mode", MODES)
def test_every_operation_may_fail(mode: str, start: str, server: Server, tmp_path: Path) -> None:
    """Not a spread: each operation of a small run, and of one that was killed in the middle."""
    tree = {**MODES[mode], "store": {**MODES[mode].get("store", {}), "verify": "always"}}
    report = _ask(server, tmp_path, mode, start, tree=tree, count=0, flips=True, show=100)
    print(f"{mode}, {start}: {report.get('faults')} faults, {report.get('tally')}")
    assert not report["wrong"]
