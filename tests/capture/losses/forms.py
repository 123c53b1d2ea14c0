"""Losses that are a mean over trained tokens in one way or another, on one small model.

Each form is written once, in plain PyTorch, for both: `n` and `m` None make the mean that a model
returns; with the step's counts `n`, by term, and its number of micro-batches `m`, the same function
returns the micro-batch's part of the step's loss, as somebody would write it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ADDITIVE", "HIDDEN", "Form", "Losses", "batches"]

CLASSES, LENGTH, IGNORED = 11, 6, -100
Counts = Sequence[float] | None


class Losses(nn.Module):
    """A layer, two heads and a parameter; `form` makes the loss of hidden states and labels."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16)
        self.layer = nn.Linear(16, 16)
        self.head, self.second = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.classes: Tensor
        self.register_buffer("classes", torch.linspace(0.5, 2.0, CLASSES))
        self.form = form

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.part(input_ids, labels, None, None)

    def part(self, input_ids: Tensor, labels: Tensor, n: Counts, m: int | None) -> Tensor:
        """Return the loss, or with the step's counts the part that this micro-batch has in it."""
        hidden = torch.tanh(self.layer(self.embedding(input_ids)))
        return self.form.loss(self, hidden, labels, n, m)


@dataclass(frozen=True)
class Form:
    """A loss of `Losses`, and what of a micro-batch's labels it counts, by term."""

    loss: Callable[[Losses, Tensor, Tensor, Counts, int | None], Tensor]
    count: Callable[[Losses, Tensor], list[float]] = lambda _, y: [shifted(y)]


def batches(counts: Sequence[int], size: int = 2) -> list[dict[str, Tensor]]:
    """Return micro-batches with so many trained labels behind a shift by one position."""
    made = []
    for number, count in enumerate(counts):
        g = torch.Generator().manual_seed(number)
        ids = torch.randint(1, CLASSES, (size, LENGTH), generator=g)
        trained = torch.zeros(size * (LENGTH - 1), dtype=torch.bool)
        trained[:count] = True
        labels = torch.full_like(ids, IGNORED)
        labels[:, 1:] = torch.where(trained.view(size, -1), ids[:, 1:], IGNORED)
        made.append({"input_ids": ids, "labels": labels})
    return made


def shifted(y: Tensor, by: int = 1) -> float:
    return float((y[:, by:] != IGNORED).sum())


def ce(logits: Tensor, y: Tensor, n: float | None, **options: object) -> Tensor:
    """Return torch's mean, or the sum divided by the step's count."""
    logits, y = logits.flatten(0, 1), y.flatten()
    if n is None:
        return F.cross_entropy(logits, y, **options)
    return F.cross_entropy(logits, y, reduction="sum", **options) / n


def first(n: Counts) -> float | None:
    return None if n is None else n[0]


def rest(term: Tensor, m: int | None) -> Tensor:
    """Return the part of a term that counts no tokens."""
    return term if m is None else term / m


