"""What the host learns of a device after the instruction has begun: norms, and what has changed.

On ordinary memory with queues that are late, where a number that is looked at too early is NaN.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swaptrain.compute import runner
from swaptrain.compute.copy_streams import StreamDevice
from swaptrain.compute.runner import Operands, Runner
from swaptrain.compute.saved_tensors import SavedTensors
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.errors import RunError
from swaptrain.planning import prepare
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.run import assemble
from swaptrain.run.steps.executor import Executor
from swaptrain.run.steps.training import Training
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.support.streams import LateStreams

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_a_gradient_that_is_not_finite_is_found_behind_its_copy(
    clip_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of its segment is written, and while the next instruction is under way."""
    tree: dict[str, Any] = {
        "model": {"python": "tests.whole.test_not_finite:no_derivative"},
        "data": {"python": "tests.support.datasets:vectors"},
        "memory": {"segment": "1KiB"},
        "optimizer": {"clip_norm": clip_norm},
    }
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    written = list[Instruction]()

    def noted(instruction: Instruction, _: Slabs) -> None:
        written.append(instruction)

    monkeypatch.setattr(assemble, "Executor", partial(Executor, computed=noted))
    with pytest.raises(RunError, match=r"gradient of middle\.weight \(segment (\d)\)") as found:
        trained(config_of(tmp_path / "run", tree))
    segment = int(str(found.value).split("(segment ")[1][0])
    kinds = Operation.UPDATE, Operation.NORMS
    assert not [i for i in written if i.segment == segment and i.operation in kinds]


class Rewriting(nn.Module):
    """Changes one half of a tensor after the other one was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unsafe_chunk(self.first(x) * 2, 2, dim=-1)
        a.mul_(1.5)
        left = a * a.detach()
        b.mul_(3)
        loss: Tensor = self.last(torch.cat((left, b * b.detach()), -1)).square().mean()
        return loss


def rewriting() -> nn.Module:
    return Rewriting()


@pytest.mark.parametrize("known", proof_but([False, True], False))
def test_what_changed_after_it_was_saved_is_not_taken(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views may have versions of their own, as those of recurrent layers."""
    tree: dict[str, Any] = {
        "model": {"python": "tests.whole.test_late_answers:rewriting"},
        "data": {"python": "tests.support.datasets:vectors"},
        "memory": {"segment": "1KiB"},
        "train": {"steps": 2, "seed": 3, "threads": 1, "recompute": False},
    }
    plain = trained(config_of(tmp_path / "plain", tree))
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    measure, backward, draws = Runner.measure_saved, Runner.backward, runner.draws
    unlike, recomputed = list[int](), list[int]()
    turned: list[int] = []

    def measured(self: Runner, segment: int, operands: Operands) -> SavedTensors:
        found = measure(self, segment, operands)
        unlike.extend(number for number, match in found.matches.items() if match is None)
        return found

    def unknown(*args: Any, matches: Any, **options: Any) -> SavedTensors:
        return SavedTensors(*args, matches={}, **options)

    def turning(self: Runner, segment: int, *args: Any, **options: Any) -> Any:
        turned.append(segment)
        try:
            return backward(self, segment, *args, **options)
        finally:
            turned.clear()

    def drawn(*args: Any) -> Any:
        recomputed.extend(turned)  # a backward runs the segment's code only where it recomputes
        return draws(*args)

    run = Training.run

    def from_here(training: Training) -> None:
        recomputed.clear()
        run(training)

    monkeypatch.setattr(Runner, "measure_saved", measured)
    monkeypatch.setattr(Runner, "backward", turning)
    monkeypatch.setattr(runner, "draws", drawn)
    if not known:
        monkeypatch.setattr(runner, "SavedTensors", unknown)
    monkeypatch.setattr(Training, "run", from_here)
    copied = trained(config_of(tmp_path / "copied", tree))
    assert unlike and recomputed.count(1) == (0 if known else 2 * 3)
    assert losses(copied) == losses(plain)
    assert_same_bits(weights(copied), weights(plain))
