"""The data of a run: its micro-batches, its held-out batches, and what they weigh in a loss."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.compute.weighting.counts import LossWeights
from swaptrain.compute.weighting.held_out import HeldOutWeights
from swaptrain.config.schema import Config
from swaptrain.data import Batches, Opening, find_data, find_eval
from swaptrain.errors import ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.ranks.agreement import agree, in_all
from swaptrain.ranks.group import Group
from swaptrain.ranks.same_data import agree_on_data
from swaptrain.run.steps.evaluation import Evaluation
from swaptrain.units import how_many

__all__ = ["RunData", "loss_weights"]


class RunData:
    """The data of a run, looked at; nothing is written of it before all ranks have the same.

    Raises ConfigError, in all ranks where there are several.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        group: Group | None,
        *,
        fresh: bool,
        note: Callable[[str], None],
    ) -> None:
        """Look at it, and compare it with what the run began with and what other ranks have."""
        self._prepared, self._group, self._note = prepared, group, note
        self._counts: dict[str, int] = {}

        def look() -> dict[str, Opening]:
            return _looked_at(config, prepared, fresh=fresh, sketched=group is not None, note=note)

        self._openings = look() if group is None else in_all(group, look)
        if group is not None:
            agree_on_data(group, {name: one.record for name, one in self._openings.items()})

    def batches(self) -> Batches:
        """Return the micro-batches of the steps."""
        data = self._openings["data"].open()
        self._counts["items"] = len(data)
        return data

    def evaluation(self, config: Config, data: Batches) -> Evaluation | None:
        """Return the held-out batches, whose items are like those of `data`."""
        if config.eval is None:
            return None
        held_out = self._openings["eval"].open(like=data)
        self._counts["held-out batches"] = held_out.micro_batches
        prepared = self._prepared
        expected = prepared.plan.layouts.evaluated_batches
        if held_out.micro_batches != expected:
            raise ConfigError(
                f"eval: its data has {how_many(held_out.micro_batches, 'batch', 'batches')} now "
                f"and had {expected} when this start looked first: start again when nothing "
                "changes it"
            )
        by_tokens = prepared.weighting.by_tokens
        weights = HeldOutWeights(held_out, prepared.plan.captured, by_tokens=by_tokens)
        for remark in weights.remarks:
            self._note(remark)
        return Evaluation(weights, config.eval.every, config.eval.first, config.eval.patience)

    def keep(self) -> None:
        """Record in the run directory what the data is, which has been opened."""
        if self._group is not None:
            agree(self._group, "data", self._counts)
        for opening in self._openings.values():
            opening.keep()


def _looked_at(
    config: Config,
    prepared: Prepared,
    *,
    fresh: bool,
    sketched: bool,
    note: Callable[[str], None],
) -> dict[str, Opening]:
    """Return the data of each section that has any; `sketched`: with items for ranks to compare."""
    vocabulary = prepared.factory.vocabulary
    found = {
        "data": find_data(
            config.data,
            seed=config.train.seed,
            run_dir=config.run.dir,
            model_vocabulary=vocabulary,
            fresh=fresh,
            note=note,
        )
    }
    if config.eval is not None:
        found["eval"] = find_eval(
            config.eval,
            config.data,
            run_dir=config.run.dir,
            model_vocabulary=vocabulary,
            note=note,
            sketched=sketched,
        )
    return found


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
