"""What of a job is compared, and which jobs cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx

from swaptrain.capture.trace import bodies, is_random
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.planning.prepare import Prepared

__all__ = ["check_comparable", "check_draws", "in_directory"]

_PROBABILITIES = ("p", "dropout", "dropout_p")
"""Names of arguments of torch's operations."""


def check_comparable(config: Config) -> None:
    """Raise ConfigError where plain PyTorch takes other steps by design."""
    if config.device != "cpu" and torch.cuda.is_available():
        raise ConfigError(
            f"device is {config.device}, which is a GPU here: its kernels add in another order "
            "than plain PyTorch's graph asks for, so equal bits are not promised; give device=cpu"
        )
    if config.train.skip_ignored:
        raise ConfigError(
            "train.skip_ignored leaves rows out of the head, which plain PyTorch computes: give "
            "train.skip_ignored=false to compare the rest of the job"
        )
    if config.memory.tokens is not None:
        raise ConfigError(
            "memory.tokens sums the gradients of weights over ranges of tokens, in another order "
            "than plain PyTorch: give memory.tokens=null to compare the rest of the job"
        )


def check_draws(prepared: Prepared) -> None:
    """Raise ConfigError where the model draws random numbers in its forward."""
    captured = prepared.plan.captured
    for segment in captured.model.segments:
        drawing = _drawing(captured.codes[segment.isomorphism].train.graph)
        if drawing is not None:
            raise ConfigError(
                f"the model draws random numbers in its forward (segment {segment.index}: "
                f"{drawing}), as dropout does: swaptrain draws them from counters and plain "
                "PyTorch from its generator, so the two differ by design; set the model's dropout "
                "to 0 (model.kwargs, the fields of model.hf, lora.lora_dropout)"
            )


def _drawing(graph: fx.Graph) -> str | None:
    """Return the first operation of a graph that draws; one with a probability of 0 does not."""
    for node in graph.nodes:
        inner = [_drawing(body.graph) for body, _ in bodies(node)]
        if any(inner):
            return next(found for found in inner if found)
        if not inner and is_random(node) and not _never_draws(node):
            return str(node.target)
    return None


def _never_draws(node: fx.Node) -> bool:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]  # an operator's
    for position, argument in enumerate(arguments):
        if argument.name in _PROBABILITIES:
            given = node.args[position] if position < len(node.args) else argument.default_value
            if node.kwargs.get(argument.name, given) == 0:
                return True
    return False


def in_directory(config: Config, run_dir: Path, steps: int) -> Config:
    """Return the first steps of a job, to be run in another directory; what has no bits is off.

    The learning rate moves as in the whole job. Held-out losses are taken in the last step at
    least.
    """
    config = config.resolved()
    found: dict[str, Any] = {
        "train": config.train.model_copy(
            update={"steps": steps, "epochs": None, "report_to": (), "check_capture": False}
        ),
        "store": config.store.model_copy(update={"paths": None, "keep": None}),
        "run": config.run.model_copy(update={"dir": run_dir, "trace": 0}),
    }
    if config.eval is not None:
        every = min(config.eval.every, steps)
        off = {"every": every, "first": False, "patience": None, "samples": None}
        found["eval"] = config.eval.model_copy(update=off)
    return config.model_copy(update=found)
