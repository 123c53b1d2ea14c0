"""The net under the guards of a capture: once, before a run is created."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from swaptrain.capture.captured import Captured
from swaptrain.config.schema import Config
from swaptrain.errors import CaptureError, ConfigError
from swaptrain.generators import generators_restored
from swaptrain.memory.malloc import release
from swaptrain.models.build import additions, build
from swaptrain.models.factory import Factory
from swaptrain.planning.check_capture.compare import STEPS, Comparison, compare
from swaptrain.planning.check_capture.eager import NotComparable, PlainFails, plain_model
from swaptrain.planning.check_capture.float32 import captured_anew, cut_in_pieces, in_float32
from swaptrain.planning.check_capture.need import MOST_S, flops_s, needed_bytes, needed_s
from swaptrain.planning.prepare import Prepared
from swaptrain.units import format_size, how_many, roomy_size

__all__ = ["check_capture"]

_FEWER_LAYERS = (8, 4, 2, 1)
_LARGE_BYTES = 64 << 20
"""What is large enough to be looked for among garbage, which takes a quarter of a second."""


@dataclass(frozen=True)
class _Subject:
    """What is compared: a plain model and its captured segments, on one micro-batch."""

    make: Callable[[], nn.Module]
    captured: Captured
    remark: str = ""


def check_capture(config: Config, prepared: Prepared, note: Callable[[str], None]) -> None:
    """Compare two steps of the captured graph with plain PyTorch, as `train.check_capture` asks.

    On the processor, in float32, within `memory.host`; all memory is given back. `note` hears what
    came of it. Raises CaptureError where they differ; ConfigError where they must be compared and
    cannot.
    """
    wanted = config.train.check_capture
    if wanted is False:
        return
    begun = time.perf_counter()
    need_bytes = needed_bytes(prepared.plan.captured, config.model.dtype)
    try:
        with generators_restored():
            found, remark = _compared(config, prepared, need_bytes, note)
    except NotComparable as error:
        if wanted == "required":
            raise ConfigError(f"train.check_capture is required: {error}") from error
        note(f"not compared with plain PyTorch: {error}")
        return
    finally:
        if need_bytes > _LARGE_BYTES:
            gc.collect()
        release()
    bits = "same bits"
    if found.difference:
        bits = f"the same within {found.difference:.1g} ({found.where})"
    seconds = time.perf_counter() - begun
    note(f"compared with plain PyTorch{remark}: {bits} ({STEPS} steps, {seconds:.1f} s)")


def _compared(
    config: Config, prepared: Prepared, need_bytes: int, note: Callable[[str], None]
) -> tuple[Comparison, str]:
    batch = in_float32(prepared.planner.batch)
    subject = _subject(config, prepared, batch, need_bytes)
    note("comparing the captured graph with plain PyTorch")
    initial = prepared.built.initial if subject.make == prepared.factory.make else None
    try:
        model = plain_model(
            subject.make,
            config.train.seed,
            initial,
            prepared.built.thawed,
            config.train.freeze or (),
            additions(prepared.factory, prepared.adapter),
        )
    except ConfigError as error:
        raise NotComparable(f"the constructor fails when it is called again: {error}") from error
    try:
        found = compare(model, subject.captured, batch, seed=config.train.seed)
    except PlainFails as error:
        if subject.remark or prepared.device.device.type != "cpu":
            raise  # on a device, or in bfloat16, the user's step may be another one
        raise CaptureError(
            f"{error}: there is no step of it that swaptrain could take. Mend the model, or let "
            "train.check_capture: false train what was captured"
        ) from error
    except CaptureError as error:
        raise CaptureError(f"{error}{subject.remark and f' (compared{subject.remark})'}") from None
    return found, subject.remark


def _subject(
    config: Config, prepared: Prepared, batch: Mapping[str, Tensor], need_bytes: int
) -> _Subject:
    """Return the run's own model, or one of fewer layers where the whole one takes too much."""
    plan, dtype = prepared.plan, config.model.dtype
    on_device = prepared.device.device.type != "cpu"
    seconds = needed_s(plan, dtype=dtype, on_device=on_device)
    if need_bytes <= config.memory.host and seconds <= MOST_S:
        if dtype == "float32" and not on_device:
            return _Subject(prepared.factory.make, plan.captured)
        # The run's own code makes bfloat16 tensors, or makes them on the device.
        captured = captured_anew(prepared.built, batch, tokens=config.memory.tokens)
        remark = "" if dtype == "float32" else " in float32"
        return _Subject(prepared.factory.make, captured, remark)
    if need_bytes > config.memory.host:
        reason = (
            f"that takes {format_size(need_bytes)}, and memory.host is "
            f"{format_size(config.memory.host)}; {roomy_size(need_bytes)} would do"
        )
    else:
        reason = f"that takes about {seconds:.0f} s, more than {MOST_S:.0f}"
    return _smaller(config, prepared.factory, prepared.adapter, batch, reason)


def _smaller(
    config: Config,
    factory: Factory,
    adapter: Mapping[str, Any] | None,
    batch: Mapping[str, Tensor],
    reason: str,
) -> _Subject:
    """Return the same architecture with as many layers as fit. Raises NotComparable with `reason`.

    Its weights are the constructor's.
    """
    model = config.model.model_copy(update={"dtype": "float32"})
    small = config.model_copy(update={"model": model})
    for layers in _FEWER_LAYERS:
        fewer = factory.fewer_layers(layers)
        if fewer is None:
            continue
        try:
            fresh = replace(fewer, checkpoint=lambda: None)
            built = build(small, fresh, batch, adapter=adapter, is_whole=False)
        except ConfigError as error:
            raise NotComparable(f"{reason}; with {how_many(layers, 'layer')}: {error}") from error
        captured = cut_in_pieces(built.uncut, tokens=config.memory.tokens)
        if needed_bytes(captured, "float32") <= config.memory.host and flops_s(captured) <= MOST_S:
            remark = f" with {how_many(layers, 'layer')}"
            return _Subject(fewer.make, captured, f"{remark} in float32")
    raise NotComparable(reason)
