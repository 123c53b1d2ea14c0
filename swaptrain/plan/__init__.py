"""Everything that is decided before a byte is written, and what a step will take.

Enter at `prepare.Prepared` (a captured model within its budgets), `planner.Planner` (cuts, layouts
and programs) and `choose` (which segments save activations). `simulation` runs a step of the real
tier on a clock. May import `data`, `machine`, `models`, `observe`, `compute`, `durable` and below.
"""
