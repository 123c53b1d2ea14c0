"""A captured model before it is cut: one graph, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from swaptrain.capture.checks.batch_checks import BatchChecks
from swaptrain.capture.gradient_layout import is_dense
from swaptrain.capture.guards.hooks import ParameterHooks
from swaptrain.capture.losses.terms import LossTerms
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace
from swaptrain.program.model import ParameterSpec

__all__ = ["Uncut"]


@dataclass(frozen=True)
class Uncut:
    """A captured graph with its trace, before it is cut."""

    captured: fx.GraphModule
    trace: Trace
    batch: Mapping[str, torch.Tensor]
    parameters: Mapping[str, ParameterSpec]
    origins: Mapping[fx.Node, Binding]
    gradient_strides: Mapping[fx.Node, tuple[int, ...]]
    """Of the gradients that come in another layout than their value's."""
    hooks: Mapping[str, ParameterHooks]
    losses: LossTerms
    """What the loss is the sum of."""
    checks: BatchChecks

    @property
    def uncuttable(self) -> frozenset[fx.Node]:
        """Nodes whose gradient cannot be stored as it comes: expanded, or with holes."""
        return frozenset(
            node
            for node, stride in self.gradient_strides.items()
            if not is_dense(tuple(self.trace.facts[node].tensors[0].shape), stride)
        )
