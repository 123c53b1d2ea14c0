"""The captured graph: where it may be cut, what is rewritten, what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.capture.captured import Captured
from swaptrain.capture.cut import CutLimits, GraphCosts, choose_cuts
from swaptrain.capture.gradient_layout import is_dense, overlaps
from swaptrain.capture.uncut import Uncut
from swaptrain.errors import CaptureError
from tests.capture.in_memory import (
    captured_model,
    cut_everywhere,
    cut_into,
    eager_step,
    legal_gaps,
    segment_step,
)
from tests.support.matrix import every
from tests.support.models import gpt

pytestmark = pytest.mark.trains

Factory = Callable[[], nn.Module]


class Simple(nn.Module):
    """A module whose forward is `function(self, x)`, with two linear layers to use."""

    def __init__(self, function: Callable[[Simple, Tensor], object], width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def batch(micro_batch: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(micro_batch)
    return {"x": torch.randn(4, 8, generator=g)}


def captured(function: Callable[[Simple, Tensor], object], scratch_dir: Path) -> Uncut:
    return captured_model(lambda: Simple(function), batch(), scratch_dir)


def assert_exact(factory: Factory, batches: list[dict[str, Tensor]], scratch_dir: Path) -> Captured:
    """Assert that a cut at every legal gap gives plain PyTorch's bits; return it."""
    uncut = captured_model(factory, batches[0], scratch_dir)
    pieces = cut_everywhere(uncut)
    assert segment_step(pieces, factory, batches).differences(eager_step(factory, batches)) == []
    return pieces


def targets(uncut: Uncut) -> list[str]:
    return [str(n.target) for n in uncut.captured.graph.nodes if n.op == "call_function"]


def inplace_seen_by_a_view(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x)
    view = h[:2]
    h.mul_(2.0)
    return (model.second(h).sum() + view.sum()) / 7


def test_a_write_that_an_alias_sees_stays_in_place_and_uncut(tmp_path: Path) -> None:
    """No cut lies between a storage's first user and its last writer."""
    uncut = captured(inplace_seen_by_a_view, tmp_path)
    assert "aten.mul_.Tensor" in targets(uncut)
    assert not legal_gaps(uncut)["linear"]
    assert_exact(lambda: Simple(inplace_seen_by_a_view), [batch(0), batch(1)], tmp_path)


def inplace_seen_by_nobody(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x)
    h += x
    return torch.relu_(model.second(F.relu(h, inplace=True))).sum()


def test_a_write_that_nobody_else_sees_becomes_out_of_place(tmp_path: Path) -> None:
    """Then a cut may be made on either side of it, and the bits stay."""
    uncut = captured(inplace_seen_by_nobody, tmp_path)
    assert not [t for t in targets(uncut) if "_." in t]
    assert legal_gaps(uncut)["linear"]
    assert_exact(lambda: Simple(inplace_seen_by_nobody), [batch(0), batch(1)], tmp_path)


def tuple_outputs(model: Simple, x: Tensor) -> Tensor:
    a, b = model.first(x).chunk(2, dim=-1)
    return model.second(torch.cat([b, a], -1)).square().mean()


def test_a_tuple_is_not_parted_from_its_elements(tmp_path: Path) -> None:
    """Only tensors cross a cut."""
    uncut = captured(tuple_outputs, tmp_path)
    assert not legal_gaps(uncut)["chunk"]
    assert_exact(lambda: Simple(tuple_outputs), [batch(0), batch(1)], tmp_path)


def buffer_twice(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x)
    model.seen.add_(h.detach().mean())
    h = model.second(h * 2)
    model.seen.mul_(0.5)
    return (h * model.seen).sum()


def test_a_mutated_buffer_lies_in_one_segment(tmp_path: Path) -> None:
    """All its users are in the segment that owns it, and the backward reads its value of before."""
    pieces = assert_exact(lambda: Simple(buffer_twice), [batch(0), batch(1)], tmp_path)
    owners = [s.index for s in pieces.model.segments if "seen" in s.buffers]
    assert len(owners) == 1
    assert len(pieces.model.segments) > 1


def transposed_gradient(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x.repeat(16, 1)).view(2, 32, 2, 4) * model.second.bias[:4]
    return h.transpose(1, 2).contiguous().square().sin().mean()


def sliced_gradient(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x.repeat(16, 1)) * model.second.bias
    return torch.cat([h, 2 * x.repeat(16, 1)], -1).square().sin().mean()


def expanded_gradient(model: Simple, x: Tensor) -> Tensor:
    h = model.first(x.repeat(16, 1)) * model.second.bias
    return h.unfold(1, 4, 1).mean(1).mean()


@pytest.mark.parametrize("function", [transposed_gradient, sliced_gradient, expanded_gradient])
def test_gradients_cross_a_cut_in_their_own_layout(
    function: Callable[[Simple, Tensor], object], tmp_path: Path
) -> None:
    """A reduction adds in the order of the gradient's layout, so that it is kept or not cut."""
    pieces = assert_exact(lambda: Simple(function), [batch(0), batch(1)], tmp_path)
    for value in pieces.model.values.values():
        assert value.gradient_stride is None or is_dense(value.tensor.shape, value.gradient_stride)
        assert not overlaps(value.tensor.shape, value.tensor.stride)


