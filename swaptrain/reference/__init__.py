"""Plain PyTorch training of a model in memory: what swaptrain's numbers are compared with.

Enter at `train_reference`, or at `forward_backward` and `evaluate` for one step. In float32 on a
CPU, for a model without random draws, swaptrain gives these losses and weights bit for bit. In
bfloat16 the loop in `training` says what is computed: `masters` in float32, the model in their
bfloat16 halves, gradients accumulated in float32 (`losses`). swaptrain's dropout draws from
counters, not from torch's generator: with dropout the two runs differ. May import torch,
`capture`, `compute`, `generators` and `errors`.
"""

from __future__ import annotations

from swaptrain.reference.losses import evaluate, forward_backward
from swaptrain.reference.masters import Masters
from swaptrain.reference.training import ReferenceResult, train_reference

__all__ = ["Masters", "ReferenceResult", "evaluate", "forward_backward", "train_reference"]
