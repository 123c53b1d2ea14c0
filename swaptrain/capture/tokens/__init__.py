"""Parts of a segment that treat each token by itself, over ranges of tokens (`memory.tokens`).

Enter at `divided.py`, which finds them in a captured graph, and at `rewriting.py`, which puts a
call in their place in a segment's code. May import what `capture/` has below segments.
"""
