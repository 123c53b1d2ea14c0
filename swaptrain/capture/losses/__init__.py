"""The terms of a captured loss: which of them are means over trained tokens, and their weights.

Enter at `terms.py`, which finds the terms in a captured graph; `counting.py` counts the trained
tokens of a micro-batch on the host, `rewriting.py` marks the terms in the code of segments, and
`weighting.py` has what that code calls. Imports `capture.trace`; knows nothing of steps, data or
memory.
"""
