"""Moves captured code, which was traced on the CPU, to the device that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from swaptrain.capture.captured import Captured
from swaptrain.errors import CaptureError

__all__ = ["place"]


def place(captured: Captured, device: torch.device) -> Captured:
    """Return `captured` with its constants, and the tensors its code makes, on `device`.

    The graphs are changed in place: every argument that is a CPU device becomes `device`, also in
    the bodies of higher-order operations. Parameters, buffers and values are arguments of the code
    and come from wherever the caller has them.
    """
    if device.type == "cpu":
        return captured
    if captured.hooks:
        raise CaptureError(
            f"the parameter {next(iter(captured.hooks))} has a hook on its gradient, which runs on "
            f"the CPU's tensors only: set device: cpu"
        )
    seen: set[int] = set()
    evaluated = (code for graph in captured.evaluations for code in graph.codes.values())
    for module in (*(code.train for code in captured.codes), *evaluated):
        for part in module.modules():
            if isinstance(part, fx.GraphModule) and id(part) not in seen:
                seen.add(id(part))
                _place_graph(part, device)

    def moved(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in constants.items()}

    evaluations = tuple(
        replace(graph, constants=moved(graph.constants)) for graph in captured.evaluations
    )
    return replace(captured, constants=moved(captured.constants), evaluations=evaluations)


def _place_graph(module: fx.GraphModule, device: torch.device) -> None:
    def moved(argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == "cpu":
            return device
        if isinstance(argument, (list, tuple)):
            return type(argument)(moved(item) for item in argument)
        return argument

    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(moved(argument) for argument in node.args)
            node.kwargs = {name: moved(argument) for name, argument in node.kwargs.items()}
    module.recompile()
