"""What each rule is for: a small run that loses states without it."""

from __future__ import annotations

from tests.protocol.rules import ALL_RULES, Rule
from tests.protocol.scenarios import SMALL

__all__ = ["NEEDED_BY", "without"]

_BY_NAME = {scenario.name: scenario for scenario in SMALL}
NEEDED_BY = {
    rule: _BY_NAME[name]
    for rule, name in {
        Rule.HANDOFF: "fused, two disks",
        Rule.HANDOFF_FLUSHED: "fused, two disks",
        Rule.DOUBLE_BUFFERED_HANDOFF: "fused, tied, several readers, spilled",
        Rule.HANDOFF_WAITS: "fused, tied, several readers",
        Rule.SPILL_WAITS: "fused, tied, several readers, spilled",
        Rule.CHUNKS_FLUSHED: "fused, two disks",
        Rule.RECORD_FLUSHED: "fused, two disks",
        Rule.SWITCH_FLUSHED: "fused, two disks",
        Rule.COMMITS_IN_ORDER: "fused, two disks",
        Rule.GRADIENT_FLUSHED: "deferred, buffers, spilled",
        Rule.BUFFERS_FINISHED: "deferred, buffers, spilled",
        Rule.GRADIENT_AWAITED: "deferred, buffers, spilled",
        Rule.METRICS_FLUSHED: "trees",
        Rule.TREE_FLUSHED: "trees",
        Rule.ROOT_FLUSHED: "trees",
        Rule.VALUES_CHECKED: "values, buffers",
        Rule.FLUSH_FIRST: "fused, two disks",
        Rule.NO_RETRY: "fused, two disks",
        Rule.READ_FROM_DISK: "fused, two disks",
    }.items()
}
"""By rule."""
_PIPELINED = {
    Rule.HANDOFF_WAITS,
    Rule.SPILL_WAITS,
    Rule.SWITCH_FLUSHED,
    Rule.COMMITS_IN_ORDER,
    Rule.GRADIENT_AWAITED,
}
"""What they prevent cannot come about while no segment begins before the last one is durable; they
keep the store safe by themselves, should that ever be given up for speed."""


def without(rule: Rule) -> frozenset[Rule]:
    """Return all rules but one; and but the one that would cover up for it."""
    covering = {Rule.ONE_SEGMENT} if rule in _PIPELINED else set()
    return ALL_RULES - {rule} - covering
