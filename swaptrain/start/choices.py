"""From facts to a config: each key with the reason for its value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from swaptrain.config.commented import CommentedConfig
from swaptrain.config.paths import written_path
from swaptrain.errors import ConfigError
from swaptrain.start.look_at_data import DataFacts
from swaptrain.start.look_at_machine import MachineFacts
from swaptrain.start.look_at_model import ModelFacts
from swaptrain.units import GIB, MIB, exact_size, format_size, how_many

__all__ = ["Choice", "Method", "chosen"]

Method = Literal["lora", "full"]

_BYTES_FULL, _DISK_FULL, _BASE, _BASE_NF4 = 12, 16, 2, 0.6
"""Bytes a parameter: state of all weights, its disk with clipping, a base, and a base in nf4."""
_SPARE_BYTES = 2 * GIB
"""Of the disk, for tokens, adapters and what is written in a step."""
_HALF_STORED = ("BF16", "F16")
_LARGE = 100_000_000
_LONGEST, _LENGTH_STEP, _TEXT_LENGTH = 4096, 64, 512
_MICRO_TOKENS, _STEP_TOKENS, _STEPS_AN_EPOCH = 1024, 8192, 20
_LEAST_ROWS_SPLIT, _HELD_OUT_ROWS = 100, 20
_MASK = 0.15


@dataclass(frozen=True)
class Choice:
    """A config, and what is reckoned of it."""

    config: CommentedConfig
    steps: int


def chosen(
    model_dir: str,
    model: ModelFacts,
    data: DataFacts,
    machine: MachineFacts,
    run_dir: Path,
    *,
    method: Method | None,
    micro_batch: int | None = None,
) -> Choice:
    """Return the config of a run; `method` None is what fits and takes least.

    `micro_batch` is most sequences of a micro-batch, where fewer are wanted. Raises ConfigError
    where nothing fits on the disk, and where adapters are asked for without PEFT.
    """
    config = CommentedConfig()
    host_bytes = _host_bytes(machine)
    lora, why = _method(model, machine, host_bytes, method)
    config.set("model.hf", written_path(model_dir), model.description)
    _add_dtype(config, model)
    if lora:
        _add_lora(config, model, machine, why)
    items = _add_data(config, model, data, micro_batch)
    steps = _add_training(config, model, data, items, lora=lora, why=why)
    config.set("memory.host", exact_size(host_bytes), "half of the RAM that is free now")
    if machine.device_bytes is not None:
        most = machine.device_bytes * 4 // 5 // MIB * MIB
        config.set("memory.device", exact_size(most), "four fifths of what the GPU has free")
    config.set("run.dir", written_path(str(run_dir)))
    return Choice(config, steps)


def _host_bytes(machine: MachineFacts) -> int:
    half = machine.ram_bytes // 2
    step = GIB // 2 if half >= 2 * GIB else 64 * MIB
    return max(256 * MIB, half // step * step)


def _method(
    model: ModelFacts, machine: MachineFacts, host_bytes: int, method: Method | None
) -> tuple[bool, str]:
    """Return whether adapters are trained, and why; raises ConfigError."""
    state, disk = _BYTES_FULL * model.parameters, machine.disk_bytes
    needed = _DISK_FULL * model.parameters + _SPARE_BYTES
    full_fits = disk is None or needed <= disk
    has_peft = find_spec("peft") is not None
    if method == "lora" or (method is None and not full_fits):
        if not has_peft:
            room = "" if method else f"training all of it takes {format_size(needed)} of disk; "
            raise ConfigError(f"--lora: {room}adapters need PEFT: pip install 'swaptrain[lora]'")
        if method:
            return True, "asked for by --lora"
        return True, f"training all takes {format_size(needed)} of disk, more than is free"
    if not full_fits:
        assert disk is not None
        raise ConfigError(
            f"--full: training all of the model takes {format_size(needed)} of disk, and "
            f"{format_size(disk)} are free at {machine.disk}: make room, or give --lora"
        )
    if method == "full":
        return False, "asked for by --full"
    if model.stored is None:
        return False, "there are no weights to keep, so all of them are trained"
    if state <= host_bytes:
        return False, f"all of it is trained: its state, {format_size(state)}, fits in memory.host"
    if not has_peft:
        return False, "all of it is trained; adapters, which move less, need swaptrain[lora]"
    return True, f"the state of a full training, {format_size(state)}, does not fit in memory.host"


def _add_dtype(config: CommentedConfig, model: ModelFacts) -> None:
    if model.stored in _HALF_STORED:
        config.set("model.dtype", "bfloat16", f"as the weights are stored ({model.stored})")
    elif model.stored is None and model.parameters >= _LARGE:
        config.set("model.dtype", "bfloat16", "computed in; the masters are float32")
    else:
        config.set("model.dtype", "float32", "bfloat16 takes half of the memory and traffic")


def _add_lora(config: CommentedConfig, model: ModelFacts, machine: MachineFacts, why: str) -> None:
    base = round(_BASE * model.parameters)
    if machine.disk_bytes is not None and base + _SPARE_BYTES > machine.disk_bytes:
        small = round(_BASE_NF4 * model.parameters)
        if small + _SPARE_BYTES > machine.disk_bytes:
            raise ConfigError(
                f"the base takes {format_size(small)} of disk in nf4, and "
                f"{format_size(machine.disk_bytes)} are free at {machine.disk}: make room"
            )
        config.set("model.base", "nf4", f"the disk has no room for {format_size(base)}")
    config.set("lora.r", 16, why)
    config.set("lora.lora_alpha", 32, "what an adapter adds is scaled by lora_alpha / r")
    config.set("lora.target_modules", "all-linear")


def _add_data(
    config: CommentedConfig, model: ModelFacts, data: DataFacts, micro_batch: int | None
) -> int:
    """Set `data` and `eval`; return about how many sequences an epoch has."""
    config.set(f"data.{data.kind}", [written_path(path) for path in data.patterns], data.what)
    if data.template is not None:
        config.set("data.chat_template", data.template)
    if data.tokenizer != "bytes":
        config.set("data.tokenizer", config.get("model.hf"))
    length, why = _length(model, data)
    config.set("data.sequence_length", length, why)
    items = _items(data, length)
    if model.is_masked:
        config.set("data.mask", _MASK, "the part of the tokens that is predicted")
    wanted = max(1, min(_STEP_TOKENS // length, items // _STEPS_AN_EPOCH))
    each = min(max(1, _MICRO_TOKENS // length), wanted, micro_batch or wanted)
    count = wanted // each
    config.set("data.micro_batch", each, "sequences that are computed together")
    tokens = f"{how_many(each * count * length, 'token')} a step; more of them cost no traffic"
    config.set("data.micro_batches", count, tokens)
    if data.kind == "chat" and data.distinct >= _LEAST_ROWS_SPLIT:
        part = round(max(0.02, _HELD_OUT_ROWS / data.distinct), 3)
        config.set("data.held_out", part, f"about {data.rows * part:,.0f} rows, for eval")
    return items


def _length(model: ModelFacts, data: DataFacts) -> tuple[int, str]:
    """Return the tokens of a sequence, and why."""
    most = min(_LONGEST, model.positions or _LONGEST)
    if not data.lengths:
        length = min(_TEXT_LENGTH, most, max(1, data.tokens // 4))
        return length, f"of at most {most:,}"
    wanted = -(-data.percentile(0.99) // _LENGTH_STEP) * _LENGTH_STEP
    length = min(wanted, most)
    cut = sum(tokens > length for tokens in data.lengths)
    return length, f"longer, and cut: {cut:,} of {how_many(len(data.lengths), 'row')}"


def _items(data: DataFacts, length: int) -> int:
    if data.kind == "text":
        return max(1, data.tokens // length)
    fitting = sum(min(tokens, length) for tokens in data.lengths) / len(data.lengths)
    return max(1, round(fitting * data.rows / length))


def _add_training(
    config: CommentedConfig,
    model: ModelFacts,
    data: DataFacts,
    items: int,
    *,
    lora: bool,
    why: str,
) -> int:
    """Set `optimizer` and `train`, and how often is evaluated; return about how many steps."""
    epochs = 1 if data.kind == "text" else 3
    step_items: int = config.get("data.micro_batch") * config.get("data.micro_batches")
    steps = math.ceil(epochs * items / step_items)
    rate = 2e-4 if lora else 3e-4 if model.stored is None else 1e-5
    config.set("optimizer.lr", rate, "usual for adapters" if lora else "usual for all weights")
    config.set("optimizer.weight_decay", 0.0)
    config.set("optimizer.clip_norm", 1.0, "largest norm of a gradient")
    config.set("optimizer.schedule.name", "cosine")
    config.set("optimizer.schedule.warmup_ratio", 0.03, "of the steps")
    config.set(
        "train.epochs", epochs, f"about {how_many(steps, 'step')}" + ("" if lora else f"; {why}")
    )
    if config.get("data.held_out") is not None:
        config.set("eval.every", max(1, steps // 10), "steps between held-out losses")
    return steps
