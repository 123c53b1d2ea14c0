"""Each argument of the Trainer: a key of the config, of no meaning here, or refused by name."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swaptrain.config.kinds import REPORTERS
from swaptrain.errors import ConfigError
from swaptrain.hf.order import EpochShape

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["FREE", "MAPPED", "Frequency", "arguments_tree", "check_arguments", "frequency_of"]


MAPPED = {
    "output_dir": "`run.dir` is `output_dir/swaptrain`",
    "per_device_train_batch_size": "`data.micro_batch`",
    "gradient_accumulation_steps": "`data.micro_batches`",
    "num_train_epochs": "`train.steps`, counted as the Trainer counts",
    "max_steps": "`train.steps`",
    "learning_rate": "`optimizer.lr`",
    "lr_scheduler_type": "`optimizer.schedule`, from step 0",
    "lr_scheduler_kwargs": "`min_lr`, `min_lr_rate`, `lr_end`",
    "warmup_steps": "`optimizer.schedule.warmup_steps`",
    "optim": "`adamw_torch`, `adamw_torch_fused`, `sgd`, `adagrad`, `rmsprop`",
    "weight_decay": "`optimizer.weight_decay`",
    "adam_beta1": "`optimizer.betas`",
    "adam_beta2": "`optimizer.betas`",
    "adam_epsilon": "`optimizer.eps`",
    "max_grad_norm": "`optimizer.clip_norm`",
    "bf16": "`model.dtype: bfloat16`",
    "seed": "`train.seed`, and the order of the items",
    "data_seed": "the order of the items",
    "train_sampling_strategy": "`random` or `sequential`",
    "dataloader_drop_last": "the order of the items",
    "remove_unused_columns": "keys that the model does not take are left out",
    "activation_checkpointing": "true: `train.recompute`",
    "gradient_checkpointing": "true: `train.recompute`",
    "full_determinism": "`train.deterministic`",
    "use_cpu": "`device: cpu`",
    "report_to": "`train.report_to`: tensorboard, trackio",
    "logging_strategy": "rows of `log_history`",
    "logging_steps": "rows of `log_history`",
    "logging_first_step": "rows of `log_history`",
    "eval_strategy": "`eval.every`",
    "eval_steps": "`eval.every`",
    "eval_on_start": "`eval.first`",
    "per_device_eval_batch_size": "with an evaluation that of training",
    "save_strategy": "`checkpoint-N`, by `store.keep`",
    "save_steps": "`checkpoint-N`, by `store.keep`",
    "save_total_limit": "`checkpoint-N` that stay",
    "load_best_model_at_end": "the final model is that of the best `checkpoint-N`",
    "metric_for_best_model": "`loss`",
    "greater_is_better": "false",
    "disable_tqdm": "true: nothing is printed",
    "resume_from_checkpoint": "true: as without it, the run goes on by itself",
}
"""Arguments that are carried out, and by what."""

FREE = {
    **dict.fromkeys(
        (
            *("log_level", "log_level_replica", "log_on_each_node"),
            *("logging_nan_inf_filter", "length_column_name"),
        ),
        "how the Trainer's own loop speaks",
    ),
    **dict.fromkeys(
        (
            *("dataloader_pin_memory", "dataloader_persistent_workers"),
            *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
            *("dataloader_in_order", "torch_empty_cache_steps", "skip_memory_metrics"),
        ),
        "how its loader and memory are run, never what comes out",
    ),
    **dict.fromkeys(
        (
            *("average_tokens_across_devices", "save_on_each_node", "local_rank"),
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
            *("ddp_static_graph", "ddp_backend", "ddp_timeout"),
        ),
        "several processes or machines",
    ),
    **dict.fromkeys(
        (
            *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
            *("hub_always_push", "hub_revision"),
        ),
        "pushes to the hub, which `push_to_hub` would ask for",
    ),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "read by scripts, not by the Trainer"),
    **dict.fromkeys(
        (
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
            *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        ),
        "predictions for `compute_metrics`; the loss is measured here",
    ),
    "save_only_model": "no `checkpoint-N` has the optimizer's state: the run itself has it",
}
"""Arguments that have no meaning here, whatever they are, and what they are about."""

_TOKENISED = ("max_length", "truncation_mode", "dataset_text_field", "dataset_num_proc")
"""Of SFTConfig: without meaning for items that are token ids, which is looked at beside this."""

_REASONS = {
    "fp16": "the Trainer holds the rate in a step that overflows: set bf16, or train by "
    "swaptrain.train(dtype='float16')",
    "fp16_full_eval": "an evaluation computes as training does",
    "bf16_full_eval": "an evaluation computes as training does",
    "label_smoothing_factor": "the loss is the model's own",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "torch_compile": "segments are run as they are captured",
    "torch_compile_backend": "segments are run as they are captured",
    "torch_compile_mode": "segments are run as they are captured",
    "use_liger_kernel": "the model's own kernels are run",
    "deepspeed": "swaptrain takes its place: leave it out",
    "fsdp": "one process trains",
    "parallelism_config": "one process trains",
    "auto_find_batch_size": "the batch belongs to the result: set per_device_train_batch_size",
    "dataloader_num_workers": "items are made in this process: set it to 0",
    "ignore_data_skip": "a run that goes on goes on in its data",
    "push_to_hub": "nothing is sent anywhere: push output_dir afterwards",
    "eval_delay": "evaluations begin at the first eval_steps",
    "optim_target_modules": "all that is trained has one optimizer",
    "optim_args": "the optimizer has the arguments that the Trainer names",
    "include_num_input_tokens_seen": "metrics.jsonl has the tokens of each step",
    "use_cache": "a cache of keys and values is of no use in training",
    "accelerator_config": "one process trains, in the order of the seedable sampler",
    "run_name": "reporters show the name of the directory",
    "label_names": "labels are called labels",
    "packing": "items are taken as they are: pack them before, or train files by data.chat",
    "completion_only_loss": "set labels to -100 where nothing is trained",
    "assistant_only_loss": "set labels to -100 where nothing is trained",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **{name: name for name in ("sgd", "adagrad", "rmsprop")},
}
_SCHEDULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("linear", ()),
    "cosine": ("cosine", ()),
    "constant": ("constant", ()),
    "constant_with_warmup": ("constant", ()),
    "cosine_with_min_lr": ("cosine", ("min_lr", "min_lr_rate")),
    "polynomial": ("linear", ("lr_end", "power")),
}
"""By the Trainer's name ours, and the arguments that it may have."""
_POLYNOMIAL_END = 1e-7
"""Where transformers lets a polynomial end."""


