"""What runs with parameters in ranges must have: the bits of plain PyTorch and of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.reference import ReferenceResult
from swaptrain.store.format.root import read_root
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.verify import verify_run
from tests.support.runs import assert_same_bits, losses, norms, rows, trained, weights
from tests.whole.test_resume import interrupted, same_end

__all__ = [
    "assert_clipped_within_rounding",
    "assert_plain_bits",
    "assert_same_run",
    "ranges_of",
    "resumes_with_its_ranges",
]


def ranges_of(run_dir: Path) -> list[str]:
    """Return the names of all ranges of a run."""
    root = read_root(run_dir)
    assert root is not None
    return [name for row in root.segments for name in row.parameters if "[" in name]


def assert_plain_bits(run_dir: Path, plain: ReferenceResult) -> None:
    """Losses, and the weights under the names of the model."""
    assert losses(run_dir) == plain.losses
    stored = {n: t for n, t in weights(run_dir).items() if n not in plain.buffers}
    assert_same_bits(stored, plain.parameters)


def assert_same_run(divided: Path, whole: Path) -> None:
    """Losses, weights and the optimizer's state, as they are exported."""
    assert ranges_of(divided) and not ranges_of(whole)
    assert losses(divided) == losses(whole)
    assert_same_bits(weights(divided), weights(whole))
    for run_dir in (whole, divided):
        export_weights(run_dir, run_dir / "state.safetensors", None, state=True)
    assert_same_bits(*(load_file(run_dir / "state.safetensors") for run_dir in (divided, whole)))


def assert_clipped_within_rounding(run_dir: Path, plain: ReferenceResult) -> None:
    """The global norm is formed of the ranges' norms: its last bits may be others."""
    assert norms(run_dir) == pytest.approx(plain.grad_norms, rel=1e-6)
    assert losses(run_dir) == pytest.approx(plain.losses, rel=1e-5)


def resumes_with_its_ranges(job: Callable[[str, int | None], Config], key: str, most: int) -> None:
    """Kill a run in ranges, with held-out losses; `job` gives one by its name and their size.

    It goes on with those ranges alone, to the end of one that was never killed.
    """
    straight = trained(job("straight", most))
    config = job("run", most)
    interrupted(config, 9)
    with pytest.raises(ConfigError, match=rf"memory\.{key}"):
        trained(job("run", 2 * most))
    run_dir = trained(config)
    assert ranges_of(run_dir)
    same_end(run_dir, straight)
    verify_run(run_dir)
    whole = trained(job("whole", None))
    assert [r["eval_loss"] for r in rows(whole)] == [r["eval_loss"] for r in rows(straight)]
