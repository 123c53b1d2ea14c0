"""A recorded construction gives the plain constructor's model, bit for bit, without its weights."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.init.construct import construct
from swaptrain.errors import CaptureError
from tests.capture.init.constructing import (
    SEED,
    constructed,
    lazy_with_a_forward,
    linear_pair,
    runs_batch_norm,
    same_bits,
    tied,
    tied_small,
)
from tests.support.matrix import proof_but


def test_a_parameter_larger_than_the_machine_is_not_reserved(tmp_path: Path) -> None:
    """A terabyte that nothing has been written to, beside one that is: a kernel refuses to map it.

    One of a gigabyte and more is replayed as any other.
    """

    def factory() -> nn.Module:
        module = nn.Module()
        module.stack = nn.Parameter(torch.empty(1 << 10, 1 << 14, 1 << 14))
        module.small = nn.Parameter(torch.randn(1 << 14))
        return module

    built = construct(factory, seed=SEED, scratch_dir=tmp_path, draw=False)
    assert built.recorded
    assert built.module.stack.shape == (1 << 10, 1 << 14, 1 << 14)
    assert built.nbytes("stack") == 1 << 40


def test_tied_parameters_stay_one_object(tmp_path: Path) -> None:
    """A parameter under two names is one fake object with its attributes, large or small."""
    for factory in (tied, tied_small):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        assert built.module[0].weight is built.module[1].weight  # type: ignore[index]
        assert built.module[0].weight.no_decay is True  # type: ignore[index]
        assert torch.equal(built.value("0.weight"), built.value("1.weight"))


def test_values_are_fresh_and_can_be_forgotten(tmp_path: Path) -> None:
    """Changing a value changes nothing later; after `forget` there are none."""
    for factory in (linear_pair, lazy_with_a_forward):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        first = built.value("1.weight")
        kept = first.clone()
        first.zero_()
        assert torch.equal(built.value("1.weight"), kept)
        with built.fake_mode:
            inside = built.value("1.weight")
        assert type(inside) is torch.Tensor and torch.equal(inside, kept)
        with pytest.raises(KeyError):
            built.value("2.weight")
        built.forget()
        with pytest.raises(RuntimeError, match="forgotten"):
            built.value("1.weight")


def test_nothing_global_stays_changed(tmp_path: Path) -> None:
    """Default dtype, swap_tensors and modes are as before, whether recording worked or not."""

    def changes_default() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return runs_batch_norm().append(linear_pair())  # type: ignore[operator]
        finally:
            torch.set_default_dtype(torch.float32)

    swap = torch.utils.swap_tensors
    assert constructed(changes_default, tmp_path).refusal
    assert torch.utils.swap_tensors is swap
    assert torch.get_default_dtype() is torch.float32
    assert type(torch.ones(100, 100)) is torch.Tensor


def test_errors_of_the_factory_are_its_own(tmp_path: Path) -> None:
    """What a factory raises comes out unchanged, and an uninitialised parameter is named."""

    def broken() -> nn.Module:
        torch.ones(100, 100) @ torch.ones(3)
        return linear_pair()

    with pytest.raises(RuntimeError, match="size mismatch"):
        construct(broken, seed=SEED, scratch_dir=tmp_path)
    with pytest.raises(CaptureError, match=r"0\.weight.*forward"):
        construct(lambda: nn.Sequential(nn.LazyLinear(3)), seed=SEED, scratch_dir=tmp_path)


def test_only_parameters_are_fake(tmp_path: Path) -> None:
    """Tensors that the factory leaves elsewhere are real; views of parameters stay views."""
    elsewhere: list[torch.Tensor] = []

    def factory() -> nn.Module:
        model = linear_pair()
        model.start = model[0].weight.detach().clone()
        model.table = {"rows": torch.randn(100, 100)[5:]}
        model.view = model[0].weight.data
        model.small_view = model[1].bias.data
        elsewhere[:] = [torch.randn(100, 100)]
        return model

    built = construct(factory, seed=SEED, scratch_dir=tmp_path)
    made_elsewhere = elsewhere[0]
    torch.manual_seed(SEED)
    plain = factory()
    assert same_bits(plain.start, built.module.start)  # type: ignore[arg-type]
    assert same_bits(plain.table["rows"], built.module.table["rows"])  # type: ignore[index]
    assert same_bits(elsewhere[0], made_elsewhere)
    for view, parameter in (
        (built.module.view, built.module[0].weight),  # type: ignore[index]
        (built.module.small_view, built.module[1].bias),  # type: ignore[index]
    ):
        assert isinstance(view, FakeTensor)
        assert view.untyped_storage()._cdata == parameter.untyped_storage()._cdata


def test_the_module_computes_under_its_fake_mode(tmp_path: Path) -> None:
    """A forward and backward in the fake mode give gradients shaped like the parameters."""
    for factory in (lambda: nn.LSTM(64, 64), lambda: nn.LSTM(8, 8)):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        width = built.module.input_size
        with built.fake_mode:
            output, _ = built.module(torch.zeros(5, 2, width))  # type: ignore[arg-type]
            output.sum().backward()
        for parameter in built.module.parameters():
            assert isinstance(parameter.grad, FakeTensor)
            assert parameter.grad.shape == parameter.shape


Tensors = list[torch.Tensor]
SIDE = 6
STEPS: dict[str, Callable[[Tensors, torch.Tensor, torch.Tensor], object]] = {
    "randn": lambda pool, a, b: pool.append(torch.randn(SIDE, SIDE)),
    "arange": lambda pool, a, b: pool.append(torch.arange(36.0).view(SIDE, SIDE)),
    "empty": lambda pool, a, b: pool.append(torch.empty(SIDE, SIDE).uniform_()),
    "like": lambda pool, a, b: pool.append(torch.rand_like(a)),
    "rows": lambda pool, a, b: a[1:4].normal_(),
    "transposed": lambda pool, a, b: pool.append(a.t()),
    "column": lambda pool, a, b: a[:, 2].copy_(b[1].clone()),
    "own transpose": lambda pool, a, b: a.copy_(a.t().clone()),
    "copy": lambda pool, a, b: a.copy_(b.clone()),
    "scale": lambda pool, a, b: a.mul_(0.5),
    "clone": lambda pool, a, b: pool.append(a.clone()),
    "product": lambda pool, a, b: pool.append(a @ b),
    "sum": lambda pool, a, b: pool.append(a + b.t()),
    "add": lambda pool, a, b: a[2:, :2].add_(b[0, 0].clone()),
    "fill": lambda pool, a, b: a.t().fill_(3.0),
    "zero": lambda pool, a, b: a[::2].zero_(),
    "item": lambda pool, a, b: a.add_(b[3, 3].item()),
    "branch": lambda pool, a, b: a.zero_() if bool(b.sum() > 0) else b.normal_(),
    "dropout": lambda pool, a, b: pool.append(nn.functional.dropout(a, 0.3)),
    "draw by value": lambda pool, a, b: pool.append(torch.normal(a, 1.0)),
    "seed": lambda pool, a, b: torch.manual_seed(len(pool)),
    "data": lambda pool, a, b: setattr(a, "data", b.clone()),
    "move": lambda pool, a, b: a.t_(),
    "deepcopy": lambda pool, a, b: pool.append(copy.deepcopy(a)),
}


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 50), st.integers(0, 50)),
        max_size=25,
    ),
    fake_from_bytes=st.sampled_from([1, SIDE * SIDE * 4 + 1]),
)
def test_any_sequence_of_operations_is_replayed_exactly(
    steps: list[tuple[str, int, int]],
    fake_from_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Views, partial writes, draws and looks in any order end in the plain constructor's bits."""

    def factory() -> nn.Module:
        pool = [torch.randn(SIDE, SIDE), torch.zeros(SIDE, SIDE)]
        for name, first, second in steps:
            STEPS[name](pool, pool[first % len(pool)], pool[second % len(pool)])
        model = nn.Module()
        for position, tensor in enumerate(pool):
            if position % 3 == 2:
                model.register_buffer(f"buffer{position}", tensor)
            else:
                model.register_parameter(f"parameter{position}", nn.Parameter(tensor))
        return model

    built = constructed(factory, tmp_path_factory.getbasetemp(), fake_from_bytes)
    assert built.refusal is None


