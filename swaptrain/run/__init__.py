"""A run directory from its lock to its end.

Read down: `run_directory` (lock, recorded config, root), `open_run` (store, data, forecast),
`assemble` (all that trains), `steps` (a room: one step, and one instruction, after the other),
`finish`. May import every room but those that lie above it: `generate`, `reference`, `report`,
`verbs` and what imports these.
"""
