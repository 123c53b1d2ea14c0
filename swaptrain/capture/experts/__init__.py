"""Cuts products with a stack of experts into ranges of experts, between which a cut may lie.

Enter at `divide.divide` and `divide.divide_evaluation`. `products.py` finds the products whose
weight can be divided, and `operations.py` has what computes one range.

May import `capture` and `program`. `capture.capture` knows nothing of it.
"""
