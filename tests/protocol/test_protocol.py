"""The commit protocol loses nothing, whatever crashes; without any one of its rules it does."""

from __future__ import annotations

import pytest

from tests.protocol.checker import Report, check
from tests.protocol.rules import ALL_RULES, Rule
from tests.protocol.scenarios import LARGE, SMALL
from tests.protocol.scripts import Scenario

BY_NAME = {scenario.name: scenario for scenario in SMALL}
NEEDED_BY = {
    Rule.HANDOFF: "fused, two disks",
    Rule.HANDOFF_FLUSHED: "fused, two disks",
    Rule.HANDOFF_IN_TURN: "fused, tied, several readers, spilled",
    Rule.HANDOFF_WAITS: "fused, tied, several readers",
    Rule.SPILL_WAITS: "fused, tied, several readers, spilled",
    Rule.CHUNKS_FLUSHED: "fused, two disks",
    Rule.RECORD_FLUSHED: "fused, two disks",
    Rule.SWITCH_FLUSHED: "fused, two disks",
    Rule.COMMITS_IN_ORDER: "fused, two disks",
    Rule.SUMS_KEPT: "waves, buffers",
    Rule.SUMS_FLUSHED: "waves, buffers",
    Rule.BUFFERS_KEPT: "waves, buffers",
    Rule.GRADIENT_AWAITED: "deferred, buffers, spilled",
    Rule.METRICS_FLUSHED: "trees",
    Rule.TREE_FLUSHED: "trees",
    Rule.ROOT_FLUSHED: "trees",
    Rule.FLUSH_FIRST: "fused, two disks",
    Rule.NO_RETRY: "fused, two disks",
    Rule.READ_FROM_DISK: "fused, two disks",
}
"""A small run in which it shows what each rule is for."""


@pytest.mark.parametrize("scenario", SMALL, ids=str)
def test_nothing_is_lost(scenario: Scenario) -> None:
    """From everything that any number of crashes and errors leave, the run goes on to its bits."""
    report = check(scenario)
    _assert_nothing_lost(report)
    assert report.recoveries > 30


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
def test_every_rule_is_needed(rule: Rule) -> None:
    """Without it there are states from which the run cannot go on: the checker can find them."""
    report = check(BY_NAME[NEEDED_BY[rule]], ALL_RULES - {rule}, limit=4000)
    assert report.lost_count > 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LARGE, ids=str)
def test_nothing_is_lost_in_larger_runs(scenario: Scenario) -> None:
    """The same with more segments, steps, waves and disks."""
    _assert_nothing_lost(check(scenario))


def _assert_nothing_lost(report: Report) -> None:
    assert report.whole
    assert not report.lost, dict(report.lost)
