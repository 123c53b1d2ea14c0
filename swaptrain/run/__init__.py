"""A run directory from its lock to its end: what a start may find, and the loop that trains.

Enter at `open_run.OpenRun`, which puts a run together, at `steps`, which takes one step after
another, and at `executor.Executor`, the one loop that carries out a step's instructions. May import
`plan` and everything below it; only `verbs` imports this room.
"""
