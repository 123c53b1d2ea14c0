"""Whether a model keeps rows that share a sequence apart: asked of a small one, not of its name.

Three rows lie in a sequence, with positions that begin anew in each. The loss of one row, and the
gradient of its inputs, are computed twice, with other tokens in the other rows. A model that keeps
them apart gives the same bits; and about what the row gives alone, which sums in another order.
"""

# T sequence length, H hidden size

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.capture.forward.loss import loss_of
from swaptrain.models.trials.tiny import randomise, tiny_model

__all__ = ["keeps_rows_apart", "reads_padding"]

_LENGTHS = (7, 9, 8)
"""Tokens of the rows."""
_TOLERANCE = 1e-3
"""Of a loss of the order of one, float32: rows alone are summed in another order."""


def keeps_rows_apart(cls: type, config: object) -> bool:
    """Return whether a class of transformers keeps packed rows apart under a config.

    False too where it cannot be asked: no small model of it can be made, or its forward does not
    take position_ids. The generators of torch stay as they are.
    """
    return _tried(_rows_are_apart, cls, config)


def reads_padding(cls: type, config: object) -> bool:
    """Return whether the loss of a row changes with what pads it to a length.

    As it does where a loss counts all tokens: of routers, say. False where it cannot be asked.
    """
    return _tried(_padding_is_read, cls, config)


def _tried(question: Callable[[nn.Module], bool], cls: type, config: object) -> bool:
    """Ask a small random model of a class; False where that cannot be."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_model(cls, config)
        if model is None:
            return False
        with torch.no_grad():
            randomise(model, 1.0)
        try:
            return question(model)
        except Exception:  # a forward may refuse this batch in any way
            return False


def _padding_is_read(model: nn.Module) -> bool:
    ids, other = _tokens(model)
    row = slice(0, _LENGTHS[0])
    padded = torch.cat([ids[:, row], other[:, row.stop :]], dim=1)
    loss, _ = _of_row(model, ids, None, row)
    again, _ = _of_row(model, padded, None, row)
    return bool(abs(loss - again) > _TOLERANCE * (1 + abs(loss)))


def _tokens(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return ids [1, T] of three rows, and others of which each differs."""
    embeddings: Any = model
    vocabulary = int(embeddings.get_input_embeddings().weight.shape[0])
    low, high = min(64, vocabulary // 2), min(128, vocabulary)
    ids = torch.randint(low, high, (1, sum(_LENGTHS)))
    return ids, low + (ids - low + 1 + (high - low) // 3) % (high - low)


def _rows_are_apart(model: nn.Module) -> bool:
    ids, other = _tokens(model)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]  # [1, T]
    begin = 0
    for length in _LENGTHS:
        row = slice(begin, begin + length)
        begin += length
        changed = other.clone()
        changed[:, row] = ids[:, row]
        loss, gradient = _of_row(model, ids, positions, row)
        again, its_gradient = _of_row(model, changed, positions, row)
        if not (torch.isfinite(loss) and torch.equal(loss, again)):
            return False
        if not torch.equal(gradient, its_gradient):
            return False
        alone, _ = _of_row(model, ids[:, row], positions[:, row], slice(0, length))
        if abs(loss - alone) > _TOLERANCE * (1 + abs(alone)):
            return False
    return True


def _of_row(
    model: nn.Module, ids: Tensor, positions: Tensor | None, row: slice
) -> tuple[Tensor, Tensor]:
    """Return the loss of one row, and the gradient of its inputs, [1, tokens of the row, H]."""
    labels = torch.full_like(ids, -100)
    labels[:, row] = ids[:, row]
    labels[:, row.start] = -100  # nothing of the row comes before it
    inputs: list[Tensor] = []

    def keep(module: nn.Module, given: object, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[0]

    embeddings: Any = model
    hook = embeddings.get_input_embeddings().register_forward_hook(keep)
    try:
        batch = {"input_ids": ids, "labels": labels}
        if positions is not None:
            batch["position_ids"] = positions
        loss = loss_of(model(**batch), model, tuple(batch))
    finally:
        hook.remove()
    (gradient,) = torch.autograd.grad(loss, inputs[0])
    return loss.detach(), gradient[:, row]
