"""The commit of a step by all ranks loses nothing, whatever crashes; without any rule it does."""

from __future__ import annotations

import pytest

from tests.protocol.ranks import ALL_JOINT_RULES, JointRule, check_joint
from tests.support.matrix import proof_but


@pytest.mark.parametrize(("ranks", "steps"), proof_but([(2, 3), (3, 1)], (2, 3)))
def test_nothing_is_lost_by_several_ranks(ranks: int, steps: int) -> None:
    """From all that kills and power losses of any of them leave, the run goes on where it was."""
    report = check_joint(ranks=ranks, steps=steps)
    assert report.whole
    assert not report.lost, dict(report.lost)
    assert report.recoveries > 200
    assert report.finished > 0


@pytest.mark.parametrize("rule", JointRule, ids=lambda rule: rule.name.lower())
def test_every_joint_rule_is_needed(rule: JointRule) -> None:
    """Without it there are states from which the ranks cannot go on, or go on with less."""
    report = check_joint(ALL_JOINT_RULES - {rule}, limit=20_000)
    assert report.lost
