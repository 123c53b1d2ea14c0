"""An output head and its cross entropy over some rows at a time, or over some rows alone.

Enter at `loss_by_rows`, which changes a segment's graph, at `trained_rows` and at `cross_entropy`,
which are the operations. May import what `capture/` does.
"""
