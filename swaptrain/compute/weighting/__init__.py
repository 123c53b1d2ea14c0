"""How the losses of a step's micro-batches are weighted: chosen at the start, counted by step.

Enter at `choice.py` (what a config and a captured model come to) and `counts.py` (the counts of one
step); `plain.py` is the same for the plain loop of `swaptrain.reference`. Imports `capture`, `data`
and `config`; the runner and the executor are handed what is made here.
"""
