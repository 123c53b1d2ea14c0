"""The model in evaluation mode: a graph of its own beside the one that is trained.

Enter at `graph.capture_evaluation`, which exports `module.eval()`, and at
`slices.slice_evaluations`, which cuts that graph for the training's segments. This room may import
`program` and the rest of `capture`, except for `capture.capture`, which imports it.
"""
