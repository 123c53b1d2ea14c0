"""Runs whose micro-batches have unequally many trained tokens, against plain PyTorch loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError, RunError
from swaptrain.reference import train_reference
from tests.compute.weighting.answers import answers
from tests.support import models
from tests.support.killing import final_state, metrics_key
from tests.support.runs import (
    assert_same_bits,
    config_of,
    losses,
    norms,
    reference,
    rows,
    trained,
    weights,
)
from tests.whole.test_resume import interrupted

pytestmark = pytest.mark.trains

LANGUAGE: dict[str, Any] = {
    "model": {"python": "tests.support.models:language"},
    "data": {
        "python": "tests.compute.weighting.answers:answers",
        "micro_batch": 1,
        "micro_batches": 4,
    },
    "optimizer": {"clip_norm": 0.5},
    "train": {"steps": 3},
    "memory": {"segment": "16KiB"},
}


def with_counts(*counts: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return LANGUAGE on items with so many trained labels."""
    tree = {**LANGUAGE, "data": {**LANGUAGE["data"], "kwargs": {"counts": list(counts)}}}
    return {**tree, **{name: {**tree.get(name, {}), **new} for name, new in sections.items()}}


def plain_loop(steps: int, m: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train `language` as a user would: sums divided by the labels of the step, then clipped."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, data = models.language().train(), answers()
    groups = [[p for p in model.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1e-2,
        weight_decay=0.1,
        fused=True,
    )
    found, sizes = [], []
    for step in range(steps):
        batches = [data[(step * m + i) % len(data)] for i in range(m)]
        count = sum(int((b["labels"][1:] != -100).sum()) for b in batches)
        parts = []
        for batch in batches:
            x = model.out(model.block(model.embedding(batch["input_ids"][None])))
            sum_ = F.cross_entropy(x[0, :-1], batch["labels"][1:], reduction="sum")
            part = sum_ / count
            part.backward()
            parts.append(float(part.detach()))
        total = 0.0
        for value in parts:
            total += value
        found.append(total)
        sizes.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found, sizes, {n: p.detach() for n, p in model.named_parameters()}


def test_a_run_takes_the_steps_of_a_plain_loop_over_tokens(tmp_path: Path) -> None:
    """Losses, norms, clipped weights, bit for bit, with an item that has no label; so does the
    reference, and a run that is killed in the middle of its second step."""
    config = config_of(tmp_path / "run", LANGUAGE)
    run_dir = trained(config)
    found, sizes, parameters = plain_loop(3, 4)
    assert losses(run_dir) == found
    assert norms(run_dir) == sizes
    assert_same_bits(weights(run_dir), parameters)
    plain = reference(config)
    assert plain.losses == found
    assert plain.grad_norms == sizes
    assert_same_bits(plain.parameters, parameters)
    recorded = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert recorded["train"]["loss_weighting"] == "tokens"
    config = config_of(tmp_path / "killed", LANGUAGE)
    segments = 4
    interrupted(config, segments + 2)
    trained(config)
    assert metrics_key(config.run.dir) == metrics_key(run_dir)
    assert final_state(config.run.dir) == final_state(run_dir)


def test_a_fused_run_in_bfloat16_is_the_reference(tmp_path: Path) -> None:
    """Without clipping, where an update follows a backward, and with losses that are saved."""
    tree = {**LANGUAGE, "optimizer": {}, "model": {**LANGUAGE["model"], "dtype": "bfloat16"}}
    config = config_of(tmp_path / "run", {**tree, "train": {"steps": 2, "recompute": False}})
    run_dir, plain = trained(config), reference(config)
    assert losses(run_dir) == plain.losses
    assert_same_bits(weights(run_dir), plain.parameters)


@pytest.mark.proof
def test_micro_batches_weigh_alike_where_that_is_asked_for(tmp_path: Path) -> None:
    """And in a run that was begun before there was a choice, which goes on as it began."""
    tree = with_counts(11, 1, 4, 7, train={"loss_weighting": "micro_batches", "steps": 2})
    config = config_of(tmp_path / "run", tree)
    run_dir, plain = trained(config), reference(config)
    assert losses(run_dir) == plain.losses
    recorded = run_dir / "config.yaml"
    text = recorded.read_text()
    assert "loss_weighting: micro_batches" in text
    recorded.write_text(text.replace("  loss_weighting: micro_batches\n", ""))
    config = config_of(run_dir, with_counts(11, 1, 4, 7, train={"steps": 3}))
    trained(config)
    longer = config_of(run_dir, with_counts(11, 1, 4, 7, train={"steps": 3}))
    plain = reference(longer.model_copy(update={"train": load_config(recorded).train}))
    assert losses(run_dir) == plain.losses
    assert "loss_weighting: micro_batches" in recorded.read_text()
    with pytest.raises(ConfigError, match=r"loss_weighting: micro_batches -> tokens"):
        tree = with_counts(11, 1, 4, 7, train={"steps": 3, "loss_weighting": "tokens"})
        trained(config_of(run_dir, tree))


def test_a_step_without_a_label_is_refused_by_its_items(tmp_path: Path) -> None:
    """After the steps before it, which stay."""
    tree = with_counts(3, 4, 0, 0, data={"micro_batches": 2})
    with pytest.raises(RunError, match=r"step 2: .*items 2, 3 of .*answers"):
        trained(config_of(tmp_path / "run", tree))
    assert len(rows(tmp_path / "run")) == 1


def test_held_out_loss_weighs_tokens(tmp_path: Path) -> None:
    """The sum over all held-out tokens, divided by their number."""
    tree = with_counts(
        4, train={"steps": 1}, optimizer={"lr": 1e-30, "weight_decay": 0.0, "clip_norm": None}
    )
    tree["eval"] = {"python": LANGUAGE["data"]["python"], "every": 1, "batches": 8}
    run_dir = trained(config_of(tmp_path / "run", tree))
    torch.manual_seed(3)
    model, data = models.language().eval(), answers()
    sums, count = 0.0, 0
    with torch.no_grad():
        for i in range(8):
            x = model.out(model.block(model.embedding(data[i]["input_ids"][None])))
            labels = data[i]["labels"][1:]
            sums += float(F.cross_entropy(x[0, :-1], labels, reduction="sum"))
            count += int((labels != -100).sum())
    assert rows(run_dir)[0]["eval_loss"] == pytest.approx(sums / count, rel=1e-6)


class Focal(models.Language):
    """A loss that no sum of parts is."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return torch.exp(super().forward(input_ids, labels))


def focal() -> Focal:
    return Focal()


@pytest.mark.proof
def test_what_cannot_be_weighted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default in one line, once labels are found that are not trained; else it is refused."""
    model = {"python": "tests.compute.weighting.test_weighting:focal"}
    tree = with_counts(11, 2, 4, 7, model=model, train={"steps": 2})
    config = config_of(tmp_path / "run", {**tree, "optimizer": {}})
    run_dir = trained(config)
    assert (
        capsys.readouterr().out.count("unequally many trained labels, and every micro-batch") == 1
    )
    assert losses(run_dir) == reference(config).losses
    tree["train"] = {"steps": 2, "loss_weighting": "tokens"}
    with pytest.raises(ConfigError, match="otherwise than as a term of a sum"):
        trained(config_of(tmp_path / "other", tree))
    assert not (tmp_path / "other").exists()


def test_the_reference_divides_further_terms_by_the_micro_batches() -> None:
    """In plain PyTorch by hand: a penalty, and two heads of which one has equally many labels."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(4, 5)

        def parts(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return self.out(x), self.out.weight.pow(2).mean()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits, penalty = self.parts(x, labels)
            loss = F.cross_entropy(logits, labels) + 0.1 * penalty
            loss += F.nll_loss(logits.log_softmax(-1), labels.clamp(min=0)) / 2
            return loss

    def batch(step: int, m: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(m)
        labels = torch.randint(0, 5, (6,), generator=g)
        labels[: 2 * m] = -100
        return {"x": torch.randn(6, 4, generator=g), "labels": labels}

    result = train_reference(Model, batch, steps=1, micro_batches=3, optimizer="sgd", lr=0.1)
    torch.manual_seed(0)
    model, total = Model(), 0.0
    for m in range(3):
        given = batch(1, m)
        logits, penalty = model.parts(**given)
        labels = given["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum") / 12 + 0.1 * penalty / 3
        loss += F.nll_loss(logits.log_softmax(-1), labels.clamp(min=0)) / 3 / 2
        loss.backward()
        total += float(loss.detach())
    assert result.losses == pytest.approx([total], abs=1e-6)
    expected = model.out.weight.detach() - 0.1 * model.out.weight.grad
    torch.testing.assert_close(result.parameters["out.weight"], expected, atol=1e-6, rtol=1e-6)


class FocalWhenHeldOut(models.Language):
    """A mean over tokens in training, and another loss in evaluation mode."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        return loss if self.training else torch.exp(-loss)


def focal_when_held_out() -> FocalWhenHeldOut:
    return FocalWhenHeldOut()


def test_held_out_losses_that_cannot_be_weighted_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps weigh tokens then, and an evaluation its items."""
    model = {"python": "tests.compute.weighting.test_weighting:focal_when_held_out"}
    data = {"python": LANGUAGE["data"]["python"], "kwargs": {"counts": [4, 7]}}
    tree = {**LANGUAGE, "model": model, "train": {"steps": 1}}
    config = config_of(tmp_path / "run", {**tree, "eval": {**data, "every": 1, "batches": 2}})
    run_dir = trained(config)
    assert "the loss in evaluation mode cannot be weighted by tokens" in capsys.readouterr().out
    assert rows(run_dir)[0]["eval_loss"] == reference(config).eval_losses[1]
