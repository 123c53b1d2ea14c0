"""Sparse tensors in a forward are refused by name or by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from swaptrain.errors import CaptureError
from tests.capture.guards.members import WIDTH, Base, batches
from tests.capture.in_memory import captured_model

pytestmark = pytest.mark.trains


class SparseBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("graph", torch.eye(WIDTH).to_sparse())

    def middle(self, h: Tensor) -> Tensor:
        assert isinstance(self.graph, Tensor)
        return torch.sparse.mm(self.graph, h.t()).t()


class MadeSparse(Base):
    def middle(self, h: Tensor) -> Tensor:
        places = torch.arange(WIDTH).expand(2, WIDTH)
        graph = torch.sparse_coo_tensor(places, torch.ones(WIDTH), (WIDTH, WIDTH))
        return torch.sparse.mm(graph, h.t()).t()


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (SparseBuffer, r"^graph is a sparse_coo tensor: .*index_select"),
        (MadeSparse, r"makes a sparse_coo tensor at .*members.py:\d+, in forward"),
    ],
)
def test_it_is_refused(member: type[Base], message: str, tmp_path: Path) -> None:
    """With what to write instead."""
    with pytest.raises(CaptureError, match=message):
        captured_model(member, batches()[0], tmp_path)
