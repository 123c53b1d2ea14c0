"""Refuses tensors that have no memory of their own to cut, store and recompute: sparse ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from swaptrain.capture.guards.hidden import own_lines
from swaptrain.errors import CaptureError

__all__ = ["refuse_sparse"]


def refuse_sparse(node: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError where a node of a captured graph gives a tensor that is not strided."""
    for tensor in tensors:
        if tensor.layout is torch.strided:
            continue
        layout = str(tensor.layout).removeprefix("torch.")
        if node.op == "placeholder":
            raise CaptureError(
                f"{node.name} of the data's items is a {layout} tensor: give it dense (.to_dense())"
            )
        if node.op == "get_attr":
            raise CaptureError(
                f"{str(node.target).removeprefix('model.')} is a {layout} tensor: only dense ones "
                "are stored. Keep it dense (.to_dense()), or its indices and values as two "
                "buffers, and write the product with index_select and index_add"
            )
        lines = own_lines(node)
        where = f" at {lines[-1]}" if lines else ""
        raise CaptureError(
            f"the forward makes a {layout} tensor{where} ({node.target}): only dense ones pass "
            "from operation to operation. Write it with dense operations, such as index_select "
            "and index_add"
        )
