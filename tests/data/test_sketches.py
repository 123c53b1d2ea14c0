"""Other content of items is told from other last bits."""

from __future__ import annotations

import json

import pytest
import torch

from swaptrain.data.sketches import is_alike, sketch, sketches


def alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    a, b = (json.loads(json.dumps(sketch({"x": tensor}))) for tensor in (left, right))
    return is_alike(a["x"], b["x"])


def test_last_bits_are_alike_and_other_values_are_not() -> None:
    """Of each kind of tensor, with values that are not finite and without any."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 64, generator=generator)
    assert alike(values, values * (1 + 1e-6)) and alike(values, values.double())
    assert not alike(values, values * 1.01) and not alike(values, values.flip(1))
    assert not alike(values, -values)
    ids = torch.arange(50)
    assert alike(ids, ids.clone()) and not alike(ids, ids.flip(0))
    assert alike(ids[::2], ids[::2].clone())
    assert not alike(ids == 3, ids == 4)
    assert alike(torch.complex(values, values), torch.complex(values, values))
    assert not alike(torch.complex(values, values), torch.complex(values, -values))
    bad = torch.tensor([float("nan"), float("inf"), 1.0])
    assert alike(bad, bad.clone())
    assert alike(torch.empty(0), torch.empty(0)) and alike(torch.tensor(2.0), torch.tensor(2.0))
    assert not alike(torch.tensor(2.0), torch.tensor(3.0))
    assert alike(torch.zeros(4), torch.zeros(4)) and not alike(torch.zeros(4), torch.ones(4))


def test_items_over_the_whole_length_are_looked_at() -> None:
    asked: list[int] = []

    def read(number: int) -> dict[str, torch.Tensor]:
        asked.append(number)
        return {"x": torch.tensor(number)}

    assert [int(number) for number in sketches(read, 10)] == asked == [0, 3, 6, 9]
    assert list(sketches(read, 1)) == ["0"]


@pytest.mark.parametrize("damaged", [None, 3, [1, 2], [1, 2, "x"], "x"])
def test_a_damaged_record_is_another_one(damaged: object) -> None:
    assert not is_alike([1.0, 2.0, 3.0], damaged) and not is_alike(damaged, [1.0, 2.0, 3.0])
