"""Everything that is decided before a byte is written, and what a step will take.

Enter at `prepare.Prepared` (a captured model within its budgets), `planner.Planner` (cuts, layouts
and programs) and `forecast` (what makes steps shortest, and their price). `simulation` runs a step
of the real tier on a clock.

May import `data`, `machine`, `models`, `observe`, `compute`, `durable` and what lies below.
"""
