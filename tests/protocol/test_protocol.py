"""The commit protocol loses nothing, whatever crashes; without any one of its rules it does."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from swaptrain.program.forwards import recoverable
from swaptrain.program.step import StepBuilder
from tests.program.models import builders
from tests.protocol.checker import Report, check
from tests.protocol.needs import NEEDED_BY, without
from tests.protocol.rules import ALL_RULES, Rule
from tests.protocol.run import Scenario
from tests.protocol.scenarios import LARGE, SMALL

WITHOUT_STATE = "fused, readers without a commit between them"


@pytest.mark.parametrize("scenario", SMALL, ids=str)
def test_nothing_is_lost(scenario: Scenario) -> None:
    """From everything that any number of crashes and errors leave, the run goes on to its bits."""
    report = _checked(scenario)
    _assert_nothing_lost(report)
    assert report.recoveries > 20


@pytest.mark.parametrize("scenario", [s for s in SMALL if not s.is_whole], ids=str)
def test_one_segment_is_done_again(scenario: Scenario) -> None:
    """A kill repeats one segment's forward or backward, and those without state right above it.

    Two where that is what was asked for.
    """
    report = _checked(scenario)
    assert report.repeated == (2 if scenario.name == WITHOUT_STATE else scenario.lag)


def test_more_is_done_again_without_waiting() -> None:
    """With two free slots a process is three segments ahead of what is durable."""
    report = check(NEEDED_BY[Rule.HANDOFF_WAITS], ALL_RULES - {Rule.ONE_SEGMENT})
    assert report.repeated == 3
    _assert_nothing_lost(report)


@pytest.mark.parametrize("rule", list(NEEDED_BY), ids=lambda rule: rule.name.lower())
def test_every_rule_is_needed(rule: Rule) -> None:
    """Without it there are states from which the run cannot go on: the checker can find them."""
    report = check(NEEDED_BY[rule], without(rule), limit=4000)
    assert report.lost_count > 0


@pytest.mark.whole
@pytest.mark.parametrize("scenario", LARGE, ids=str)
def test_nothing_is_lost_in_larger_runs(scenario: Scenario) -> None:
    """The same with more segments, steps and disks."""
    _assert_nothing_lost(check(scenario))


@pytest.mark.whole
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    builders(),
    st.integers(1, 2),
    st.fixed_dictionaries({name: st.booleans() for name in ("alike", "spills", "flushes")}),
    st.booleans(),
)
def test_nothing_is_lost_in_drawn_runs(
    steps: StepBuilder, free_slots: int, options: dict[str, bool], values: bool
) -> None:
    """Any cut: long skips, tied and frozen parameters, segments without state."""
    values = values and len(recoverable(steps.step())) <= 4  # each may or may not be there
    scenario = Scenario("drawn", steps, 1, free_slots=free_slots, values=values, **options)
    assume(scenario.stored and len(steps.model.segments) <= 4 and steps.micro_batches <= 3)
    report = check(scenario, limit=2000)
    assert not report.lost, dict(report.lost)


def test_every_rule_is_tried() -> None:
    """Of the rules only the one about work done again is not about losing anything."""
    assert set(Rule) - set(NEEDED_BY) == {Rule.ONE_SEGMENT}


@cache
def _checked(scenario: Scenario) -> Report:
    return check(scenario)


def _assert_nothing_lost(report: Report) -> None:
    assert report.whole
    assert not report.lost, dict(report.lost)
