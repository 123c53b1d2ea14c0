"""Steps with a learning rate of 0 are said, and refused where no other step is left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swaptrain.compute.learning_rate import learning_rate
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.run.idle_rates import check_rates, first_idle_step, go_on_keys
from swaptrain.verbs.plan import plan
from tests.support.runs import rows, trained


def scheduled(steps: int, name: str, run_dir: Path = Path("run"), **fields: Any) -> Config:
    """Return the config of a small run with a schedule."""
    return Config.model_validate({
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "optimizer": {"name": "sgd", "lr": 1e-2, "schedule": {"name": name, **fields}},
        "train": {"steps": steps, "threads": 1},
        "device": "cpu",
        "memory": {"host": "256MiB"},
        "store": {"commit": {"lag": 1}},
        "run": {"dir": str(run_dir)},
    })  # fmt: skip


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 4, 9])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_the_first_idle_step_is_the_first_one_whose_rate_is_zero(
    name: str, warmup: int, fraction: float, floor: float
) -> None:
    """Found as by looking at every step, also where the warmup is longer than the decay."""
    config = scheduled(
        12, name, warmup_steps=warmup, decay_steps=6, min_lr_ratio=floor, decay_fraction=fraction
    )
    schedule = config.optimizer.schedule
    rates = [learning_rate(step, lr=1e-2, schedule=schedule) for step in range(1, 13)]
    expected = rates.index(0.0) + 1 if 0.0 in rates else None
    assert first_idle_step(config, 12) == expected


@pytest.mark.parametrize(
    ("config", "done", "said"),
    [
        (scheduled(4, "constant"), 0, None),
        (scheduled(4, "cosine", min_lr_ratio=0.1), 0, None),
        (scheduled(8, "cosine", min_lr_ratio=0.1, decay_steps=4), 4, None),
        (scheduled(4, "cosine"), 0, "step 4 has the learning rate 0: .* ends at step 4"),
        (scheduled(4, "linear"), 3, "step 4 has the learning rate 0"),
        (scheduled(9, "wsd", decay_steps=6), 0, "steps 6 to 9 have .* more than 9"),
        (scheduled(9, "cosine", decay_steps=6), 5, r"!steps 6 to 9 .* with --accept-change"),
        (scheduled(8, "cosine", decay_steps=4), 4, "!steps 5 to 8 have .* no other step is left"),
        (scheduled(8, "linear", decay_steps=4), 6, "!steps 7 to 8 have"),
        (scheduled(8, "wsd", decay_steps=4), 7, "!step 8 has"),
        (scheduled(1, "cosine"), 0, "!step 1 has .* ends at step 1"),
        (scheduled(1, "linear", warmup_steps=1), 0, None),
        (scheduled(9, "linear", warmup_steps=5, decay_steps=3), 0, "6 to 9 .* its 5 warmup steps"),
        (scheduled(4, "cosine", decay_steps=4), 4, None),
    ],
)  # fmt: skip
def test_what_is_said_and_what_is_refused(config: Config, done: int, said: str | None) -> None:
    """A last step of a schedule that was begun is done; nothing starts to multiply by zero."""
    if said is None:
        assert check_rates(config, done) is None
    elif said.startswith("!"):
        with pytest.raises(ConfigError, match=said[1:]):
            check_rates(config, done)
    else:
        found = check_rates(config, done)
        assert found is not None
        assert re.search(said, found)


@pytest.mark.proof
def test_going_on_after_the_end_is_refused_and_the_advice_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the end of a run proposes trains; without it nothing is touched."""
    run_dir = trained(scheduled(4, "cosine", tmp_path / "run"))
    assert go_on_keys(scheduled(4, "constant"), 4) == "train.steps=8"
    out = "".join(capsys.readouterr())
    assert "train.steps=8 optimizer.schedule.decay_steps=8 --accept-change" in out.replace(
        "\n", " "
    )
    assert "step 4 has the learning rate 0" in out
    further = scheduled(8, "cosine", run_dir)
    for refused in (trained, plan):
        with pytest.raises(ConfigError, match="steps 5 to 8 have the learning rate 0"):
            refused(further)
    assert len(rows(run_dir)) == 4
    trained(scheduled(8, "cosine", run_dir, decay_steps=8), accept_change=True)
    rates = [row["lr"] for row in rows(run_dir)]
    assert len(rates) == 8
    assert all(rate > 0 for rate in rates[4:7])
    with pytest.raises(ConfigError, match="step 1 has the learning rate 0"):
        trained(scheduled(1, "cosine", tmp_path / "other"))
    assert not (tmp_path / "other").exists()
