"""The data of a run: its micro-batches, its held-out batches, and what they weigh in a loss."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.compute.weighting.counts import LossWeights
from swaptrain.compute.weighting.held_out import HeldOutWeights
from swaptrain.config.schema import Config
from swaptrain.data import Batches, open_data, open_eval
from swaptrain.errors import ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.run.steps.evaluation import Evaluation
from swaptrain.units import how_many

__all__ = ["loss_weights", "open_batches", "open_evaluation"]


def open_batches(
    config: Config, prepared: Prepared, *, fresh: bool, note: Callable[[str], None]
) -> Batches:
    """Return the micro-batches of the steps; raises ConfigError."""
    return open_data(
        config.data,
        seed=config.train.seed,
        run_dir=config.run.dir,
        model_vocabulary=prepared.factory.vocabulary,
        fresh=fresh,
        note=note,
    )


def open_evaluation(
    config: Config, prepared: Prepared, data: Batches, note: Callable[[str], None]
) -> Evaluation | None:
    """Return the held-out batches, whose items are like those of `data`; raises ConfigError."""
    if config.eval is None:
        return None
    held_out = open_eval(
        config.eval,
        config.data,
        run_dir=config.run.dir,
        model_vocabulary=prepared.factory.vocabulary,
        like=data,
        note=note,
    )
    expected = prepared.plan.layouts.evaluated_batches
    if held_out.micro_batches != expected:
        raise ConfigError(
            f"eval: its data has {how_many(held_out.micro_batches, 'batch', 'batches')} now and "
            f"had {expected} when this start looked first: start again when nothing changes it"
        )
    weights = HeldOutWeights(
        held_out, prepared.plan.captured, by_tokens=prepared.weighting.by_tokens
    )
    for remark in weights.remarks:
        note(remark)
    return Evaluation(weights, config.eval.every, config.eval.first, config.eval.patience)


def loss_weights(
    config: Config, prepared: Prepared, data: Batches, note: Callable[[str], None]
) -> LossWeights:
    """Return what reads the micro-batches of a step, and weighs their losses."""
    weighting = prepared.weighting
    return LossWeights(
        data,
        weighting,
        prepared.plan.captured,
        note,
        may_differ=weighting.may_differ(config.data),
    )
