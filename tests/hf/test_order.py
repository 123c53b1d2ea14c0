"""MapStyle come in the order in which a real Trainer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer, default_data_collator

from swaptrain.errors import ConfigError
from swaptrain.hf.order import EpochShape, InOrder, Placed, collator
from tests.hf.tiny import Noted, arguments, items, llama


class Looking(Trainer):
    """A Trainer that notes what each step has, and computes nothing."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.steps = [*getattr(self, "steps", []), [row.tolist() for row in inputs["input_ids"]]]
        return sum(p.sum() * 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("count", "changed"),
    [
        (11, {"gradient_accumulation_steps": 2}),
        (11, {"dataloader_drop_last": True}),
        (12, {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 4}),
        (9, {"data_seed": 5, "seed": 3}),
        (3, {"per_device_train_batch_size": 4, "num_train_epochs": 3}),
    ],
)
def test_the_rows_of_each_batch_are_those_of_a_trainer(
    tmp_path: Path, count: int, changed: dict[str, Any]
) -> None:
    args = arguments(tmp_path, **changed)
    data = items(count)
    trainer = Looking(llama(), args, train_dataset=data)
    trainer.train()
    shape = EpochShape(
        count,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.dataloader_drop_last,
    )
    seed = None
    if args.train_sampling_strategy == "random":
        seed = args.seed if args.data_seed is None else args.data_seed
    ours = InOrder(data, shape, seed)
    seen = []
    for epoch in range(int(args.num_train_epochs)):
        ours.set_epoch(epoch)
        for first in range(0, len(ours), shape.batch):
            rows = [ours[place] for place in range(first, first + shape.batch)]
            if real := [row.item["input_ids"].tolist() for row in rows if row.counts]:
                seen.append(real)
    assert seen == trainer.steps
    assert trainer.state.global_step == shape.steps * int(args.num_train_epochs)
    assert trainer.state.epoch == shape.epoch_of(trainer.state.global_step)


@given(
    items=st.integers(1, 60),
    batch=st.integers(1, 7),
    per_step=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_an_epoch_takes_each_item_once_and_fills_less_than_a_step(
    items: int, batch: int, per_step: int, drop_last: bool
) -> None:
    if drop_last and items < batch:
        with pytest.raises(ConfigError, match="too few for one batch"):
            EpochShape(items, batch, per_step, drop_last)
        return
    shape = EpochShape(items, batch, per_step, drop_last)
    rows = InOrder(range(items), shape, 3)
    counted = [rows[place].item for place in range(len(rows)) if rows[place].counts]
    assert len(set(counted)) == len(counted) == shape.taken
    assert items - shape.taken < (batch if drop_last else 1)
    assert 0 <= shape.places - shape.taken < batch * per_step
    assert shape.epoch_of(shape.steps) == 1.0


def test_fillings_have_no_labels_and_the_data_set_keeps_its_own() -> None:
    data = Noted(items(1))
    make = collator(default_data_collator, frozenset({"input_ids", "labels"}))
    rows = [Placed({**data[0], "more": 1}), Placed(data[0], counts=False)]
    batch = make(rows)
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["labels"][0], data.found[0]["labels"])
    assert (batch["labels"][1] == -100).all()
    assert (data.found[0]["labels"] >= 0).all()
    with pytest.raises(ConfigError, match="set dataloader_drop_last"):
        collator(default_data_collator, frozenset({"input_ids"}))(rows)
