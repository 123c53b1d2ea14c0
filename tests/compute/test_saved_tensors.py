"""What autograd saves is kept in a slab, and the backward gives the bits of a recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from swaptrain.compute import runner
from swaptrain.compute.saved_tensors import SavedTensors
from swaptrain.config.store import CommitConfig
from swaptrain.machine.speeds import Machine
from swaptrain.planning.choose import choose_plan, choose_saves
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.step_cost import price
from swaptrain.program.cost import Disk, IOWork
from swaptrain.program.instructions import Kind, Operation
from tests.support.matrix import proof_but
from tests.support.runs import config_of, losses, reference, trained

pytestmark = pytest.mark.trains


def attention(weight: Tensor, x: Tensor) -> Tensor:
    """Views of one storage, an expanded tensor, a constant, and something changed in place."""
    q, k, v = (x @ weight.t()).chunk(3, dim=-1)
    scores = torch.softmax(q @ k.transpose(-1, -2) * SCALE.expand(8, 8), -1)
    y = torch.nn.functional.dropout(scores @ v, 0.3)
    y = y.clone().mul_(2).add_(x)
    return torch.tanh(y) * x.float().pow(2).mean(-1, keepdim=True).rsqrt()


SCALE = torch.tensor(0.125)


def gradients(memory: Tensor | None, moved: bool) -> tuple[list[Tensor], SavedTensors | None]:
    """Return the gradients with plain autograd, or through `memory`."""
    torch.manual_seed(3)
    weight, x = torch.randn(48, 16), torch.randn(8, 16)
    leaves = [weight.detach().requires_grad_(), x.detach().requires_grad_()]
    if memory is None:
        torch.manual_seed(4)
        result = attention(*leaves)
        result.backward(torch.ones_like(result))
        return [leaf.grad for leaf in leaves if leaf.grad is not None], None
    saved = SavedTensors({"weight": weight, "x": x}, [SCALE], memory)
    torch.manual_seed(4)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        result = attention(*leaves)
    saved.seal()
    edge, seed = get_gradient_edge(result), torch.ones_like(result)
    del result
    elsewhere = memory.clone() if moved else memory
    operands = {"weight": weight.clone(), "x": x.clone()} if moved else {"weight": weight, "x": x}
    if moved:
        weight.fill_(torch.nan)
        x.fill_(torch.nan)
        memory.fill_(255)
    saved.open(operands, elsewhere)
    torch.autograd.backward([edge], [seed])
    return [leaf.grad for leaf in leaves if leaf.grad is not None], saved


@pytest.mark.parametrize("moved", [False, True], ids=["in-place", "moved"])
def test_gradients_through_a_slab_are_autograd_s_own(moved: bool) -> None:
    """Also when slab and operands are elsewhere by then, and where they were is overwritten."""
    expected, _ = gradients(None, moved)
    found, saved = gradients(torch.empty(1 << 16, dtype=torch.uint8), moved)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert saved is not None and saved.complete


def test_operands_are_saved_by_name_and_storages_once() -> None:
    """Neither the weight nor the input is copied, and the parts of one product only once."""
    weight, x = torch.randn(96, 32), torch.randn(8, 32)
    saved = SavedTensors({"weight": weight, "x": x}, [], None)
    leaves = weight.detach().requires_grad_(), x.detach().requires_grad_()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        q, k, v = (leaves[1] @ leaves[0].t()).chunk(3, dim=-1)
        result = (q * k) * v
    assert result.requires_grad
    assert saved.nbytes == 8 * 96 * 4 + 8 * 32 * 4  # the product, and q * k


def test_what_does_not_fit_is_not_saved_at_all() -> None:
    """A slab that is too small leaves the backward to a recomputation, and is not overrun."""
    memory = torch.zeros(256, dtype=torch.uint8)
    x = torch.randn(64, 64)
    saved = SavedTensors({}, [], memory[:64])
    with saved_tensors_hooks(saved.pack, saved.unpack):
        result = torch.tanh(x.requires_grad_() * 2).exp()
    assert result.requires_grad and not saved.complete
    assert not memory.any()


def chunks(x: Tensor) -> Tensor:
    """Views with versions of their own, one of which changes after the other was saved."""
    a, b = torch.unsafe_chunk(x * 2, 2)
    a.mul_(1.5)
    product = a * a.detach()
    b.mul_(3)  # the version that `a` has
    changed = b * b.detach()
    return torch.cat((product, changed, changed * b.detach(), product * a.detach()))


@pytest.mark.parametrize("known", [False, True])
def test_a_change_that_is_noticed_later_makes_the_saved_of_no_use(known: bool) -> None:
    """On a device nothing waits to compare; what was measured before is copied at once."""
    x, memory = torch.randn(8, 5, requires_grad=True), torch.empty(1 << 12, dtype=torch.uint8)
    measured = SavedTensors({}, [], None)
    with saved_tensors_hooks(measured.pack, measured.unpack):
        assert chunks(x).requires_grad
    assert None in measured.matches.values() and 1 in measured.matches.values()
    coming: list[tuple[Tensor, Tensor]] = []

    def bring_back(tensor: Tensor) -> Tensor:
        coming.append((torch.ones_like(tensor), tensor))
        return coming[-1][0]

    matches = measured.matches if known else {}
    saved = SavedTensors({}, [], memory, bring_back=bring_back, matches=matches)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        result = chunks(x)
    saved.seal()
    for target, source in coming:
        target.copy_(source)
    assert saved.complete
    assert saved.open({}, memory) is known
    if known:
        assert saved.nbytes == measured.nbytes
        (found,) = torch.autograd.grad(result.sum(), x)
        (expected,) = torch.autograd.grad(chunks(x).sum(), x)
        assert torch.equal(found, expected)


TREE: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3, "dropout": 0.1}},
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 3},
    "memory": {"segment": "64KiB"},
}


def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the micro-batch of every forward or recomputation."""
    calls: list[int] = []
    original = runner.draws

    def draws(seed: int, step: int, micro_batch: int, *args: Any) -> Any:
        calls.append(micro_batch)
        return original(seed, step, micro_batch, *args)

    monkeypatch.setattr(runner, "draws", draws)
    return calls


