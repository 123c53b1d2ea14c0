"""Compares two steps of the captured graph with plain PyTorch before a run is created.

Enter at `check.check_capture`. `eager.py` takes the steps of the plain model, `segments.py` those
of the captured segments through the Runner that trains, and `compare.py` compares them. `draws.py`
gives both the same random numbers, `float32.py` captures a bfloat16 run's model in float32,
`need.py` estimates memory and seconds.

May import `planning` and what that may, but nothing that writes to a run directory.
"""
