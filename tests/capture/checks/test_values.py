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


@pytest.mark.parametrize("choice", CHOICES)
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
