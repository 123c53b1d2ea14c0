"""The verb verify beside a run that drops its snapshots."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swaptrain.store.check import verify as check
from swaptrain.store.check.claims import Claim, slot_claim
from swaptrain.store.paths import RunPaths
from tests.support.runs import config_of, trained
from tests.verbs.test_verify import TREE, looked_at

pytestmark = [pytest.mark.trains, pytest.mark.proof]


def test_a_snapshot_that_is_dropped_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are written again as soon as it is gone: what they say is no damage."""
    run_dir = trained(config_of(tmp_path / "run", TREE))
    snapshot = RunPaths(run_dir).snapshot(2)

    def dropped(title: str, *given: Any, **named: Any) -> Claim:
        claim = slot_claim(title, *given, **named)
        if title != "snapshot of step 2" or claim.record is None:
            return claim
        shutil.rmtree(snapshot, ignore_errors=True)
        return replace(claim, record=claim.record.model_copy(update={"version": 3}))

    monkeypatch.setattr(check, "slot_claim", dropped)
    found = looked_at(run_dir)
    assert not snapshot.exists()
    assert not found.findings
    assert list(found.snapshots) == [4]
