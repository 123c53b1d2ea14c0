"""Readers beside a writer: they take no lock, and tell damage from a commit in between.

Enter at `live_store`, `reader` and `export_request`, the door by which an export asks a running
training for the end of a step. May import `store.slots`, `store.format`, `store.access` and
`store.disk`.
"""
