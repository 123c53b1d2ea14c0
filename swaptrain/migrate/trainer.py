"""What the Trainer of transformers and Axolotl share: length, batch, evaluation, snapshots."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swaptrain.config.kinds import REPORTERS
from swaptrain.migrate.draft import Draft
from swaptrain.migrate.optimizer import add_optimizer
from swaptrain.migrate.schedule import add_schedule

__all__ = ["ToolNames", "add_dtype", "add_evaluation", "add_training"]

_GUESSED_EVERY = 100
_NO = ("no", "none", "false")


@dataclass(frozen=True)
class ToolNames:
    """A tool's names of keys that it shares with others, and its defaults."""

    micro_batch: str
    micro_batch_default: int
    epochs: str
    epochs_default: float
    optimizer: str
    scheduler: str
    scheduler_default: str
    lr_default: float | None
    """None: the tool wants it."""


def add_training(draft: Draft, names: ToolNames) -> int | None:
    """Set `optimizer`, `train`, `run` and the batch; return the number of steps where it is known.

    Raises ConfigError.
    """
    given = draft.given
    steps = _add_length(draft, names)
    lr = given.number("learning_rate")
    if lr is not None and lr > 0:
        draft.set("optimizer.lr", lr, "learning_rate")
    elif lr is not None:
        raise given.refusal("learning_rate", "give one above 0")
    elif names.lr_default is not None:
        lr = names.lr_default
        draft.default("optimizer.lr", lr)
    else:
        raise given.refusal("learning_rate", f"{draft.tool} wants it, and so does swaptrain")
    add_optimizer(draft, names.optimizer)
    named = add_schedule(draft, names.scheduler, names.scheduler_default, lr, steps)
    _add_warmup(draft, named)
    _add_batch(draft, names)
    seed = given.count("seed")
    if seed is None:
        draft.default("train.seed", 42)
    else:
        draft.set("train.seed", seed, "seed")
    _add_snapshots(draft, steps)
    _add_reports(draft)
    to = given.text("output_dir")
    draft.set("run.dir", (to or "runs/migrated").replace("$", "$$"), "output_dir")
    return steps


def _add_length(draft: Draft, names: ToolNames) -> int | None:
    given = draft.given
    steps, epochs = given.count("max_steps"), given.number(names.epochs)
    if steps is not None and steps > 0:
        draft.set("train.steps", steps, "max_steps")
        return steps
    if epochs is None:
        draft.default("train.epochs", names.epochs_default)
    else:
        draft.set("train.epochs", epochs, names.epochs)
    return None


