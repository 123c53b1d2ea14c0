"""The rules of the commit protocol; the checker leaves each out to see what it is for."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ALL_RULES", "Rule"]


class Rule(StrEnum):
    """One rule."""

    HANDOFF = "a commit writes the hand-off"
    HANDOFF_FLUSHED = "the hand-off is flushed before the switch"
    DOUBLE_BUFFERED_HANDOFF = "neighbouring readers of a value use different buffers"
    HANDOFF_WAITS = "a hand-off is written when the commit before it is durable"
    SPILL_WAITS = "a gradient is spilled when every commit before it is durable"
    CHUNKS_FLUSHED = "chunks are flushed before the switch"
    RECORD_FLUSHED = "the record is flushed before the switch"
    SWITCH_FLUSHED = "a slot is reused when the switch away from it is durable"
    COMMITS_IN_ORDER = "commits become durable one after the other"
    GRADIENT_FLUSHED = "a finished gradient is flushed before its record, that before what follows"
    BUFFERS_FINISHED = "mutated buffers are written with the finished gradient"
    GRADIENT_AWAITED = "a finished gradient is overwritten when its update is durable"
    METRICS_FLUSHED = "the line of metrics is flushed before the next step commits"
    TREE_FLUSHED = "a tree is flushed before the switch to it"
    ROOT_FLUSHED = "a tree's root is flushed before the switch to it"
    ONE_SEGMENT = "a segment's work counts when what the one before left is durable"
    VALUES_CHECKED = "values are believed by step and checksum"
    FLUSH_FIRST = "recovery flushes before it decides"
    NO_RETRY = "after an I/O error nothing is retried and nothing is switched"
    READ_FROM_DISK = "recovery reads what the disk holds, not what the kernel remembers"


ALL_RULES = frozenset(Rule)
