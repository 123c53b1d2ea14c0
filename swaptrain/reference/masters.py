"""What the optimizer steps: float32 tensors behind the parameters that the model computes with."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swaptrain.capture.precision import kept_in_float32
from swaptrain.compute.split_master import is_dense, split, storage_order
from swaptrain.compute.state_codecs import (
    WEIGHT,
    Draws,
    StateDtype,
    codec_of,
    is_coded,
    round_in_pieces,
)

__all__ = ["Masters"]


class Masters:
    """The float32 tensors that the optimizer steps: the parameters themselves, or their masters.

    In float32 a parameter whose memory has holes (a slice of a tensor) has a master too, which has
    none: torch's fused optimizers step what lies in the holes instead of the last elements.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, exact: bool = True) -> None:
        """Turn `model` into `dtype`; the masters are the values that its constructor gave.

        Unless `exact` they hold what the model does, in float32.
        """
        self._exact = exact
        self._before: dict[str, Tensor] = {}
        """By name: the sums of the ranks that have computed."""
        self._parameters = dict(model.named_parameters())
        first = {id(p): name for name, p in self._parameters.items()}
        self.names = defaultdict[str, list[str]](list)
        """All names of a parameter by its first one: a tied one has several."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names[first[id(parameter)]].append(name)
        if dtype == torch.float32:
            self._masters = {
                name: p if is_dense(p) else _copied(p, torch.contiguous_format)
                for name, p in self._parameters.items()
            }
        else:
            self._masters = {name: _copied(p) for name, p in self._parameters.items()}
            exempt = kept_in_float32(model)
            for name, parameter in self._parameters.items():
                if parameter.dtype == torch.float32 and name not in exempt:
                    parameter.data = torch.empty_like(parameter, dtype=dtype)
            self.to_model()
            for name in self._rounded:
                self._masters[name].data.copy_(self._parameters[name])

    @property
    def _rounded(self) -> list[str]:
        """Names of the weights that have no master."""
        return [
            name
            for name, master in self._masters.items()
            if not self._exact
            and master.requires_grad
            and self._parameters[name].dtype != master.dtype
        ]

    def round(self, *, seed: int, step: int) -> None:
        """Round the weights that have no master by chance."""
        for name in self._rounded:
            flat = storage_order(self._masters[name].detach())
            out = torch.empty(flat.numel(), dtype=torch.bfloat16, device=flat.device)
            round_in_pieces(flat.clone(), out, Draws(seed, step, name), WEIGHT)
            flat.copy_(out)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Those that are trained by name, in the model's order."""
        return {name: master for name, master in self._masters.items() if master.requires_grad}

    def accumulate(self) -> None:
        """Add the gradients of one micro-batch, in float32, in the order of the micro-batches."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if parameter.grad is None or master is parameter:
                continue  # autograd has added it to the gradient of the parameter itself
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def end_rank(self) -> None:
        """Add the sums of a rank, in float32, to those of the ranks before it; begin anew."""
        for name, master in self._masters.items():
            before = self._before.pop(name, None)
            own, master.grad = master.grad, None
            if own is not None:
                self._before[name] = own if before is None else before.add_(own)
            elif before is not None:
                self._before[name] = before

    def end_step(self) -> None:
        """Let the gradients be the sums of all ranks."""
        for name, total in self._before.items():
            self._masters[name].grad = total
        self._before = {}

    def forget(self) -> None:
        """Drop the gradients that were accumulated."""
        self._before = {}
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def store(self, stepper: Optimizer, dtype: StateDtype, *, seed: int, step: int) -> None:
        """Encode and decode the optimizer's state of all parameters that are not small."""
        codec = codec_of(dtype)
        if codec is None:
            return
        for name, master in self._masters.items():
            shape = tuple(master.shape)
            state = stepper.state.get(master, {})
            for key, value in state.items() if is_coded(shape) else ():
                if value.shape != master.shape:
                    continue
                whole, values = slice(0, value.numel()), storage_order(value)
                stored = {
                    array: torch.zeros(own, dtype=getattr(torch, kind)).view(-1).to(value.device)
                    for array, (own, kind) in codec.stored(key, shape).items()
                }
                codec.encode(key, values.clone(), stored, whole, Draws(seed, step, name))
                codec.decode(key, stored, whole, values)

    def to_model(self) -> None:
        """Give the model the masters' values, rounded as in swaptrain's split master."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                master = self._masters[name]
                if master is parameter:
                    continue
                has_rest = self._exact and master.requires_grad
                if parameter.dtype != torch.bfloat16 or not has_rest:
                    parameter.copy_(master)  # no lower half completes it to the master
                else:
                    remainder = torch.empty_like(master, dtype=torch.int16)
                    split(master.detach(), parameter.detach(), remainder)

    def weights(self) -> dict[str, Tensor]:
        """Return the masters by name."""
        return {name: master.detach() for name, master in self._masters.items()}


def _copied(
    parameter: nn.Parameter, memory_format: torch.memory_format = torch.preserve_format
) -> nn.Parameter:
    """Return a master: a copy of a parameter, in float32 if it has 16 bits and is trained."""
    copy = parameter.detach().clone(memory_format=memory_format)
    narrow = copy.dtype in (torch.bfloat16, torch.float16)
    copy = copy.float() if narrow and parameter.requires_grad else copy
    return nn.Parameter(copy, requires_grad=parameter.requires_grad)