_MEASURE = """
import ctypes, pathlib, re, sys
ctypes.CDLL(None).mallopt(-3, 1 << 20)
import torch
from torch import nn
from swaptrain.capture.init.construct import construct
eager = sys.argv[2] == "eager"
def build(width, depth):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    if eager:
        model[0].weight.data.numpy()[0] = 1
    return model
def peak_kib():
    # ru_maxrss would begin with the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
def run(width, depth):
    built = construct(
        lambda: build(width, depth),
        seed=0,
        scratch_dir=pathlib.Path(sys.argv[1]),
        resident_bytes=48 << 20,
    )
    assert built.recorded != eager
    for name, _ in built.module.named_parameters():
        built.value(name)
run(64, 2)
before = peak_kib()
run(2048, 12)
print(peak_kib() - before)
"""


@pytest.mark.trains
@pytest.mark.parametrize(
    ("mode", "allowed_bytes"),
    proof_but([("recorded", 40 << 20), ("eager", 110 << 20)], ("recorded", 40 << 20)),
)
def test_peak_memory_is_far_below_the_weights(
    mode: str, allowed_bytes: int, tmp_path: Path
) -> None:
    """192 MiB of weights in 16 MiB parameters are constructed and read in a fraction of that."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout) * 1024 < allowed_bytes