def test_layouts_are_classified() -> None:
    """Dense, with holes, expanded, overlapping."""
    assert is_dense((2, 3, 4), (12, 1, 3))
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((2, 3), (0, 1))
    assert overlaps((3, 4), (1, 1))
    assert not overlaps((3, 4), (0, 1))
    assert not overlaps((3, 4), (8, 2))


def masked(model: Simple, x: Tensor) -> Tensor:
    for layer in (model.first, model.second):
        mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
        table = torch.outer(torch.arange(4.0), torch.arange(8.0) / 8).cos()
        x = layer(x * table).masked_fill(mask[:4], 0.0)
    return x.sum()


def test_equal_constants_are_computed_once(tmp_path: Path) -> None:
    """Masks and tables of every layer become one tensor each, which no segment recomputes."""
    uncut = captured(masked, tmp_path)
    assert not {"aten.triu.default", "aten.cos.default", "aten.arange.start"} & set(targets(uncut))
    pieces = assert_exact(lambda: Simple(masked), [batch(0), batch(1)], tmp_path)
    assert len(pieces.constants) == 2


def test_a_hoisted_constant_depends_on_no_draw(tmp_path: Path) -> None:
    """Random draws stay in the graph."""
    uncut = captured(lambda m, x: (m.first(x) * torch.rand(8)).sum(), tmp_path)
    assert "aten.rand.default" in targets(uncut)


def test_equal_layers_share_code(tmp_path: Path) -> None:
    """Twelve equal layers: most segments are of one class."""
    ids = {"ids": torch.zeros(2, 16, dtype=torch.long)}
    uncut = captured_model(lambda: gpt(layers=12), ids, tmp_path)
    pieces = cut_into(uncut, 12 * 32 * 32 * 4)
    classes = [s.isomorphism for s in pieces.model.segments]
    assert len(classes) >= 10
    assert len(pieces.codes) <= 4
    assert max(classes.count(c) for c in set(classes)) >= 8


def data_dependent(model: Simple, x: Tensor) -> Tensor:
    first = model.first(x).sum()
    return first if first > 0 else model.second(x).sum()


def counting(model: Simple, x: Tensor) -> Tensor:
    model.calls += 1
    return model.first(x).sum() * model.calls


class Backwards(torch.autograd.Function):
    """Reverses the gradient: what autograd would not find from the forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return -gradients[0]


REFUSED: dict[str, tuple[Callable[[Simple, Tensor], object], str]] = {
    "data-dependent": (data_dependent, r"(?s)test_capture\.py:\d+.*tensor's value"),
    "counter": (counting, r"Python state.*calls.*registered buffer"),
    "no loss": (lambda m, x: {"logits": m.first(x)}, "returned dict with logits, not a loss"),
    "not scalar": (lambda m, x: m.first(x), r"shape \(4, 8\): reduce it to a scalar"),
    "nothing to train": (lambda m, x: x.sum(), "nothing to train"),
    "parameter written": (
        lambda m, x: (m.first.weight.detach().mul_(0.5), m.first(x).sum())[1],
        "writes to the parameter first.weight",
    ),
    "custom gradient": (
        lambda m, x: Backwards.apply(m.first(x)).sum(),
        "custom autograd function .*Backwards",
    ),
}


@pytest.mark.parametrize("name", every(3, REFUSED))
def test_what_a_graph_cannot_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """The message says what is wrong and what to do."""
    function, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        captured(function, tmp_path)


FINGERPRINT = """
import sys, torch
from pathlib import Path
from tests.capture.in_memory import captured_model, cut_into
from tests.support.models import gpt
ids = {"ids": torch.zeros(2, 16, dtype=torch.long)}
print(cut_into(captured_model(gpt, ids, Path(sys.argv[1])), 9000).model.fingerprint)
"""


def test_the_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Nothing in it depends on addresses or on the order of a hash; another cut gives another."""
    ids = {"ids": torch.zeros(2, 16, dtype=torch.long)}
    uncut = captured_model(gpt, ids, tmp_path)
    here = cut_into(uncut, 9000).model.fingerprint
    there = subprocess.run(
        [sys.executable, "-c", FINGERPRINT, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert there.stdout.strip() == here
    assert cut_into(uncut, 1 << 40).model.fingerprint != here


def costs_of(live: list[int], state: list[int], legal: list[bool] | None = None) -> GraphCosts:
    n = len(live)
    return GraphCosts(live, legal or [True] * n, state, state, [0] * n)


def test_cuts_are_made_where_the_fewest_bytes_are_live() -> None:
    """Equal layers with a wide inside are cut between the layers."""
    live = [900, 900, 10] * 6
    cuts = choose_cuts(costs_of(live, [100, 100, 100] * 6), CutLimits(300, 600, 1 << 40, 8))
    assert cuts == [2, 5, 8, 11, 14]


def test_a_gap_that_is_not_legal_is_not_cut() -> None:
    """Also where it would be the best."""
    legal_gaps = [i not in (2, 8) for i in range(18)]
    costs = costs_of([900, 900, 10] * 6, [100] * 18, legal_gaps)
    assert not {2, 8} & set(choose_cuts(costs, CutLimits(300, 600, 1 << 40, 8)))


def test_what_cannot_be_divided_is_one_segment() -> None:
    """However large it is."""
    costs = costs_of([1] * 4, [1000] * 4, [False] * 4)
    assert choose_cuts(costs, CutLimits(10, 20, 1 << 40, 1)) == []
