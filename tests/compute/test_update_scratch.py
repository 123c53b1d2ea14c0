"""What an update allocates stays under the number that the planner is told."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swaptrain.compute import blocks, state_codecs
from swaptrain.compute.gradient_norms import GradientNorms
from swaptrain.compute.state_codecs import StateDtype
from swaptrain.compute.update import UpdateRule

RULES: list[tuple[str, dict[str, object]]] = [
    ("adadelta", {}), ("adagrad", {}), ("adam", {"amsgrad": True}), ("adamw", {}), ("adamax", {}),
    ("asgd", {"t0": 1}), ("nadam", {}), ("radam", {}),
    ("rmsprop", {"momentum": 0.9, "centered": True}), ("rprop", {}),
    ("sgd", {"momentum": 0.9, "nesterov": True}), ("adafactor", {}), ("muon", {}),
]  # fmt: skip


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self.live:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key, None)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


def tensors(tree: object) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("shape", [(100, 400), (150, 150), (7, 5)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "arguments"), RULES)
def test_allocations_stay_under_the_bound(
    name: str,
    arguments: dict[str, object],
    split: bool,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First and second step, of parameters larger and smaller than a block."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 4096)
    rule = UpdateRule(name=name, lr=1e-3, weight_decay=None, arguments=arguments)
    state = {key: torch.zeros(of) for key, of in rule.state_tensors(shape).items()}
    if rule.elementwise:
        rule.state_tensors((1,))  # found out once per number of dimensions, on tiny tensors
    parameter, gradient = torch.randn(shape), torch.randn(shape)
    gradient[0, 0] = 1e30  # so that the norm overflows, and what is not finite is looked for
    hi, lo = parameter.bfloat16(), torch.zeros(shape, dtype=torch.int16)
    narrow, half = gradient.bfloat16(), torch.tensor(0.5)
    bound_bytes = rule.scratch_bytes(shape, split=split)
    for updates_before in range(2):
        given: dict[str, Any] = {"updates_before": updates_before, "lr": 1e-3, "decay": True}
        norms = GradientNorms(segment=1, step=1)
        with PeakBytes() as measured:
            if split:
                look = partial(norms.add, "weight")
                rule.update_split(hi, lo, narrow, state, coefficient=half, look=look, **given)
            else:
                norms.add("weight", gradient)
                rule.update(parameter, gradient, state, **given)
        assert measured.peak_bytes <= bound_bytes
    if split and rule.elementwise:
        assert bound_bytes <= 4 * 4096 * 8 + 256


@pytest.mark.parametrize("kind", ["split", "rounded", "float32"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "8bit"])
def test_coded_state_stays_under_the_bound(
    stored: StateDtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded blocks, what rounding draws, what encoding makes."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 1 << 16)
    monkeypatch.setattr(state_codecs, "_AT_ONCE", 1 << 15)
    monkeypatch.setattr(state_codecs, "_PIECE", 1 << 15)
    shape = (700, 400)
    rule = UpdateRule(name="adamw", lr=1e-3, weight_decay=None, arguments={}, state=stored)
    state = {
        key: torch.zeros(of, dtype=getattr(torch, dtype))
        for key, (of, dtype) in rule.stored(shape).items()
    }
    parameter, gradient = torch.randn(shape), torch.randn(shape)
    hi, lo = parameter.bfloat16(), torch.zeros(shape, dtype=torch.int16)
    if stored == "8bit":  # the tables are made once
        rule.update(parameter.clone(), gradient, state, updates_before=0, lr=1e-3, decay=True)
        rule = UpdateRule(name="adamw", lr=1e-3, weight_decay=None, arguments={}, state=stored)
        rule.state_tensors((1,))
    rule.state_tensors(shape)
    bound_bytes = rule.scratch_bytes(shape, split=kind == "split", rounded=kind == "rounded")
    for updates_before in (0, 1):
        given: dict[str, Any] = {"updates_before": updates_before, "lr": 1e-3, "decay": True}
        with PeakBytes() as measured:
            if kind == "float32":
                rule.update(parameter, gradient, state, **given)
            else:
                lower = lo if kind == "split" else None
                rule.update_split(hi, lower, gradient.bfloat16(), state, **given)
        own = gradient.numel() * 2 if kind != "float32" else 0  # the bfloat16 gradient
        assert measured.peak_bytes <= bound_bytes + own


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_widening_in_blocks_adds_the_same_bits(narrow: torch.dtype, transposed: bool) -> None:
    """As torch's own mixed addition, which copies the whole gradient; also in another layout."""
    total = torch.randn(700, 3000)
    gradient = torch.randn(3000, 700).t() if transposed else torch.randn(700, 3000)
    gradient = gradient.to(narrow)
    expected = total + gradient
    with PeakBytes() as measured:
        blocks.add_widened(total, gradient)
    assert torch.equal(total, expected)
    if narrow is torch.bfloat16 and not transposed:
        assert measured.peak_bytes <= 2 * 4 * blocks.CPU_BLOCK_ELEMENTS
