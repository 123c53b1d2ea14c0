"""Which class of a library a model is, what of it is trained, and what comes beside its weights.

Enter at `classes.choose_class` and `trained.trained_parameters`; `thaw` says what loading a
checkpoint trains, `adapters` what is refused beside it. This room may import capture, store and
data, and nothing above.
"""