@pytest.mark.parametrize("recompute", proof_but([True, False], False))
def test_what_is_saved_is_not_recomputed(
    recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, with one forward of each segment and micro-batch instead of two."""
    train = {"steps": 2, "recompute": recompute, "check_capture": False}  # which takes forwards
    tree = {**TREE, "train": train}
    config = config_of(tmp_path / "run", tree)
    prepared = Prepared(config.resolved(), None, lambda _: None)
    segments = len(prepared.plan.captured.model.segments)
    with monkeypatch.context() as patch:
        patch.setattr("swaptrain.verbs.train.Prepared", lambda *_: prepared)
        calls = forwards(patch)
        run_dir = trained(config)
    once = 2 * 3 * segments
    assert segments > 2
    assert len(calls) == (2 * once - 2 * 3 if recompute else once)
    other = config_of(tmp_path / "other", {**tree, "train": {**train, "recompute": None}})
    assert losses(trained(other)) == losses(run_dir)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Plan]:
    """Return a config and its plan before anything is chosen; all its forwards take a second."""
    tree = {**TREE, "train": {"recompute": None}}
    config = config_of(tmp_path_factory.mktemp("plan") / "run", tree).resolved()
    plan = Prepared(config, None, lambda _: None, draw=False).plan
    seconds = {
        (operation, kind, saves): 3.0 if operation is Operation.BACKWARD and not saves else 1.0
        for operation, kind, saves in plan.measured.seconds
    }
    return config, replace(plan, measured=replace(plan.measured, seconds=seconds))


def speeds(bytes_per_s: float) -> Machine:
    return Machine(Disk(bytes_per_s, bytes_per_s, bytes_per_s), 0.0, IOWork(), {})


def test_a_slow_disk_makes_segments_recompute_and_a_fast_one_save(
    made: tuple[Any, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache for a part of it, the price decides; the chosen one is no dearer than others.

    Or hardly: of two that are as good as equal, the one that computes less is taken.
    """
    config, plan = made
    monkeypatch.setattr("swaptrain.planning.choose.TENSOR_BYTES", 0)  # small tensors, as many nodes
    small = replace(plan, pool_bytes=plan.peaks.instruction_bytes * 2, arena_bytes=0)
    chosen = {}
    for name, machine in {"slow": speeds(1e3), "fast": speeds(1e15)}.items():
        chosen[name] = choose_saves(small, config, machine, disk_bytes=1 << 40).builder.saves
    assert not chosen["slow"] and len(chosen["fast"]) >= 1
    assert len(plan.captured.model.segments) not in chosen["fast"]
    for machine in (speeds(1e3), speeds(1e7), speeds(1e15)):
        best = choose_saves(small, config, machine, disk_bytes=1 << 40)
        seconds = []
        for candidate in (best, small):
            priced = price(candidate, config, machine)
            assert priced.step_s is not None
            seconds.append(priced.step_s + priced.compute_s / 10)
        assert seconds[0] <= 1.02 * seconds[1]


def test_where_all_fits_all_is_saved_even_without_a_machine(made: tuple[Any, Plan]) -> None:
    """Saving moves no byte more then; but not where the disk has no room to spill it."""
    config, plan = made
    chosen = choose_saves(plan, config, None, disk_bytes=1 << 40)
    assert chosen.builder.saves == frozenset(plan.layouts.saved)
    kinds = [key.kind for i in chosen.step for key in i.touches]
    assert kinds.count(Kind.SAVED) == 2 * 3 * len(plan.layouts.saved)
    assert not any(
        key.kind is Kind.SAVED
        for i in chosen.step
        for key in i.touches
        if i.operation is Operation.TURN
    )
    assert not choose_saves(plan, config, None, disk_bytes=4096).builder.saves


class Odd(torch.nn.Module):
    """Conjugated views, an output that is its input, a recurrent layer, batch norm, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.recurrent = torch.nn.GRU(16, 16, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of x (batch, 6, 8) against y (batch, 6, 4)."""
        h = self.dropout(self.first(x))
        z = torch.fft.rfft(h)
        power = (z * z.conj()).real
        h = self.dropout(self.norm(h + torch.nn.functional.pad(power, (0, 7))))
        h, _ = self.recurrent(self.dropout(h).contiguous())
        return torch.nn.functional.mse_loss(self.last(torch.relu_(h.clone())), y)


def odd() -> Odd:
    """Return the model that `model.python` names."""
    return Odd()


def odd_data() -> list[dict[str, Tensor]]:
    """Return items for it."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(6, 8, generator=generator), "y": torch.randn(6, 4, generator=generator)}
        for _ in range(8)
    ]


def test_odd_operations_are_saved_or_recomputed_but_never_wrong(tmp_path: Path) -> None:
    """Cut wherever a cut is legal, with what can be saved saved, the losses are plain PyTorch's."""
    tree: dict[str, Any] = {
        "model": {"python": "tests.compute.test_saved_tensors:odd"},
        "data": {"python": "tests.compute.test_saved_tensors:odd_data", "micro_batches": 3},
        "memory": {"segment": "4KiB"},
        "train": {"steps": 3, "recompute": False},
    }
    config = config_of(tmp_path / "run", tree)
    assert losses(trained(config)) == reference(config).losses


@pytest.mark.proof
def test_what_an_earlier_start_reserved_is_gone_at_the_next(tmp_path: Path) -> None:
    """A run that is prolonged without saving takes the disk of what was saved back."""
    saving = {**TREE, "train": {"steps": 1, "recompute": False}}
    run_dir = trained(config_of(tmp_path / "run", saving))
    left = run_dir / "spill" / "saved" / "001" / "saved"
    left.mkdir(parents=True)
    (left / "zarr.json").write_text("{}")  # as of another version of torch, of another size
    trained(config_of(tmp_path / "run", {**TREE, "train": {"steps": 2, "recompute": False}}))
    assert len(losses(run_dir)) == 2


def test_a_kill_may_repeat_two_segments_where_that_makes_steps_shorter(
    made: tuple[Any, Plan],
) -> None:
    """Where disk and processor take equally long; the config's own word counts before that."""
    config, plan = made
    written = sum(layout.nbytes for layout in plan.layouts.state.values())
    backward_s = 3 * sum(1.0 for i in plan.step if i.operation is Operation.BACKWARD)

    def lag(bytes_per_s: float, *, said: int | None = None, every: int = 1) -> int:
        commit = CommitConfig.model_validate({"every": every, "lag": said})
        store = config.store.model_copy(update={"commit": commit})
        job = config.model_copy(update={"store": store})
        return choose_plan(plan, job, speeds(bytes_per_s), disk_bytes=1 << 40).lag

    balanced = written / backward_s
    assert lag(balanced) == 2
    assert lag(balanced * 1e6) == 1  # there is nothing to gain
    assert lag(balanced, said=1) == 1
    assert lag(balanced * 1e6, said=2) == 2
    assert lag(balanced, every=2) == lag(balanced, said=2, every=2) == 1
    open_lag = config.store.model_copy(update={"commit": CommitConfig()})
    job = config.model_copy(update={"store": open_lag})
    assert choose_plan(plan, job, None, disk_bytes=1 << 40).lag == 1  # nothing is known