@dataclass(frozen=True)
class Frequency:
    """When something is done: each so many steps, of each epoch, or never."""

    strategy: str
    """steps, epoch, best or no."""
    every: int
    """Steps; of `best` and `no` none is counted."""

    def due(self, step: int) -> bool:
        """Whether it is done after a step."""
        return self.strategy in ("steps", "epoch") and step % self.every == 0


def frequency_of(strategy: Any, steps: float | None, shape: EpochShape, last: int) -> Frequency:
    """Return when the Trainer does what it has a strategy for; `steps` below 1 are a part."""
    named = str(getattr(strategy, "value", strategy))
    if named == "epoch":
        return Frequency(named, shape.steps)
    if named == "steps" and steps:
        return Frequency(named, max(1, math.ceil(last * steps) if steps < 1 else int(steps)))
    return Frequency("no" if named == "steps" else named, 1)


def check_arguments(args: TrainingArguments, *, evaluates: bool) -> None:
    """Raise one ConfigError that names each argument that cannot be carried out.

    `evaluates`: whether there is an eval_dataset.
    """
    usual = type(args)(output_dir=str(args.output_dir), use_cpu=args.use_cpu)
    refused = {
        field.name: _REASONS.get(field.name, "it cannot be carried out")
        for field in dataclasses.fields(args)
        if field.name not in {*MAPPED, *FREE, *_TOKENISED}
        and getattr(args, field.name) != getattr(usual, field.name)
    }
    if not args.report_to:
        for name in ("run_name", "project"):
            refused.pop(name, None)
    refused |= _refused_values(args, evaluates=evaluates)
    if refused:
        listed = "; ".join(f"{n}={_shown(getattr(args, n))}: {why}" for n, why in refused.items())
        what = "an argument" if len(refused) == 1 else f"{len(refused)} arguments"
        raise ConfigError(f"swaptrain.hf.train cannot carry out {what} of args: {listed}")


