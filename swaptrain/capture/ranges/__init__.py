"""Cuts what stacks experts, and embeddings, into ranges of rows, between which a cut may lie.

Enter at `divide.divide` and `divide.divide_evaluation`. `divided_read.py` says what may read a
parameter that is divided. `expert_products.py` and `batch_products.py` find the products with a
stack of experts, `lookups.py` the lookups in an embedding; files of operations compute a range.

May import `capture` and `program`. `capture.capture` knows nothing of it.
"""
