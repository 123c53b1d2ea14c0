"""The loss of a forward: where it is found, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput

from swaptrain.capture.forward.constants import bind_constants, constants_of
from swaptrain.capture.forward.loss import NoLossError, loss_of
from swaptrain.errors import CaptureError

LOSS = torch.tensor(2.0, requires_grad=True)
LOGITS = torch.ones(2, 3)
ONE = torch.tensor([[7.0]])
OTHER = torch.tensor(9.0)


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class Plain:
    logits: Tensor
    loss: Tensor


FOUND: dict[str, Any] = {
    "a tensor": LOSS,
    "first in a tuple": (LOSS, LOGITS),
    "first in a list": [LOSS, LOGITS],
    "first of several scalars": (LOSS, OTHER, LOGITS),
    "the only scalar": (LOGITS, LOSS),
    "the only scalar behind one number": (ONE, LOSS),
    "beside what is no tensor": (LOSS, None, "text", {"loss": OTHER}),
    "beside a count": (LOGITS, torch.tensor(3), LOSS),
    "in a dict": {"logits": LOGITS, "aux": OTHER, "loss": LOSS},
    "in an ordered dict": OrderedDict(loss=LOSS),
    "in an output": Output(logits=LOGITS, loss=LOSS),
    "in an output of transformers": MaskedLMOutput(loss=LOSS, logits=LOGITS),
    "in a named tuple": Named(LOGITS, LOSS),
    "in a named tuple of old": namedtuple("Old", "aux loss")(OTHER, LOSS),
    "in a dataclass": Plain(LOGITS, LOSS),
    "in any object": SimpleNamespace(loss=LOSS),
    "of one element": LOSS.reshape(1),
    "of one element in a tuple": (LOSS.reshape(1, 1), LOGITS),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_loss_is_found(name: str) -> None:
    found = loss_of(FOUND[name])
    assert found.shape == () and float(found.detach()) == 2.0


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned NoneType, not a loss. Let forward"),
    "a vector": (torch.ones(4), r"shape \(4,\): reduce it to a scalar, .* over the items"),
    "a vector in a dict": ({"loss": torch.ones(4)}, "reduce it to a scalar"),
    "a dict without": ({"logits": LOGITS, "ce": LOSS}, "dict with logits, ce, not a loss"),
    "a dict of losses": ({"loss": {"a": LOSS}}, "its loss is dict with a, not a tensor"),
    "logits first": ((LOGITS, LOGITS), r"tuple of float32\[2, 3\].*: no element is a scalar"),
    "an empty tuple": ((), "tuple of nothing"),
    "two that might be": ((LOGITS, LOSS, OTHER), "elements 1, 2 are scalars"),
    "a number": (2.5, "not a loss"),
    "a number in a dict": ({"loss": 2.5}, "which has no gradient: return the tensor"),
    "an integer": (torch.tensor(2), "has the dtype int64"),
    "a complex number": (torch.tensor(2j), "has the dtype complex64"),
    "a method": (SimpleNamespace(loss=print), "not a tensor"),
    "none in an output": (Output(logits=LOGITS), "no loss: it is None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name: str) -> None:
    result, message = REFUSED[name]
    with pytest.raises(NoLossError, match=message):
        loss_of(result)


class Head(nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None, *, return_loss: bool = False) -> Any:
        return {"loss": x.sum() if return_loss else None}


class Open(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, **others: Any) -> Tensor:
        return x.sum() * scale + len(others)


def test_the_missing_argument_is_named() -> None:
    with pytest.raises(NoLossError, match="given x; the forward of Head also takes labels, ret"):
        loss_of({"loss": None}, Head(), ["x"])


def test_constants_are_given_to_every_forward() -> None:
    module = bind_constants(Head(), {"return_loss": True})
    assert float(loss_of(module(x=torch.ones(3)))) == 3.0
    assert constants_of(module) == {"return_loss": True}
    assert constants_of(bind_constants(Head(), {})) == {}


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (Head(), "return_los", "no argument 'return_los' .did you mean 'return_loss'?"),
        (Head(), "nothing_like_it", "It takes x, labels, return_loss"),
        (Open(), "scal", "did you mean 'scale'?"),
    ],
)
def test_a_constant_that_no_forward_takes_is_refused(
    module: nn.Module, name: str, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        bind_constants(module, {name: 1})


def test_a_forward_that_takes_anything_is_given_it() -> None:
    assert float(bind_constants(Open(), {"verbose": 1})(torch.ones(2))) == 3.0
