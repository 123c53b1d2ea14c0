"""Forwards that read values of their batch: right while the values agree, else refused by item."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.errors import CaptureError
from tests.capture.in_memory import captured_model, cut_everywhere, eager_step, segment_step
from tests.support.matrix import every

pytestmark = pytest.mark.trains

Choice = Callable[[Tensor, Tensor, Tensor], Tensor]

LENGTHS = (5, 3)


def branch(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden * 2 if mask.any() else hidden


def branch_without_bool(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden * 2 if lengths.sum() else hidden


def item(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden[:, : lengths.max().item()]


def number_in_arithmetic(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden / float(lengths.float().mean())


def listed(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    parts = [row[:n].mean(0) for row, n in zip(hidden, lengths.tolist(), strict=True)]
    return torch.stack(parts)


def split(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    rows = hidden.flatten(0, 1)[: int(lengths.sum())]
    return torch.cat([part.cumsum(0) for part in torch.split(rows, lengths.tolist())])


def grouped(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    groups = [
        (key, len(list(group))) for row in mask.tolist() for key, group in itertools.groupby(row)
    ]
    return hidden.mean(1) * len(groups)


def chosen(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden[mask]


def chosen_in_a_dimension(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden[:, mask[0]]


def selected(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden.masked_select(mask[..., None]).view(-1, hidden.shape[-1])


def assigned(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    padded = torch.zeros_like(hidden)
    padded[mask] = hidden.flatten(0, 1)[: int(mask.sum())]
    return padded


def nonzero(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    rows, columns = mask.nonzero(as_tuple=True)
    return hidden[rows, columns]


def where(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden[torch.where(mask)]


def unique(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    values, counts = torch.unique(mask.long() + lengths[:, None], return_counts=True)
    return hidden.mean((0, 1)) * (values * counts)[:, None]


def repeated(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(hidden.mean(1), lengths, dim=0)


def one_hot(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return F.one_hot(lengths).float().T @ hidden.mean(1)


def by_numpy(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return hidden * float(lengths.numpy().astype("float32").std())


def written_in_place(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    count = torch.zeros(4, dtype=torch.long)
    count[1:3] = lengths
    count[1:].add_(1)
    return hidden[:, : count.max().item()]


def a_range(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return sum((hidden[:, i] for i in range(lengths[1])), start=hidden[:, 0])


CHOICES = [
    branch, branch_without_bool, item, number_in_arithmetic, listed, split, grouped, chosen,
    chosen_in_a_dimension, selected, assigned, nonzero, where, unique, repeated, one_hot, by_numpy,
    written_in_place, a_range,
]  # fmt: skip


class Choosing(nn.Module):
    """Three layers, between which the batch's values choose what is computed."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        return self.layers[2](self.choice(hidden, mask, lengths)).square().mean()


def batch(seed: int, lengths: tuple[int, int] = LENGTHS) -> dict[str, Tensor]:
    """Return random vectors; the mask chooses the first `lengths` of 6 in each of 2 rows."""
    g = torch.Generator().manual_seed(seed)
    given = torch.tensor(lengths)
    mask = torch.arange(6) < given[:, None]
    return {"x": torch.randn(2, 6, 8, generator=g), "mask": mask, "lengths": given}


@pytest.mark.parametrize("choice", every(4, CHOICES))
def test_a_choice_by_the_batch_is_plain_pytorchs(choice: Choice, tmp_path: Path) -> None:
    """Bits are equal at every cut; a batch that would choose otherwise is refused by name."""

    def make() -> nn.Module:
        return Choosing(choice)

    batches = [batch(0), batch(1)]
    captured = cut_everywhere(captured_model(make, batches[0], tmp_path))
    captured.checks.verify(batches[1], lambda: "items 2, 3")
    assert len(captured.model.segments) >= 4
    assert not segment_step(captured, make, batches).differences(eager_step(make, batches))
    with pytest.raises(CaptureError, match=r"items 4, 5: .* on which its code depends"):
        other = (0, 0) if choice in (branch, branch_without_bool) else (2, 2)
        captured.checks.verify(batch(2, other), lambda: "items 4, 5")


class Transcribing(nn.Module):
    """Aligns frames with labels, given by rows and padded with -100, or all in one row."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.hidden, self.head, self.flat = nn.Linear(6, 16), nn.Linear(16, 8), flat

    def forward(self, x: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
        there = labels != -100
        scores = self.head(torch.tanh(self.hidden(x)))  # [B, T, classes]
        targets = labels.masked_select(there) if self.flat else labels.clamp(min=0)
        return F.ctc_loss(F.log_softmax(scores, -1).transpose(0, 1), targets, frames, there.sum(-1))


def _sounds(lengths: tuple[tuple[int, int], ...]) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    batches = []
    for pair in lengths:
        labels = torch.randint(1, 8, (2, 5), generator=g)
        for row, length in zip(labels, pair, strict=True):
            row[length:] = -100
        x, frames = torch.randn(2, 16, 6, generator=g), torch.tensor([16, 12])
        batches.append({"x": x, "labels": labels, "frames": frames})
    return batches


@pytest.mark.parametrize("flat", [False, True])
def test_lengths_of_a_ctc_loss_are_those_of_each_micro_batch(flat: bool, tmp_path: Path) -> None:
    """Labels by rows may have other lengths each time; in one row their sum has to stay."""
    batches = _sounds(((3, 4), (5, 2), (4, 3)) if flat else ((3, 4), (5, 1), (1, 1)))

    def factory() -> nn.Module:
        return Transcribing(flat)

    pieces = cut_everywhere(captured_model(factory, batches[0], tmp_path))
    plain = eager_step(factory, batches)
    assert segment_step(pieces, factory, batches).differences(plain) == []


def test_lengths_of_a_ctc_loss_that_are_computed_are_refused_in_words(tmp_path: Path) -> None:
    """The message says what of a forward has no shape before it runs, and what to do."""

    class Guessing(Transcribing):
        def forward(self, x: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
            scores = self.hidden(x).mean((1, 2))
            return super().forward(x, labels, frames - (scores > 0).long())

    batch = _sounds(((3, 4),))[0]
    with pytest.raises(CaptureError, match="_ctc_loss") as error:
        captured_model(lambda: Guessing(False), batch, tmp_path)
    assert "lengths" in str(error.value)
