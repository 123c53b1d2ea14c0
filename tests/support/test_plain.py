"""A plain run is made once, and no test sees what another has done to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import plain
from tests.support.plain import PlainRuns
from tests.support.runs import assert_same_bits, config_of, reference

TREE: dict[str, Any] = {
    "model": {"python": "tests.support.models:frozen_mlp"},
    "data": {"python": "tests.support.datasets:vectors"},
    "train": {"steps": 2},
}


def test_a_run_is_made_once_for_all_that_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another directory, cut or memory asks for the same one; another seed or optimizer not."""
    made = []
    monkeypatch.setattr(plain, "reference", lambda config: (made.append(config), None)[1])
    runs = PlainRuns()
    same = [{}, {"memory": {"segment": "1KiB"}}, {"train": {"steps": 2, "recompute": True}}]
    other = [
        {"train": {"steps": 3}},
        {"train": {"steps": 2, "seed": 4}},
        {"optimizer": {"lr": 0.5}},
        {"optimizer": {"clip_norm": 0.3}},
        {"data": {**TREE["data"], "micro_batches": 2}},
        {"model": {**TREE["model"], "dtype": "bfloat16"}},
    ]
    for number, tree in enumerate([*same, *other]):
        runs.of(config_of(tmp_path / str(number), {**TREE, **tree}))
    assert len(made) == 1 + len(other)


@pytest.mark.trains
def test_a_copy_that_is_spoilt_is_nobody_elses(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", TREE)
    runs = PlainRuns()
    spoilt = runs.of(config)
    spoilt.losses.clear()
    for tensor in spoilt.parameters.values():
        tensor.zero_()
    expected = reference(config)
    assert runs.of(config).losses == expected.losses
    assert_same_bits(runs.of(config).parameters, expected.parameters)
