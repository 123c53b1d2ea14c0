"""Held-out losses whose batches have unequally many items and trained tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.errors import RunError
from tests.compute.weighting.answers import answers
from tests.support import models
from tests.support.runs import config_of, reference, rows, trained, weights

pytestmark = pytest.mark.trains

ANSWERS = "tests.compute.weighting.answers:answers"
LANGUAGE: dict[str, Any] = {
    "model": {"python": "tests.support.models:language"},
    "data": {"python": ANSWERS, "micro_batch": 3, "micro_batches": 2},
    "optimizer": {"name": "sgd"},
    "train": {"steps": 2},
    "eval": {"python": ANSWERS, "every": 2, "batches": "all"},
    "memory": {"segment": "16KiB"},
}


class WithNumbers(models.Language):
    """Returns a sum of losses, and beside it one of them, an entropy and a count."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.out(self.block(self.embedding(input_ids)))[:, :-1]
        targets = labels[:, 1:].flatten()
        cross = F.cross_entropy(logits.flatten(0, 1), targets)
        penalty = 1e-3 * logits.square().mean()
        right = (logits.flatten(0, 1).argmax(-1) == targets).sum()
        found = {"loss": cross + penalty, "cross": cross, "penalty": penalty, "right": right}
        return found | {"logits": logits, "name": "no number"}


def with_numbers() -> nn.Module:
    return WithNumbers()


class MeansByHand(models.Language):
    """Divides the mean over all labels by the trained part of them."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.block(self.embedding(input_ids)))[:, :-1]
        mask = (labels[:, 1:] != -100).float()
        targets = labels[:, 1:].clamp(min=0)
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (each * mask).mean() / mask.mean()


def means_by_hand() -> nn.Module:
    return MeansByHand()


def test_each_held_out_token_counts_once(tmp_path: Path) -> None:
    """Eight items by threes: the sum over all trained tokens by their number, as by hand."""
    config = config_of(tmp_path / "run", LANGUAGE)
    found = rows(trained(config))[-1]["eval_loss"]
    assert found == reference(config).eval_losses[2]
    assert found == pytest.approx(_by_hand(config), abs=1e-6)


@pytest.mark.proof
def test_so_it_does_where_a_mean_is_divided_by_a_mean(tmp_path: Path) -> None:
    """The last batch has fewer items, of which its own mean is the mean."""
    model = {"python": "tests.compute.weighting.test_held_out:means_by_hand"}
    config = config_of(tmp_path / "run", {**LANGUAGE, "model": model})
    found = rows(trained(config))[-1]["eval_loss"]
    assert found == pytest.approx(_by_hand(config), abs=1e-6)


def _by_hand(config: Config) -> float:
    model, data = models.language().eval(), answers()
    model.load_state_dict(weights(config.run.dir))
    total, count = 0.0, 0
    for index in range(len(data)):
        item = data[index]
        with torch.no_grad():
            logits = model.out(model.block(model.embedding(item["input_ids"][None])))[0, :-1]
        total += float(F.cross_entropy(logits, item["labels"][1:], reduction="sum"))
        count += int((item["labels"][1:] != -100).sum())
    return total / count


def test_accuracy_is_a_share_of_the_counted_labels(tmp_path: Path) -> None:
    """As by hand; a first line has it too, and perplexity."""
    config = config_of(tmp_path / "run", LANGUAGE)
    first, last = rows(trained(config))
    model, data = models.language().eval(), answers()
    model.load_state_dict(weights(config.run.dir))
    right = count = 0
    for index in range(len(data)):
        item = data[index]
        with torch.no_grad():
            logits = model.out(model.block(model.embedding(item["input_ids"][None])))[0, :-1]
        wanted = item["labels"][1:]
        right += int((logits.argmax(-1) == wanted)[wanted != -100].sum())
        count += int((wanted != -100).sum())
    assert last["eval_accuracy"] == right / count
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
    assert {"eval_loss_before", "eval_accuracy_before", "eval_perplexity_before"} < first.keys()


def test_the_numbers_of_the_forward_are_averaged(tmp_path: Path) -> None:
    """By tokens, without a change of the loss; those of a part of the loss are not weighted twice.

    A forward's own accuracy takes the place of the one that is counted.
    """
    model = {"python": "tests.compute.weighting.test_held_out:with_numbers"}
    config = config_of(tmp_path / "run", {**LANGUAGE, "model": model})
    found = rows(trained(config))[-1]
    assert found["eval_loss"] == reference(config).eval_losses[2]
    net, data = WithNumbers().eval(), answers()
    net.load_state_dict(weights(config.run.dir))
    sums: dict[str, float] = dict.fromkeys(("cross", "penalty", "right"), 0.0)
    total = 0
    for first in range(0, len(data), 3):
        items = [data[i] for i in range(first, min(first + 3, len(data)))]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        with torch.no_grad():
            given = net(**batch)
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += count
        for name in sums:
            sums[name] += float(given[name]) * count if count else 0.0
    for name, value in sums.items():
        assert found[f"eval_{name}"] == pytest.approx(value / total, rel=1e-5), name
    assert "eval_logits" not in found and "eval_name" not in found
    # The penalty weighs by items in the loss, and by tokens beside it.
    assert found["eval_loss"] == pytest.approx(
        found["eval_cross"] + found["eval_penalty"], abs=1e-3
    )


def test_batches_weigh_by_items_where_steps_do_not_weigh_tokens(tmp_path: Path) -> None:
    """Of as many tokens each, so that no batch is without one."""
    counts = {"kwargs": {"counts": [5, 3, 9]}}
    tree = {**LANGUAGE, "train": {"steps": 2, "loss_weighting": "micro_batches"}}
    tree |= {name: {**LANGUAGE[name], **counts} for name in ("data", "eval")}
    config = config_of(tmp_path / "run", tree)
    assert rows(trained(config))[-1]["eval_loss"] == reference(config).eval_losses[2]


def test_held_out_data_without_a_trained_token_is_named(tmp_path: Path) -> None:
    """There is no loss to say."""
    tree = {**LANGUAGE, "eval": {**LANGUAGE["eval"], "kwargs": {"counts": [0]}}}
    with pytest.raises(RunError, match=r"eval: no label of all 8 items of eval\.python"):
        trained(config_of(tmp_path / "run", tree))
