"""Signals: the first one stops where nothing is lost, the second at once; no bit changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.matrix import proof_but
from tests.support.serving import Server
from tests.whole.test_kill import CLIPPED, EVALUATED, GPT, MODES, TREES

pytestmark = pytest.mark.trains

MODES = {**MODES, "trees-clipped-evaluated": {**GPT, **TREES, **CLIPPED, **EVALUATED}}


def ask(server: Server, folder: Path, mode: str, **plan: Any) -> dict[str, Any]:
    """Have a mode's job stopped, or exported from."""
    plan = {"folder": str(folder), "tree": MODES[mode], "pool": 1.3, **plan}
    return server.ask("tests.support.stopping", **plan)


def stops(server: Server, folder: Path, mode: str, positions: list[int]) -> list[dict[str, Any]]:
    """Stop and resume a run of each position; return what came of it."""
    report = ask(server, folder, mode, do="stops", positions=positions)
    assert "stops" in report, report
    found: list[dict[str, Any]] = report["stops"]
    for row in found:
        assert row["wrong"] is None
        assert row["code"] in (130, 143), row
        assert re.match(r"stopping after (segment \d+/\d+|step \d)", row["said"]), row
        assert row["said"].count("press again to stop at once\n") == 1
    return found


@pytest.mark.parametrize(
    ("mode", "positions"),
    proof_but(
        [("clipped", [79, 160]), ("trees-clipped-evaluated", [141, 217])],
        whole=[("clipped", [79, 160])],
    ),
    ids=["clipped", "trees"],
)
def test_a_signal_changes_no_bit(
    mode: str, positions: list[int], server: Server, tmp_path: Path
) -> None:
    """Stopped at an instruction and resumed, a run ends as if it had never been stopped."""
    stops(server, tmp_path, mode, positions)


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["batch-norm-clipped", "trees", "trees-clipped-evaluated"])
def test_an_export_at_every_step_changes_no_bit(mode: str, server: Server, tmp_path: Path) -> None:
    """Updates that come early, and commits of trees that were not planned, are the same ones."""
    assert ask(server, tmp_path, mode, do="wanted")["wrong"] is None


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
def test_no_position_of_a_signal_changes_a_bit(mode: str, server: Server, tmp_path: Path) -> None:
    """Every seventh instruction of a run; with trees each whole step of work is kept."""
    found = stops(server, tmp_path, mode, list(range(2, 240, 7)))
    if mode.startswith("trees"):
        for row in found:
            finished = re.match(r"stopping after step (\d)", row["said"])
            if finished:
                assert row["done"] == int(finished[1]), row


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from swaptrain.run.signals import StopRequest\n"
        "me = os.getpid()\n"
    )
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_second_signal_stops_at_once() -> None:
    """Also while the main thread computes in one call and cannot handle the first."""
    done = run_code(
        "import hashlib, threading\n"
        "def press():\n"
        "    for _ in range(2):\n"
        "        time.sleep(0.2)\n"
        "        os.kill(me, signal.SIGTERM)\n"
        "with StopRequest() as stop:\n"
        "    stop.doing('segment 3/9')\n"
        "    threading.Thread(target=press).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000_000)\n"  # a minute without the GIL
        "    raise SystemExit(7)\n"
    )
    assert done.returncode == 143
    assert done.stderr == "stopping after segment 3/9, press again to stop at once\n"


def test_the_two_signals_of_timeout_are_one_request() -> None:
    """`timeout` signals the process and its group: no reason to give up what the step has done."""
    done = run_code(
        "with StopRequest() as stop:\n"
        "    stop.doing('segment 3/9')\n"
        "    os.kill(me, signal.SIGTERM)\n"
        "    os.kill(me, signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "    assert stop.is_requested\n"
        "    raise SystemExit(7)\n"
    )
    assert done.returncode == 7, done.stderr


def test_before_the_first_instruction_a_signal_stops_at_once() -> None:
    """Nothing is at stake while the model is captured; nohup's SIGHUP is ignored."""
    for name, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 143)):
        done = run_code(
            "from swaptrain.errors import StoppedBySignal\n"
            "try:\n"
            "    with StopRequest():\n"
            f"        os.kill(me, signal.{name})\n"
            "        time.sleep(60)\n"
            "except StoppedBySignal as stop:\n"
            "    raise SystemExit(stop.exit_code)\n"
        )
        assert done.returncode == code, done.stderr
    done = run_code(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with StopRequest() as stop:\n"
        "    os.kill(me, signal.SIGHUP)\n"
        "    time.sleep(0.2)\n"
        "    assert not stop.is_requested\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
