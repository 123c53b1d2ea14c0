"""`generate`: text from the weights of a run, which pass through memory once for each token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swaptrain.compute.device import open_device
from swaptrain.config.load import load_config
from swaptrain.config.resume_rules import changes
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.generate import (
    Generated,
    Prompt,
    PromptCodec,
    Sampling,
    WeightStream,
    bare_module,
    generate,
)
from swaptrain.generate.generation import check_generates, generation_settings, working_bytes
from swaptrain.generate.written_once import WrittenOnce
from swaptrain.store.format.root import RootRecord, read_buffers
from swaptrain.store.paths import RunPaths
from swaptrain.units import format_duration, format_size, how_many
from swaptrain.verbs.recorded_code import refuse_code
from swaptrain.verbs.stored_step import StoredStep, live_store, reading_bytes, with_step

__all__ = ["as_row", "check_prompts", "generate_text", "generated", "recorded"]

_DEVICE_SHARE = 0.8
"""Of a device's free memory, where memory.device does not say how much."""


def recorded(run: Path) -> Config:
    """Return the config that a run has recorded; raises ConfigError where its model is code."""
    live_store(run)
    config = load_config(RunPaths(run).config)
    refuse_code(config, run, ("model",), cure="give --config FILE")
    # Where it lies now, not where it was made.
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})


def _check_model(config: Config) -> None:
    """Raise ConfigError where the config describes another model than the run has recorded."""
    path = RunPaths(config.run.dir).config
    if not path.exists():
        return
    differ = changes(load_config(path), config).refused
    found = [change for change in differ if change.key.split(".")[0] in {"model", "lora"}]
    if found:
        lines = "\n".join(f"  {change}" for change in found)
        raise ConfigError(
            f"the run in {config.run.dir} was trained with another model; set these keys back:\n"
            f"{lines}"
        )


def generate_text(
    config: Config,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    is_chat: bool = False,
    tokenizer: Path | None = None,
    from_step: int | None = None,
    write: Callable[[str], None] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Generated:
    """Return what the run in `run.dir` writes after the prompts, in one batch.

    `write` gets the text of a single prompt as it comes, each part once; where the store changes
    meanwhile, and the text with it, it gets the other one on a new line. `note` hears of speed and
    what bounds it. Raises ConfigError, RunError, DamagedStoreError.
    """
    run = config.run.dir
    store = live_store(run)
    _check_model(config)
    torch.set_num_threads(config.train.threads or store.root.choices.threads)
    codec = PromptCodec(config, is_chat=is_chat, tokenizer=tokenizer)

    once = None if write is None else WrittenOnce(write, note)

    def use(view: StoredStep) -> Generated:
        if once is not None:
            once.begin()
        return generated(config, store.root, view, codec, list(prompts), sampling, once, note)

    return with_step(run, from_step, use, note)


def generated(
    config: Config,
    root: RootRecord,
    view: StoredStep,
    codec: PromptCodec,
    prompts: list[Prompt],
    sampling: Sampling,
    write: Callable[[str], None] | None,
    note: Callable[[str], None],
) -> Generated:
    """Return what the weights of one step write, in `memory.host` of the config."""
    device = open_device(config.device, config.memory.device).device
    module = bare_module(config, root, read_buffers(config.run.dir))
    check_generates(module)
    generation_settings(config, codec, module)
    length = check_prompts(module, codec, prompts, sampling)
    working = working_bytes(module, len(prompts), length)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    again = replace(view, again=True)
    stored = {dtype: {t.name: t for t in again.tensors(dtype)} for dtype in dtypes}
    on_device = device.type != "cpu"
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in stored[min(dtypes)]:  # which training changes
                pieces = list(stored[min(dtypes)][name].pieces)
                buffer.copy_(torch.from_numpy(pieces[0]).reshape(buffer.shape))
    _move_buffers(module, device)
    host_bytes = config.memory.host - reading_bytes(root.choices.chunk)
    host_bytes -= 0 if on_device else working
    with WeightStream(
        module,
        stored,
        budget_bytes=host_bytes,
        device=device,
        device_bytes=_device_bytes(config, device) - working if on_device else 0,
    ) as stream:
        found = generate(module, stream, codec, prompts, sampling, device=device, write=write)
    note(_line(found, stream, view.step))
    return found


def check_prompts(
    module: torch.nn.Module,
    codec: PromptCodec,
    prompts: list[Prompt],
    sampling: Sampling,
    key: str = "--max-new-tokens",
) -> int:
    """Return how many tokens the longest text will have; raises ConfigError for too many.

    `key` is what gives their number.
    """
    ids, _ = codec.encode(prompts, left=True)
    length = ids.shape[1] + sampling.max_new_tokens
    _check_length(module, ids.shape[1], sampling.max_new_tokens, key)
    _check_ids(module, int(ids.max()))
    return length


def _move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def _device_bytes(config: Config, device: torch.device) -> int:
    if config.memory.device is not None:
        return config.memory.device
    return int(_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])


def _check_length(module: Any, prompt: int, new: int, key: str) -> None:
    config = module.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < prompt + new:
        raise ConfigError(
            f"the longest prompt has {how_many(prompt, 'token')} and {key} is {new:,}, and the "
            f"model has {how_many(most, 'position')}: shorten one of them"
        )


def _check_ids(module: Any, largest: int) -> None:
    rows = len(module.get_input_embeddings().weight)
    if largest >= rows:
        raise ConfigError(
            f"the prompt has the id {largest:,}, and the model's vocabulary {how_many(rows, 'id')}"
            ": give the tokenizer that the run was trained with"
        )


def _line(found: Generated, stream: WeightStream, step: int) -> str:
    count = sum(map(len, found.tokens))
    per_s = count / max(found.seconds, 1e-9)
    share = stream.held_bytes / max(stream.total_bytes, 1)
    waited = stream.waited_s / max(found.seconds, 1e-9)
    bound = "reading" if waited > 0.5 else "computing"
    return (
        f"step {step}: {how_many(count, 'token')} in {format_duration(found.seconds)}, "
        f"{per_s:,.2f} a second"
        f" | weights {format_size(stream.total_bytes)}, {share:.0%} stay in memory, "
        f"{format_size(stream.read_bytes)} read in {how_many(found.passes, 'pass', 'passes')}"
        f" | waiting for weights {waited:.0%}: {bound} bounds it"
    )


def as_row(prompt: Prompt, text: str) -> str:
    """Return a prompt and its text as a line of JSON."""
    return json.dumps({"prompt": prompt.shown(), "text": text}, ensure_ascii=False)
