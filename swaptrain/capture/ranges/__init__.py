"""Cuts what stacks experts, and embeddings, into ranges of rows, between which a cut may lie.

Enter at `divide.divide` and `divide.divide_evaluation`. `reads.py` says what may read a parameter
that is divided: `expert_products.py` finds the products with a stack of experts, and `lookups.py`
the lookups in an embedding; `expert_operations.py` and `lookup_operations.py` have what computes
one range.

May import `capture` and `program`. `capture.capture` knows nothing of it.
"""
