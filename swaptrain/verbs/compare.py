"""The verb `compare`: some steps of a job in plain PyTorch and in swaptrain, bit for bit."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from swaptrain.config.schema import Config
from swaptrain.errors import RunError
from swaptrain.memory.malloc import release
from swaptrain.observe.metrics import read_rows
from swaptrain.observe.progress import Progress
from swaptrain.planning.prepare import Prepared
from swaptrain.reference import ReferenceResult
from swaptrain.run.os_failures import named_failures
from swaptrain.store.disk.durable_files import disk_errors, existing_parent
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.safetensors import StreamedTensor
from swaptrain.units import how_many
from swaptrain.verbs.comparison.need import check_room, plain_need
from swaptrain.verbs.comparison.plain_run import begins_from_files, loaded_model, plain_run
from swaptrain.verbs.comparison.result import ComparedFigure, JobComparison
from swaptrain.verbs.comparison.scope import check_comparable, check_draws, in_directory
from swaptrain.verbs.comparison.table import show_comparison
from swaptrain.verbs.inspection.difference import compare_pieces, full_tensors
from swaptrain.verbs.inspection.differences import TensorDifference
from swaptrain.verbs.inspection.statistics import json_number
from swaptrain.verbs.stored_step import StoredStep, with_step
from swaptrain.verbs.train import train

__all__ = ["compare_with_plain", "print_comparison"]

_TELL_S = 10.0


class _StepsAlone(Progress):
    """Progress on the standard error, without the last line, which names a run that will go."""

    def __init__(self, config: Config) -> None:
        super().__init__(host_budget_bytes=config.memory.host, console=Console(stderr=True))

    def finish(self, text: str) -> None:
        """Say nothing."""


def print_comparison(config: Config, steps: int, note: Callable[[str], None]) -> None:
    """Print the comparison of some steps; raises RunError where they differ, and as below."""
    found = compare_with_plain(config, steps, note)
    show_comparison(found)
    if not found.agrees:
        raise RunError(found.conclusion())


def compare_with_plain(
    config: Config, steps: int, note: Callable[[str], None] = lambda _: None
) -> JobComparison:
    """Take the first steps of a job with both, from its beginning, and compare all that comes out.

    In a temporary directory beside `run.dir`, which is deleted; what lies in `run.dir` is neither
    read nor changed. Raises ConfigError for what cannot be compared, or does not fit in memory.
    """
    check_comparable(config)
    with _directory_beside(config.run.dir) as there:
        config = in_directory(config, there / "run", steps)
        prepared = Prepared(config, None, note, draw=begins_from_files(config))
        check_draws(prepared)
        need = plain_need(prepared.plan)
        check_room(need)
        make = loaded_model(config, prepared)
        vocabulary = prepared.factory.vocabulary
        data = config.data.model_copy(update={"packing": prepared.config.data.packing})
        plain_config = config.model_copy(update={"data": data})
        del prepared  # `make` holds it where it needs it
        note(f"training {how_many(steps, 'step')} in {there}, which is deleted afterwards")
        train(config, progress=_StepsAlone(config))
        gc.collect()
        release()
        check_room(need)
        note(f"plain PyTorch: {how_many(steps, 'step')}, which takes {need.text()}")
        with named_failures(config):
            plain = plain_run(
                plain_config,
                there / "plain",
                make=make,
                vocabulary=vocabulary,
                watch=_watch(plain_config, note),
            )
        note("comparing the weights")
        rows = read_rows(RunPaths(config.run.dir).metrics)
        figures = tuple(_figures(config, rows, plain))
        return with_step(
            config.run.dir,
            None,
            lambda view: _compared(config, view, plain, figures),
            note,
            "compare",
        )


@contextmanager
def _directory_beside(run_dir: Path) -> Iterator[Path]:
    """Make a directory beside a run's, or in the nearest one above; delete it at the end."""
    parent = existing_parent(run_dir.absolute().parent)
    with disk_errors(parent, "make a directory in"):
        there = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}.compare-", dir=parent))
    try:
        yield there
    finally:
        shutil.rmtree(there, ignore_errors=True)


def _watch(config: Config, note: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return what says now and then where plain PyTorch is."""
    said_s = time.monotonic()

    def watch(step: int, micro_batch: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > _TELL_S:
            said_s = time.monotonic()
            note(
                f"plain PyTorch: step {step}/{config.train.steps}, micro-batch "
                f"{micro_batch + 1}/{config.data.micro_batches}"
            )

    return watch


def _figures(
    config: Config, rows: list[dict[str, Any]], plain: ReferenceResult
) -> Iterator[ComparedFigure]:
    by_step: dict[int, Mapping[str, Any]] = {row["step"]: row for row in rows}
    # In 16 bits an unclipped norm is formed of those of blocks.
    exact = config.model.dtype == "float32" or config.optimizer.clip_norm is not None
    for step, (loss, norm) in enumerate(zip(plain.losses, plain.grad_norms, strict=True), 1):
        row = by_step.get(step, {})
        yield ComparedFigure(step, "loss", json_number(loss), row.get("loss"))
        yield ComparedFigure(step, "grad_norm", json_number(norm), row.get("grad_norm"), exact)
        if step in plain.eval_losses:
            held_out = json_number(plain.eval_losses[step])
            yield ComparedFigure(step, "eval_loss", held_out, row.get("eval_loss"))


def _compared(
    config: Config, view: StoredStep, plain: ReferenceResult, figures: tuple[ComparedFigure, ...]
) -> JobComparison:
    stored = full_tensors(view)
    expected = _expected(config, plain, stored)
    differing = []
    for name, tensor in expected.items():
        found = _difference(name, tensor, stored[name]) if name in stored else None
        if found is not None:
            differing.append(found)
    return JobComparison(
        figures=figures,
        tensors=tuple(name for name in expected if name in stored),
        differing=tuple(differing),
        only=(
            tuple(name for name in expected if name not in stored),
            tuple(name for name in stored if name not in expected),
        ),
    )


def _expected(
    config: Config, plain: ReferenceResult, stored: Mapping[str, StreamedTensor]
) -> dict[str, Tensor]:
    """Return plain PyTorch's parameters, then the buffers that a run stores, in its order.

    What is frozen is stored in the dtype that is computed with.
    """
    import torch

    dtype = getattr(torch, config.model.dtype)
    found = {
        name: value.to(dtype).float() if name in plain.rounded else value
        for name, value in plain.parameters.items()
    }
    found.update((name, value) for name, value in plain.buffers.items() if name in stored)
    return found


def _difference(name: str, plain: Tensor, stored: StreamedTensor) -> TensorDifference | None:
    dtype = str(plain.dtype).removeprefix("torch.")
    if tuple(plain.shape) != stored.shape:
        return TensorDifference(name, (tuple(plain.shape), stored.shape), (dtype, stored.dtype))
    values = plain.detach().float() if dtype == "bfloat16" else plain.detach()
    pieces = [values.contiguous().view(-1).numpy()]
    return compare_pieces(name, stored.shape, pieces, stored.pieces, (dtype, stored.dtype))
