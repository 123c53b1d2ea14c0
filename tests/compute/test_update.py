"""One parameter's update equals plain torch's bit for bit: whole, in blocks, as a split master."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.compute import blocks
from swaptrain.compute.gradient_norms import (
    GradientNorms,
    clip_coefficient,
    gradient_norm,
    total_norm,
)
from swaptrain.compute.optimizer_classes import ELEMENTWISE, optimizer_arguments, optimizer_class
from swaptrain.compute.split_master import join, split, storage_order
from swaptrain.compute.update import UpdateRule
from swaptrain.errors import ConfigError, NotFiniteError

CASES: list[tuple[str, dict[str, object]]] = [
    ("Adadelta", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"betas": [0.9, 0.95]}),
    ("Adamax", {}),
    ("ASGD", {"t0": 1}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("Adafactor", {}),
    ("Muon", {}),
]
SHAPE = (401, 337)
BLOCK_ELEMENTS = 40_016
LR = 1e-2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut parameters into several blocks, each large enough for several threads."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", BLOCK_ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def weight_decay_of(name: str) -> float | None:
    """Return a weight decay that the class accepts."""
    return None if name == "Rprop" else 0.1


def make_rule(name: str, arguments: dict[str, object]) -> UpdateRule:
    """Return the rule under test."""
    return UpdateRule(
        name=name.lower(), lr=LR, weight_decay=weight_decay_of(name), arguments=arguments
    )


def make_plain(name: str, arguments: dict[str, object], parameter: Tensor) -> Any:
    """Return torch's own optimizer of one parameter."""
    cls: Any = optimizer_class(name)
    chosen = optimizer_arguments(cls, weight_decay=weight_decay_of(name), arguments=arguments)
    return cls([parameter], lr=LR, **chosen)


def random_like(parameter: Tensor) -> Tensor:
    """Return random numbers in the parameter's own layout."""
    values = torch.empty_like(parameter)
    storage_order(values).copy_(torch.randn(parameter.numel()))
    return values


def same_state(plain: Any, parameter: Tensor, state: dict[str, Tensor]) -> bool:
    """Return whether torch holds the state's values, in the same order of memory."""
    held = plain.state[parameter]
    return set(held) - {"step"} == set(state) and all(
        torch.equal(storage_order(held[name]), storage_order(view)) for name, view in state.items()
    )


