"""Slots: the committed copies of a segment's state, and the switch that makes one of them live.

Enter at `commit.Committer` and `slots.Slots`; `recovery_rules` says what a start believes,
`snapshots` keeps slots of earlier steps. The order of writes here is docs/durability.md's, to the
letter. May import `store.format`, `store.access` and `store.disk`.
"""
