"""From an nn.Module to one graph without weights, and from the graph to segments.

Enter at `capture.capture`. `export` gets the graph, `trace` learns from it, `cut` cuts it, and
`segments` makes code of each segment. The rooms inside refuse or carry out what a graph cannot see.
May import torch, `program` and `errors`.
"""
