"""Captures a bfloat16 run's model once more in float32, where rounding hides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swaptrain.capture.capture import capture, cut
from swaptrain.capture.captured import Captured
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.uncut import Uncut
from swaptrain.models.build import BuiltModel
from swaptrain.program.model import ParameterSpec

__all__ = ["captured_anew", "cut_in_pieces", "in_float32"]

_NARROW = (torch.bfloat16, torch.float16)
_PIECES = 4
_NO_LIMIT = 1 << 60


def captured_anew(
    built: BuiltModel, batch: Mapping[str, Tensor], *, tokens: int | None
) -> Captured:
    """Return the model captured with float32 weights and a few cuts; `built` stays as it is."""
    masters = {name: spec.widest for name, spec in built.uncut.parameters.items()}
    module, fake_mode = built.initial.module, built.initial.construction.fake_mode
    with _float32_parameters(module, fake_mode):
        return cut_in_pieces(capture(module, fake_mode, batch, masters), tokens=tokens)


def cut_in_pieces(uncut: Uncut, *, tokens: int | None) -> Captured:
    """Cut a captured model into a few segments of about the same size, with ranges of `tokens`."""
    total = sum(map(_nbytes, uncut.parameters.values()))
    limits = CutLimits(max(total // _PIECES, 1), _NO_LIMIT, _NO_LIMIT, 1)
    return cut(uncut, limits, state_bytes=_nbytes, working_bytes=_nbytes, tokens=tokens)[0]


def in_float32(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a micro-batch whose 16-bit tensors are float32."""
    return {key: value.float() if value.dtype in _NARROW else value for key, value in batch.items()}


@contextmanager
def _float32_parameters(module: nn.Module, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Let the fake 16-bit parameters of `module` be float32 inside the block."""
    before = [(part, dict(part._parameters)) for part in module.modules()]
    widened: dict[int, nn.Parameter] = {}
    with fake_mode:
        for parameter in module.parameters():
            if parameter.dtype in _NARROW:
                fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float32)
                widened[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    try:
        for part, entries in before:
            for name, entry in entries.items():
                part._parameters[name] = widened.get(id(entry), entry)
        yield
    finally:
        for part, entries in before:
            part._parameters.update(entries)


def _nbytes(parameter: ParameterSpec) -> int:
    return parameter.tensor.nbytes