def test_every_elementwise_class_is_tested() -> None:
    """The list in the code holds nothing that the tests below do not prove."""
    assert {name for name, _ in CASES} >= ELEMENTWISE


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_update_equals_plain_torch(
    name: str, arguments: dict[str, object], transposed: bool
) -> None:
    """Over 4 steps with a changing rate, float32 and split updates give torch's bits and state."""
    torch.manual_seed(0)
    parameter = torch.randn(SHAPE[::-1]).t() if transposed else torch.randn(SHAPE)
    swapped = parameter.clone()
    hi = torch.empty_like(parameter, dtype=torch.bfloat16)
    lo = torch.empty(parameter.numel(), dtype=torch.int16)
    split(parameter, hi, lo)
    joined = torch.empty_like(parameter)
    plain, rule = make_plain(name, arguments, parameter), make_rule(name, arguments)
    shapes = rule.state_tensors(SHAPE)
    state = {key: torch.full(shape, torch.nan).flatten() for key, shape in shapes.items()}
    split_state = {key: view.clone() for key, view in state.items()}
    for updates_before in range(4):
        gradient = random_like(parameter)
        if updates_before == 2:
            gradient.zero_()
            # As after a restart: a rule that has seen nothing goes on from the state.
            rule = make_rule(name, arguments)
        lr = LR / (1 + updates_before)
        parameter.grad = gradient.clone()
        plain.param_groups[0]["lr"] = lr
        plain.step()
        given: dict[str, Any] = {"updates_before": updates_before, "lr": lr, "decay": True}
        rule.update(swapped, gradient.clone(), state, **given)
        rule.update_split(hi, lo, gradient.clone(), split_state, **given)
        join(hi, lo, joined)
        assert torch.equal(swapped, parameter) and torch.equal(joined, parameter)
        assert same_state(plain, parameter, state) and same_state(plain, parameter, split_state)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (17,), (4, 1, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adafactor"])
def test_any_shape_updates_like_plain_torch(name: str, shape: tuple[int, ...]) -> None:
    """Scalars, empty tensors and many dimensions have torch's state and bits."""
    if name == "Adafactor" and 0 in shape:
        pytest.skip("torch itself divides by the number of elements")
    arguments: dict[str, object] = {"momentum": 0.9} if name == "SGD" else {}
    parameter = torch.randn(shape)
    hi = torch.empty_like(parameter, dtype=torch.bfloat16)
    lo = torch.empty(shape, dtype=torch.int16)
    split(parameter, hi, lo)
    plain, rule = make_plain(name, arguments, parameter), make_rule(name, arguments)
    state = {key: torch.zeros(of) for key, of in rule.state_tensors(shape).items()}
    for updates_before in range(2):
        parameter.grad = torch.randn(shape)
        plain.step()
        rule.update_split(
            hi, lo, parameter.grad, state, updates_before=updates_before, lr=LR, decay=True
        )
    joined = torch.empty_like(parameter)
    join(hi, lo, joined)
    assert torch.equal(joined, parameter)
    assert same_state(plain, parameter, state)
    assert all(plain.state[parameter][key].shape == view.shape for key, view in state.items())


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_looked_at_whole_and_before_it_is_clipped(
    name: str, dtype: torch.dtype
) -> None:
    """In float32, all of it once, in one piece or in blocks; an error ends the update."""
    parameter = torch.randn(3, BLOCK_ELEMENTS)
    gradient = torch.randn(3, BLOCK_ELEMENTS).to(dtype)
    lo = torch.zeros(parameter.shape, dtype=torch.int16)
    seen: list[Tensor] = []

    def update(look: Callable[[Tensor], None]) -> None:
        rule = make_rule(name, {})
        state = {key: torch.zeros(of) for key, of in rule.state_tensors(parameter.shape).items()}
        half, hi = torch.tensor(0.5), parameter.bfloat16()
        rule.update_split(
            hi, lo, gradient.clone(), state, coefficient=half, updates_before=0, lr=LR, decay=True,
            look=look,
        )  # fmt: skip

    update(lambda piece: seen.append(piece.clone().flatten()))
    assert torch.equal(torch.cat(seen), gradient.float().flatten())
    norms = GradientNorms(segment=1, step=1)
    update(partial(norms.add, "weight"))
    assert norms.read()["weight"] == pytest.approx(float(gradient.double().norm()), rel=1e-5)
    gradient[1, 7] = 1e30  # whose square is infinite in float32
    update(partial(norms.add, "weight"))
    assert norms.read()["weight"] == torch.inf
    gradient[2, 7] = torch.inf
    with pytest.raises(NotFiniteError, match=r"step 1: the gradient of weight \(segment 1\)"):
        update(partial(norms.add, "weight"))


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_norms_that_come_later_are_those_of_the_host(bad: float | None) -> None:
    """Of a whole gradient, of one in pieces and of an empty one; nothing is known before."""
    coming: list[tuple[Tensor, Tensor]] = []

    def bring_back(tensor: Tensor) -> Tensor:
        coming.append((torch.full_like(tensor, torch.nan), tensor))
        return coming[-1][0]

    whole, pieces = torch.randn(7, 5), [torch.randn(9) * 1e30, torch.randn(4)]
    pieces[1][2] = 1.0 if bad is None else bad
    later = GradientNorms(segment=2, step=3, bring_back=bring_back)
    now = GradientNorms(segment=2, step=3)
    shown = [("whole", whole), ("pieces", pieces[0]), ("none", torch.empty(0))]
    for name, piece in shown:
        later.add(name, piece)
        now.add(name, piece)
    later.send()
    later.add("pieces", pieces[1])
    later.send()
    for target, source in coming:
        target.copy_(source)
    if bad is not None:
        with pytest.raises(NotFiniteError, match="the gradient of pieces") as found:
            later.read()
        with pytest.raises(NotFiniteError) as expected:
            now.add("pieces", pieces[1])
        assert str(found.value) == str(expected.value)
        return
    now.add("pieces", pieces[1])
    assert later.read() == now.read()
    assert now.read()["whole"] == float(whole.norm()) and now.read()["pieces"] == torch.inf


def test_no_decay_is_a_weight_decay_of_zero() -> None:
    """decay=False leaves a parameter without gradient as it is, also between calls that decay."""
    rule = make_rule("SGD", {})
    parameter, gradient = torch.ones(8), torch.zeros(8)
    rule.update(parameter, gradient, {}, updates_before=0, lr=LR, decay=True)
    decayed = parameter.clone()
    assert decayed[0] < 1
    rule.update(parameter, gradient, {}, updates_before=1, lr=LR, decay=False)
    assert torch.equal(parameter, decayed)


def test_weight_decay_of_none_is_the_classs_default() -> None:
    """AdamW decays by 0.01 unless told otherwise."""
    rule = UpdateRule(name="AdamW", lr=LR, weight_decay=None, arguments={})
    assert rule.weight_decay == 0.01 and rule.fused and rule.elementwise


def test_nothing_of_the_callers_is_kept_alive() -> None:
    """After a call the rule holds neither the parameter, nor the gradient, nor the state."""
    rule = make_rule("AdamW", {})
    parameter, gradient = torch.randn(100), torch.randn(100)
    state = {key: torch.zeros(100) for key in rule.state_tensors((100,))}
    rule.update(parameter, gradient, state, updates_before=0, lr=LR, decay=True)
    storages = [
        weakref.ref(tensor.untyped_storage()) for tensor in (parameter, gradient, *state.values())
    ]
    del parameter, gradient, state
    gc.collect()
    assert [storage() for storage in storages] == [None] * 4


def test_a_gradient_in_another_layout_is_refused() -> None:
    """Fused kernels walk memory: a transposed gradient would be added to the wrong elements."""
    rule = make_rule("SGD", {})
    for parameter in (torch.ones(4, 4), torch.ones(400, 400)):
        with pytest.raises(ValueError, match="layout"):
            rule.update(
                parameter, torch.ones_like(parameter).t(), {}, updates_before=1, lr=LR, decay=True
            )


def test_a_failed_step_leaves_the_rule_usable() -> None:
    """After an error the next parameter is updated as if nothing had been."""
    rule = make_rule("AdamW", {})
    with pytest.raises(RuntimeError):
        rule.update(
            torch.ones(3), torch.ones(3, dtype=torch.float64), {"exp_avg": torch.zeros(3),
            "exp_avg_sq": torch.zeros(3)}, updates_before=0, lr=LR, decay=True,
        )  # fmt: skip
    parameter = torch.ones(3)
    state = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    rule.update(parameter, torch.ones(3), state, updates_before=0, lr=LR, decay=True)
    assert parameter.lt(1).all()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamv", {}, r"optimizer\.name: .*'adamv'; did you mean adam"),
        ("lbfgs", {}, "several times in one step"),
        ("SparseAdam", {}, "sparse gradients"),
        ("optimizer", {}, "torch.optim has no 'optimizer'"),
        ("sgd", {"momentun": 0.9}, r"optimizer\.momentun: SGD .*did you mean momentum"),
        ("sgd", {"betas": [0.9, 0.9]}, "it has momentum, dampening"),
        ("adamw", {"fused": False, "bta": 1}, r"optimizer\.fused: [^\n]*remove it\noptimizer\.bta"),
        ("adamw", {"betas": [0.9, 1.5]}, "refuses: Invalid beta"),
        ("adamw", {"betas": 0.9}, "refuses"),
        ("adamw", {"eps": "small"}, "refuses"),
    ],
)
def test_what_torch_does_not_have_is_named(
    name: str, arguments: dict[str, object], message: str
) -> None:
    """An unusable optimizer or argument is one ConfigError with its key and the way out."""
    with pytest.raises(ConfigError, match=message):
        UpdateRule(name=name, lr=LR, weight_decay=None, arguments=arguments)


def test_classes_with_limits_say_so() -> None:
    """Rprop has no weight decay, and Muon takes matrices alone."""
    with pytest.raises(ConfigError, match="Rprop has no weight decay"):
        UpdateRule(name="rprop", lr=LR, weight_decay=0.1, arguments={})
    with pytest.raises(ConfigError, match="1-dimensional parameter"):
        make_rule("Muon", {}).state_tensors((5,))


def test_clipping_equals_torchs() -> None:
    """Norm, coefficient and scaled gradients are clip_grad_norm_'s, bit for bit."""
    torch.manual_seed(1)
    shapes = [(300, 200), (200,), (7, 5, 3)]
    parameters = [torch.zeros(shape) for shape in shapes] + [torch.zeros(60, 90).t()]
    for scale, max_norm in ((1.0, 1.0), (1e-6, 1.0), (30.0, 2.5)):
        gradients = [random_like(p).mul_(scale) for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = total_norm([gradient_norm(gradient) for gradient in gradients])
        assert torch.equal(norm, expected)
        coefficient = clip_coefficient(norm, max_norm)
        assert (coefficient == 1) == (scale < 1)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(gradient.mul_(coefficient), parameter.grad)
    assert total_norm([]) == 0
