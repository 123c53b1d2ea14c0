"""Takes the steps of the plain model, as its user would without swaptrain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.forward.loss import loss_of
from swaptrain.errors import SwaptrainError
from swaptrain.generators import seed_generators
from swaptrain.models.factory import described
from swaptrain.models.freeze import freeze
from swaptrain.models.initial_weights import InitialWeights
from swaptrain.models.thaw import thaw
from swaptrain.planning.check_capture.draws import SameDraws
from swaptrain.program.row_ranges import range_of

__all__ = ["EagerSteps", "NotComparable", "PlainFails", "plain_model"]


_NARROW = (torch.bfloat16, torch.float16)


class NotComparable(Exception):
    """Plain PyTorch gives nothing to compare with; the text says why."""


class PlainFails(NotComparable):
    """Plain PyTorch cannot take the step itself."""


def plain_model(
    make: Callable[[], nn.Module],
    seed: int,
    initial: InitialWeights | None,
    thawed: Collection[str] = (),
    frozen: Sequence[str] = (),
    added: Sequence[Callable[[nn.Module], None]] = (),
) -> nn.Module:
    """Construct the model as plain PyTorch does, with the run's own initial values.

    `initial` has them where they do not come from the constructor; `thawed` are parameters that it
    freezes and the run trains; `frozen` are the patterns of `train.freeze`, `added` what adds
    rows and adapters. The generators of torch, Python and numpy stand afterwards where the
    constructor leaves them. Raises NotComparable.
    """
    seed_generators(seed)
    model = make()
    for add in added:
        seed_generators(seed)
        add(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise NotComparable("the factory gives the same module again when it is called again")
    narrow = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in _NARROW]
    if narrow:
        raise NotComparable(f"the constructor makes {narrow[0]} in 16 bits")
    if initial is not None:
        thaw(model, thawed)
    freeze(model, frozen, all_match=False)
    if initial is not None and initial.origin is not None:
        buffers = dict(initial.module.named_buffers())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(initial.value(name))
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
    return model.train()


class EagerSteps:
    """A forward and a backward of the plain model on one micro-batch, step after step."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], *, draws: bool) -> None:
        self.model, self._batch, self._draws = model, batch, draws
        self.parameters = dict(model.named_parameters())

    def step(self, number: int) -> Tensor:
        """Return the loss; afterwards the parameters have their gradients."""
        self.model.zero_grad(set_to_none=True)
        with self._running(number):
            loss = self._loss()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, number: int) -> Tensor:
        """Return the loss of another forward with the draws of a step."""
        with self._running(number):
            return self._loss().detach()

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers as they are now, by name."""
        return dict(self.model.named_buffers())

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter, dense; None where it has none.

        The name may be that of a range of its experts.
        """
        if name not in self.parameters and (own := range_of(name)) is not None:
            whole = self.gradient(own.whole)
            return None if whole is None else whole[own.first : own.end]
        gradient = self.parameters[name].grad
        if gradient is not None and gradient.layout is not torch.strided:
            return gradient.to_dense()
        return gradient

    def _loss(self) -> Tensor:
        batch = {key: value.clone() for key, value in self._batch.items()}
        return loss_of(self.model(**batch), self.model, batch.keys())

    @contextmanager
    def _running(self, number: int) -> Iterator[None]:
        """Give the draws of a step, and hide the warnings of a model that trains all the same."""
        draws = SameDraws(number) if self._draws else nullcontext()
        try:
            with warnings.catch_warnings(action="ignore"), torch.enable_grad(), draws:
                yield
        except SwaptrainError:
            raise
        except Exception as error:  # the model is the user's: it may raise anything
            memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            kind = NotComparable if memory else PlainFails
            raise kind(f"plain PyTorch fails on it: {described(error)}") from error
