"""A model as data, and a step as a list of instructions: pure functions, without torch or I/O.

Enter at `model.ModelSpec` (a cut model), `step.StepBuilder` (its step) and `residency` (what memory
holds at each instruction). `check` proves a program, `cost` prices it. May import `errors` and
`units` only.
"""
