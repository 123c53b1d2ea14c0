"""Guards around the capture: what a graph of operations cannot see is carried out or refused.

Enter at `forward.ForwardGuard` (around the forward while it is exported), `hooks.take_hooks` (the
hooks of parameters) and `shared.check_memory` (parameters on one memory). May import torch, numpy,
`swaptrain.errors` and `swaptrain.capture`, nothing above.
"""