def causal(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return ce(k.head(h)[:, :-1], y[:, 1:], first(n))


def smoothed(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return ce(k.head(h)[:, :-1], y[:, 1:], first(n), label_smoothing=0.1)


def class_weights(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return ce(k.head(h)[:, :-1], y[:, 1:], first(n), weight=k.classes)


def count_classes(k: Losses, y: Tensor) -> list[float]:
    trained = y[:, 1:][y[:, 1:] != IGNORED]
    return [float(k.classes.double()[trained].sum())]


def padding_is_zero(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return ce(k.head(h)[:, :-1], y[:, 1:].clamp(min=0), first(n), ignore_index=0)


def by_logarithms(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    logs = F.log_softmax(k.head(h)[:, :-1].flatten(0, 1), -1)
    if n is None:
        return F.nll_loss(logs, y[:, 1:].flatten())
    return F.nll_loss(logs, y[:, 1:].flatten(), reduction="sum") / n[0]


def classes_second(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    logits, targets = k.head(h)[:, :-1].transpose(1, 2), y[:, 1:]
    if n is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / n[0]


def with_penalty(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return causal(k, h, y, n, m) + 0.01 * rest(h.pow(2).mean(), m) + rest(k.scale**2, m)


def penalty_in_place(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    loss = causal(k, h, y, n, m) * 0.5
    loss += rest(0.01 * k.head(h).logsumexp(-1).pow(2).mean(), m)
    return loss


def with_offset(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return causal(k, h, y, n, m) + (2.0 if m is None else 2.0 / m)


def two_heads(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    """The next token and the one after it, each a mean of its own."""
    one = ce(k.head(h)[:, :-1], y[:, 1:], first(n))
    two = ce(k.second(h)[:, :-2], y[:, 2:], None if n is None else n[1])
    return (one + two) / 2


def uncertain(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return torch.exp(-k.scale) * causal(k, h, y, n, m) + rest(k.scale, m)


def stacked(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    both = torch.stack([causal(k, h, y, n, m), rest(h.abs().mean(), m)])
    return (both * k.classes[:2]).sum()


def mask_of(y: Tensor) -> tuple[Tensor, Tensor]:
    mask = y[:, 1:] != IGNORED
    return mask, y[:, 1:].masked_fill(~mask, 0)


def each(k: Losses, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(k.head(h)[:, :-1].transpose(1, 2), mask_of(y)[1], reduction="none")


def masked_by_hand(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0].float()
    return (each(k, h, y) * mask).sum() / (mask.sum().clamp(min=1) if n is None else n[0])


def means_by_hand(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0].float()
    return (each(k, h, y) * mask).mean() / (mask.mean() if n is None else n[0] / mask.numel())


def gathered(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask, targets = mask_of(y)
    logs = k.head(h)[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    sum_ = torch.where(mask, -logs, 0.0).sum()
    return sum_ / (mask.sum() if n is None else n[0]) + 0.1 * rest(h.mean(), m)


def by_one_hot(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask, targets = mask_of(y)
    wanted = F.one_hot(targets, CLASSES).float() * mask[..., None]
    sum_ = -(wanted * k.head(h)[:, :-1].log_softmax(-1)).sum()
    return sum_ / (wanted.sum() if n is None else n[0])


def by_index(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask, targets = mask_of(y)
    logs = k.head(h)[:, :-1].flatten(0, 1).log_softmax(-1)
    each_ = -logs[torch.arange(len(logs)), targets.flatten()]
    weights = mask.flatten().float()
    return torch.dot(each_, weights) / (weights.count_nonzero() if n is None else n[0])


def sum_over_count(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    sum_ = F.cross_entropy(k.head(h)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum")
    return sum_ / ((y[:, 1:] != IGNORED).sum() if n is None else n[0])


def two_choices(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0].float()
    wrong = F.binary_cross_entropy_with_logits(
        k.head(h)[:, :-1, 0], (y[:, 1:] > 5).float(), reduction="none"
    )
    return torch.sum(wrong * mask) / (mask.sum() + 1e-8 if n is None else n[0])


def guarded(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0]
    mean = (each(k, h, y) * mask).sum() / (mask.sum() if n is None else n[0])
    return torch.where(mask.any(), mean, torch.zeros(()))


def in_pieces(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    """Some rows of logits after others, to save memory."""
    logits, targets = k.head(h)[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    pieces = zip(logits.split(3), targets.split(3), strict=True)
    sum_ = sum(F.cross_entropy(a, b, reduction="sum") for a, b in pieces)
    return sum_ / ((targets != IGNORED).sum() if n is None else n[0])


ADDITIVE = {
    "in pieces": Form(in_pieces),
    "causal": Form(causal),
    "smoothed": Form(smoothed),
    "class weights": Form(class_weights, count_classes),
    "ignore_index 0": Form(padding_is_zero),
    "nll": Form(by_logarithms),
    "classes second": Form(classes_second),
    "penalty": Form(with_penalty),
    "penalty in place": Form(penalty_in_place),
    "offset": Form(with_offset),
    "two heads": Form(two_heads, lambda _, y: [shifted(y), shifted(y, 2)]),
    "uncertain": Form(uncertain),
    "stacked": Form(stacked),
    "masked by hand": Form(masked_by_hand),
    "means by hand": Form(
        means_by_hand,
        lambda _, y: [float((y[:, 1:] != IGNORED).float().mean()) * y[:, 1:].numel()],
    ),
    "gathered": Form(gathered),
    "by one hot": Form(by_one_hot),
    "by index": Form(by_index),
    "sum over count": Form(sum_over_count),
    "two choices": Form(two_choices),
    "guarded": Form(guarded),
}


def hidden_in_exp(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return torch.exp(causal(k, h, y, n, m))


def focal(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mean = causal(k, h, y, n, m)
    return (1 - torch.exp(-mean)) ** 2 * mean


def product(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return causal(k, h, y, n, m) * h.pow(2).mean()


def read_twice(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mean = causal(k, h, y, n, m)
    return mean + mean.detach().sqrt() * h.mean()


def drawn_targets(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    kept = torch.rand(y.shape) < 0.5
    return ce(k.head(h), torch.where(kept, y, IGNORED), None)


def own_targets(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return ce(k.head(h), k.second(h).argmax(-1), None)


def written_targets(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    targets = y.clone()
    targets[:, 0] = k.second(h)[:, 0].argmax(-1)
    return ce(k.head(h), targets, None)


def by_sequence(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0].float()
    return ((each(k, h, y) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def item_after_item(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    logits = k.head(h)
    means = [F.cross_entropy(logits[i, :-1], y[i, 1:]) for i in range(len(y))]
    return torch.stack(means).mean()


def smoothed_count(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    mask = mask_of(y)[0].float()
    return (each(k, h, y) * mask).sum() / (mask.sum() + 4.0)


def of_the_batch(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return causal(k, h, y, n, m) * (y == 3).sum()


def in_autocast(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return causal(k, h, y, n, m)


def squares(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    return (k.head(h)[..., 0] - y).pow(2).mean()


def probabilities(k: Losses, h: Tensor, y: Tensor, n: Counts, m: int | None) -> Tensor:
    wanted = F.one_hot(y.clamp(min=0), CLASSES).float()
    return F.cross_entropy(k.head(h).flatten(0, 1), wanted.flatten(0, 1))


HIDDEN = {
    "exp": (Form(hidden_in_exp), "otherwise than as a term of a sum"),
    "focal": (Form(focal), "otherwise than as a term of a sum"),
    "product": (Form(product), "otherwise than as a term of a sum"),
    "read twice": (Form(read_twice), "read by more than a sum"),
    "drawn": (Form(drawn_targets), "do not come of the batch alone"),
    "own": (Form(own_targets), "do not come of the batch alone"),
    "written": (Form(written_targets), "do not come of the batch alone"),
    "by sequence": (Form(by_sequence), "in a way that is not known"),
    "item after item": (Form(item_after_item), "some of the items of a micro-batch"),
    "smoothed count": (Form(smoothed_count), "in a way that is not known"),
    "times a count": (Form(of_the_batch), "otherwise than as a term of a sum"),
    "autocast": (Form(in_autocast), "in a region of its own"),
    "squares": (Form(squares), "no cross entropy"),
    "probabilities": (Form(probabilities), "no cross entropy"),
}