def _refused_values(args: TrainingArguments, *, evaluates: bool) -> dict[str, str]:
    """Return what is refused of arguments of which other values are carried out."""
    found: dict[str, str] = {}

    def refuse(name: str, is_wrong: bool, why: str) -> None:
        if is_wrong:
            found[name] = why

    optimizer, schedule = _value(args.optim), _value(args.lr_scheduler_type)
    refuse("optim", optimizer not in _OPTIMIZERS, f"choose one of {', '.join(_OPTIMIZERS)}")
    refuse("lr_scheduler_type", schedule not in _SCHEDULES, f"choose {', '.join(_SCHEDULES)}")
    given = dict(args.lr_scheduler_kwargs or {})
    known = _SCHEDULES.get(schedule, ("", ()))[1]
    others = [n for n in given if n not in known and (n, given[n]) != ("num_cycles", 0.5)]
    refuse("lr_scheduler_kwargs", bool(others), f"{schedule} has no {', '.join(others)} here")
    refuse("lr_scheduler_kwargs", given.get("power", 1.0) != 1.0, "power is 1")
    sampling = args.train_sampling_strategy
    refuse(
        "train_sampling_strategy",
        sampling not in ("random", "sequential"),
        "items come in random order or in their own: batches by length have other lengths",
    )
    others = [name for name in args.report_to or () if name not in REPORTERS]
    refuse("report_to", bool(others), f"choose {' and '.join(REPORTERS)}, or none")
    refuse("num_train_epochs", args.num_train_epochs <= 0 > args.max_steps, "no step is trained")
    refuse("max_steps", args.max_steps == 0, "no step is trained")
    refuse(
        "resume_from_checkpoint",
        args.resume_from_checkpoint not in (None, False, True, "True", "true"),
        "the same call goes on with the run in output_dir: leave it out",
    )
    eval_strategy, save_strategy = _value(args.eval_strategy), _value(args.save_strategy)
    refuse("eval_strategy", eval_strategy != "no" and not evaluates, "there is no eval_dataset")
    refuse("eval_on_start", args.eval_on_start and eval_strategy == "no", "set eval_strategy")
    refuse(
        "per_device_eval_batch_size",
        eval_strategy != "no"
        and args.per_device_eval_batch_size != args.per_device_train_batch_size,
        f"an evaluation takes batches of training: set {args.per_device_train_batch_size}",
    )
    refuse("save_strategy", save_strategy == "best" and eval_strategy == "no", "set eval_strategy")
    refuse(
        "load_best_model_at_end",
        args.load_best_model_at_end and eval_strategy == "no",
        "set eval_strategy",
    )
    refuse(
        "metric_for_best_model",
        args.metric_for_best_model not in (None, "loss", "eval_loss"),
        "the best model is that of the lowest held-out loss",
    )
    refuse("greater_is_better", bool(args.greater_is_better), "a loss is better where it is lower")
    refuse("save_total_limit", (args.save_total_limit or 1) < 1, "1 or more stay; leave it out")
    return found


def arguments_tree(args: TrainingArguments, shape: EpochShape, last: int) -> dict[str, Any]:
    """Return the sections of a config that the arguments determine; `last` are all steps."""
    train: dict[str, Any] = {
        "steps": last,
        "seed": args.seed,
        "report_to": list(args.report_to or ()),
        "deterministic": args.full_determinism,
    }
    if args.gradient_checkpointing or getattr(args, "activation_checkpointing", False):
        train["recompute"] = True
    tree: dict[str, Any] = {
        "model": {"dtype": "bfloat16" if args.bf16 else "float32"},
        "data": {
            "micro_batch": shape.batch,
            "micro_batches": shape.batches_per_step,
            "shuffle": False,
        },
        "optimizer": _optimizer(args, last),
        "train": train,
    }
    return tree | ({"device": "cpu"} if args.use_cpu else {})


def _optimizer(args: TrainingArguments, last: int) -> dict[str, Any]:
    named, schedule = _OPTIMIZERS[_value(args.optim)], _value(args.lr_scheduler_type)
    given = dict(args.lr_scheduler_kwargs or {})
    found: dict[str, Any] = {
        "name": named,
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "clip_norm": args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
    }
    if named == "adamw":
        found |= {"betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon}
    least = given.get("min_lr_rate") or (given.get("min_lr") or 0.0) / args.learning_rate
    if schedule == "polynomial":
        least = given.get("lr_end", _POLYNOMIAL_END) / args.learning_rate
    found["schedule"] = {
        "name": _SCHEDULES[schedule][0],
        # transformers passes over a warmup of the schedule `constant`.
        "warmup_steps": 0 if schedule == "constant" else args.get_warmup_steps(last),
        "decay_steps": last,
        "min_lr_ratio": least,
        "from_zero": True,
    }
    return found


def _value(member: Any) -> str:
    """Return the text of a member of an enumeration."""
    return str(getattr(member, "value", member))


def _shown(value: Any) -> str:
    text = " ".join(str(_value(value) if hasattr(value, "value") else repr(value)).split())
    return text if len(text) <= 60 else text[:57] + "..."
