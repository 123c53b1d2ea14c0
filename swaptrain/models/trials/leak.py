"""Which tokens a prediction sees: asked of a small model by changing them, not of its name.

A loss with one label, at place t, is computed for two values of that label. Their difference is
that of two logits of the one prediction for t: it changes with a token exactly where the prediction
sees it. A causal model's prediction for t sees no token from t on, since the label is token t.
"""

# T sequence length

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.capture.forward.loss import loss_of
from swaptrain.models.trials.tiny import randomise, tiny_model

__all__ = ["Sight", "sight_of"]

_LENGTH = 12
_FIRST, _SECOND = 3, 5
"""The two values of the label."""
_LEAST = 1e-4
"""A smaller change is one of rounding: logits are of the order of one."""


@dataclass(frozen=True)
class Sight:
    """What the predictions of a model see."""

    itself: bool
    """A prediction sees the token that it is to predict, or one after it."""
    following: bool
    """A prediction sees tokens after it."""
    first: bool
    """A label at the first place counts: labels are not shifted."""


def sight_of(cls: type, config: object) -> Sight | None:
    """Return what the predictions of a class of transformers see under a config.

    None where it cannot be asked: no small model of it can be made, or its forward does not take
    input_ids and labels of one shape. The generators of torch stay as they are.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = tiny_model(cls, config)
        if model is None:
            return None
        for scale in (1.0, 0.0):  # wild weights show more; where they overflow, its own will do
            randomise(model, scale)
            try:
                found = _look(model)
            except Exception:  # a forward may refuse this batch in any way
                return None
            if found is not None:
                return found
            model = tiny_model(cls, config)
            assert model is not None
    return None


def _look(model: nn.Module) -> Sight | None:
    """Change tokens and look at the predictions; None where a number is not finite."""
    embeddings: Any = model
    vocabulary = int(embeddings.get_input_embeddings().weight.shape[0])
    low, high = min(64, vocabulary // 2), min(128, vocabulary)
    ids = torch.randint(low, high, (1, _LENGTH))  # [1, T]
    other = low + (ids - low + 1 + (high - low) // 3) % (high - low)  # [1, T], another everywhere

    def seen(place: int, begin: int) -> tuple[float, float]:
        """Return the prediction for a place, and how it changes with the tokens from `begin`."""
        changed = torch.cat([ids[:, :begin], other[:, begin:]], dim=1)
        here = _preference(model, ids, place)
        return here, abs(here - _preference(model, changed, place))

    places = (_LENGTH - 1, _LENGTH // 2)
    changes = [seen(place, place) for place in places]
    first, following = seen(0, 1)
    _, beyond = seen(_LENGTH // 2, _LENGTH // 2 + 1)
    if not all(map(_finite, (*(c for pair in changes for c in pair), beyond))):
        return None
    return Sight(
        itself=any(change > _LEAST for _, change in changes),
        following=max(beyond, following if _finite(following) else 0.0) > _LEAST,
        first=_finite(first) and abs(first) > _LEAST,
    )


def _preference(model: nn.Module, ids: Tensor, place: int) -> float:
    """Return by how much the prediction for a place prefers one label to another."""

    def loss(label: int) -> float:
        labels = torch.full_like(ids, -100)
        labels[0, place] = label
        return float(loss_of(model(input_ids=ids, labels=labels), model, ("input_ids", "labels")))

    return loss(_FIRST) - loss(_SECOND)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
