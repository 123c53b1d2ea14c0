"""Which class of a library a model is, what of it is trained, and what comes beside its weights.

Enter at `classes.choose_class` and `trained.trained_parameters`; `thaw` says what loading a
checkpoint trains. Weights on the disk and adapters have rooms of their own: `stored`, `adapters`.
This room may import capture, store and data, and nothing above.
"""
