"""The steps of an open run: what executes a program, what follows each step, and its row.

Enter at `training.Training`, which goes from step to step; `executor.Executor` runs the program of
one. Imports what `run/` does, and of `run/` its signals, its resume point and its memory guard.
"""