def _add_warmup(draft: Draft, named: str) -> None:
    """Set the warmup, except where the tool has it set already."""
    given = draft.given
    warmup, ratio = given.number("warmup_steps"), given.number("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, ratio = None, warmup  # as transformers 5 takes it
    if not warmup and not ratio:
        return
    if named == "constant":
        draft.remark("warmup_steps", warmup or ratio, "the schedule constant passes over it")
    elif warmup:
        draft.set("optimizer.schedule.warmup_steps", round(warmup), "warmup_steps")
    else:
        draft.set("optimizer.schedule.warmup_ratio", ratio, "warmup_ratio")


def _add_batch(draft: Draft, names: ToolNames) -> None:
    given = draft.given
    each = given.count(names.micro_batch)
    if each is None:
        draft.default("data.micro_batch", names.micro_batch_default)
    else:
        draft.set("data.micro_batch", each, f"{names.micro_batch}, of one device")
    count = given.count("gradient_accumulation_steps")
    total = given.count("batch_size") if names.micro_batch == "micro_batch_size" else None
    if count is not None:
        draft.set("data.micro_batches", count, "gradient_accumulation_steps")
    elif total is not None:
        count = max(1, total // (each or names.micro_batch_default))
        draft.set("data.micro_batches", count, f"batch_size: {total}")


def add_dtype(draft: Draft, *, default: str) -> None:
    """Set `model.dtype` by `bf16` and `fp16`; `default` is that of a file with neither."""
    given = draft.given
    found, half = given.take("bf16", "bfloat16"), given.take("fp16", "float16")
    wants_bfloat = str(found).lower() in ("true", "auto", "full", "yes", "on")
    wants_half = str(half).lower() in ("true", "yes", "on")
    if wants_bfloat:
        draft.set("model.dtype", "bfloat16", f"bf16: {str(found).lower()}, with float32 masters")
    elif wants_half:
        draft.set("model.dtype", "float16", "fp16, with float32 masters and a scaled loss")
    elif found is None and half is None:
        draft.set("model.dtype", default, f"default of {draft.tool}")
    else:
        draft.set("model.dtype", "float32", f"bf16: {str(found).lower()}")


def add_evaluation(draft: Draft, steps: int | None, *, default_every: int | None) -> None:
    """Set `eval.every` and how much is evaluated, where there are data for it.

    `default_every`: the tool's `logging_steps`, which count where a strategy has no number.
    """
    given = draft.given
    strategy = str(given.take("eval_strategy", "evaluation_strategy") or "").lower()
    has_data = any(draft.config.get(key) for key in ("data.held_out", "eval.chat", "eval.text"))
    if not has_data:
        if strategy not in ("", *_NO):
            draft.remark("eval_strategy", strategy, "name data in eval: they are not to be found")
        return
    every, per_epoch = given.number("eval_steps"), given.number("evals_per_epoch")
    patience = given.count("early_stopping_patience", "early_stopping_steps")
    if every is not None and 0 < every < 1:
        every = math.ceil(every * steps) if steps else None
    if every is None and strategy == "steps":
        every = given.number("logging_steps") or default_every
    if every is not None and every >= 1:
        draft.set("eval.every", round(every), "steps between evaluations")
    else:
        wanted = f"evals_per_epoch: {per_epoch:g}" if per_epoch else "none is said in steps"
        guess = min(_GUESSED_EVERY, max(1, steps // 5)) if steps else _GUESSED_EVERY
        draft.set("eval.every", guess, f"{wanted}: choose; plan counts the sequences")
    draft.set("eval.batches", "all", f"as {draft.tool} evaluates")
    if patience is not None:
        draft.set("eval.patience", patience, "early_stopping")
    if given.flag("load_best_model_at_end"):
        draft.set("store.keep.best", 1, "load_best_model_at_end: export RUN --step N takes it")


def _add_reports(draft: Draft) -> None:
    """Set `train.report_to`, as far as there are such reporters."""
    given = draft.given
    names = given.texts("report_to")
    names += [name for name in ("tensorboard", "trackio") if given.flag(f"use_{name}")]
    found = [name for name in dict.fromkeys(names) if name in REPORTERS]
    if found:
        draft.set("train.report_to", found, "report_to: pip install 'swaptrain[...]'")
    others = [name for name in names if name not in (*REPORTERS, *_NO)]
    if others:
        draft.remark("report_to", ", ".join(others), "metrics.jsonl has every step")


def _add_snapshots(draft: Draft, steps: int | None) -> None:
    given = draft.given
    strategy = str(given.take("save_strategy") or "steps").lower()
    if strategy != "steps":
        if strategy not in _NO:
            draft.remark("save_strategy", strategy, "store.keep.every counts steps: set it")
        return  # each step is durable without a snapshot
    if not given.has("save_steps"):
        return
    every = given.number("save_steps") or 0
    if 0 < every < 1 and steps:
        every = math.ceil(every * steps)
    if every < 1:
        draft.remark("save_steps", every, "store.keep.every counts steps: set it")
        return
    draft.set("store.keep.every", round(every), "save_steps; each takes the disk of the state")
    last = given.count("save_total_limit")
    if last is not None and last >= 1:
        draft.set("store.keep.last", last, "save_total_limit")
