"""What of a model is trained, and which adapters and frozen tables come with its weights.

Enter at `trained.trained_parameters`; `thaw` says what loading a checkpoint trains, `adapters` what
is refused beside it. This room may import capture, store and data, and never execute.
"""
