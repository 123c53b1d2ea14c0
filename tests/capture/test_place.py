"""Captured code runs on another device than the one it was traced on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.capture.capture import Captured, capture, cut
from swaptrain.capture.cut import CutLimits
from swaptrain.capture.initialise import construct
from swaptrain.capture.place import place
from swaptrain.execute.build import model_factory
from tests.support.runs import config_of
from tests.test_exactness import GPT2, LLAMA

META = torch.device("meta")


def _captured(model: dict[str, Any], tmp_path: Path) -> Captured:
    config = config_of(
        tmp_path / "run", {"model": model, "data": {"python": "tests.support.datasets:text"}}
    )
    built = construct(model_factory(config).make, seed=0, scratch_dir=tmp_path)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    names = {name: "float32" for name, _ in built.module.named_parameters()}
    uncut = capture(built.module, built.fake_mode, {"input_ids": ids, "labels": ids.clone()}, names)
    limits = CutLimits(20_000, 1 << 40, 1 << 40, 1)
    captured, _ = cut(
        uncut,
        limits,
        state_bytes=lambda p: 3 * p.tensor.nbytes,
        working_bytes=lambda p: 4 * p.tensor.nbytes,
    )
    return captured


@pytest.mark.parametrize("model", [{"hf": LLAMA}, {"hf": GPT2}], ids=["llama", "gpt2"])
def test_every_segment_runs_where_it_is_placed(model: dict[str, Any], tmp_path: Path) -> None:
    """After `place` no operation mixes devices: the whole chain runs on meta tensors."""
    captured = place(_captured(model, tmp_path), META)
    values: dict[str, Tensor] = {}
    for segment, bindings in zip(captured.model.segments, captured.bindings, strict=True):
        inputs = []
        for binding in bindings:
            if binding.kind == "constant":
                inputs.append(captured.constants[binding.name])
                continue
            specs: Any = (
                captured.model.parameters if binding.kind == "parameter" else captured.model.values
            )
            spec = specs[binding.name].tensor
            made = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META)
            inputs.append(values.get(binding.name, made))
        results = captured.codes[segment.isomorphism].train(*inputs)
        values.update(zip(segment.outputs, results, strict=True))
    assert values[captured.model.loss].device == META
