"""Trains with the arguments of transformers' Trainer, and leaves what it leaves."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swaptrain.api.objects import HandedOver
from swaptrain.api.progress import progress_of
from swaptrain.api.run import Run
from swaptrain.api.settings import configured
from swaptrain.api.surroundings import restored
from swaptrain.config.paths import written_path
from swaptrain.errors import ConfigError, StoppedBySignal
from swaptrain.given import PREFIX, handed_over
from swaptrain.hf.adapters import lora_tree
from swaptrain.hf.arguments import Frequency, arguments_tree, check_arguments, frequency_of
from swaptrain.hf.history import History
from swaptrain.hf.model import GivenModel, given_model
from swaptrain.hf.order import EpochShape, InOrder, MapStyle, Placed, collator
from swaptrain.hf.output import RUN, Output, check_empty
from swaptrain.units import how_many

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from swaptrain.config.schema import Config

__all__ = ["train"]


_NOT_HERE = {
    "callbacks": "the rows of metrics.jsonl say what happens",
    "compute_metrics": "an evaluation measures loss, accuracy and the forward's own numbers",
    "compute_loss_func": "the loss is the model's own",
    "model_init": "give the model",
    "optimizers": "choose optim and lr_scheduler_type",
    "optimizer_cls_and_kwargs": "choose optim",
    "preprocess_logits_for_metrics": "an evaluation keeps no logits",
    "formatting_func": "give items with input_ids and labels",
}
"""Further parameters of Trainer and SFTTrainer."""


def train(
    model: str | Path | PreTrainedModel,
    args: TrainingArguments,
    train_dataset: MapStyle,
    eval_dataset: MapStyle | None = None,
    processing_class: Any = None,
    peft_config: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    *,
    tokenizer: Any = None,
    memory: str | Mapping[str, Any] = "4GiB",
    accept_change: bool = False,
    **keys: Any,
) -> Run:
    """Train as transformers' Trainer would with one process; the same call goes on with a run.

    `model`: a directory, or a model in memory, which is written to `output_dir/initial` first.
    `processing_class` (or `tokenizer`) and `data_collator` are the Trainer's. `memory` is
    `memory.host`, or the section; `keys` are further sections of a config, such as
    `store={"chunk": "16MiB"}`. `accept_change` goes on with other arguments than the run had, as
    the command line's --accept-change.

    Raises ConfigError, before anything is written, that names each argument that cannot be carried
    out, and whatever `swaptrain.train` raises.
    """
    from transformers import TrainingArguments

    if not isinstance(args, TrainingArguments):
        raise ConfigError(f"args is {type(args).__name__}: give TrainingArguments of transformers")
    if not hasattr(args, "train_sampling_strategy"):
        raise ConfigError("transformers is older than 5.24: pip install 'swaptrain[hf]'")
    _check_keys(keys)
    check_arguments(args, evaluates=eval_dataset is not None)
    output_dir = Path(str(args.output_dir)).absolute()
    check_empty(output_dir)
    if hasattr(args, "dataset_text_field"):
        _check_tokenised(train_dataset, args)
    shape = EpochShape(
        _length(train_dataset, "train_dataset"),
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.dataloader_drop_last,
    )
    last = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * shape.steps)
    evaluates = frequency_of(args.eval_strategy, args.eval_steps, shape, last)
    saves = frequency_of(args.save_strategy, args.save_steps, shape, last)
    processing = processing_class if processing_class is not None else tokenizer
    lora = None if peft_config is None else lora_tree(peft_config)
    base = given_model(model, output_dir, bf16=args.bf16)
    if args.weight_decay and base.undecided and lora is None:
        raise ConfigError(
            f"weight_decay={args.weight_decay:g}: the Trainer goes by names, and here parameters "
            f"of two dimensions and more decay: they differ on {', '.join(base.undecided[:5])}. "
            "Set it to 0"
        )
    collate = data_collator if data_collator is not None else _default_collator(processing)
    columns = base.columns if args.remove_unused_columns else None
    order = _order_seed(args)
    given = HandedOver(
        functions={
            "items": lambda **_: InOrder(train_dataset, shape, order),
            "batch": collator(collate, columns),
            "held_out": lambda: _EachOnce(eval_dataset, _length(eval_dataset, "eval_dataset")),
        }
    )
    facts = {"items": shape.items, "drop_last": shape.drop_last, "order": order}
    tree = arguments_tree(args, shape, last)
    where = {**base.tree, "hf": written_path(base.tree["hf"])}
    _merge(tree, {"model": where, "run": {"dir": written_path(str(output_dir / RUN))}})
    _merge(tree, {"memory": memory if isinstance(memory, Mapping) else {"host": memory}})
    _merge(
        tree, {"data": {"python": f"{PREFIX}items", "collate": f"{PREFIX}batch", "kwargs": facts}}
    )
    _merge(tree, {"train": _weighting(base, shape, last)})
    if lora is not None:
        tree["lora"] = lora
    elif base.frozen:
        tree["train"]["freeze"] = list(base.frozen)
    if evaluates.strategy != "no":
        _length(eval_dataset, "eval_dataset")
        tree["eval"] = {
            "python": f"{PREFIX}held_out",
            "every": evaluates.every,
            "first": args.eval_on_start,
            "batches": "all",
        }
    if keep := _keep(saves, last):
        _merge(tree, {"store": {"keep": keep}})
    _merge(tree, keys)
    with base.written(), restored(), handed_over(given.functions):
        config = configured(tree, None, {})
        logs = frequency_of(args.logging_strategy, args.logging_steps, shape, last)
        history = History(shape, logs, args.logging_first_step, last)
        note = (lambda _: None) if args.disable_tqdm else print
        output = Output(args, history, saves, processing, lora is not None, note)
        quiet = bool(args.disable_tqdm)
        _carry_out(config, output, evaluates, accept_change=accept_change, quiet=quiet)
    return Run(config, given)


def _carry_out(
    config: Config, output: Output, evaluates: Frequency, *, accept_change: bool, quiet: bool
) -> None:
    """Train what is left to train, and write what is left to write."""
    from swaptrain.verbs.evaluate import evaluate_run
    from swaptrain.verbs.train import train as train_run

    last = output.history.last
    shows = partial(progress_of, config.memory.host, quiet=quiet)
    note: Callable[[str], None] = (lambda _: None) if quiet else print
    try:
        # After its first instructions everything of the step before is there.
        train_run(
            config,
            accept_change=accept_change,
            observe=lambda step, _: output.write_due(step - 1),
            progress=shows(),
        )
    except StoppedBySignal as stop:
        if stop.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stop)) from None
        raise
    if output.is_complete():
        return
    evaluation = None
    if evaluates.strategy != "no" and not evaluates.due(last):
        evaluation = evaluate_run(config, None, note, shows).found.row()
    output.write_last(evaluation)


def _check_keys(keys: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters of the Trainer that are no sections of a config."""
    refused = {name: why for name, why in _NOT_HERE.items() if keys.get(name) not in (None, [], ())}
    if refused:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"swaptrain.hf.train has no {listed}")


def _length(dataset: Any, name: str) -> int:
    """Return the number of items, or raise ConfigError."""
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{name} is {type(dataset).__name__}: give one data set whose items have numbers"
        )
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{name} is {type(dataset).__name__}, which has no length: give a map-style data set"
        ) from None


def _check_tokenised(dataset: Any, args: Any) -> None:
    """Raise ConfigError for items of which SFTTrainer would make others: it tokenises and cuts."""
    _length(dataset, "train_dataset")
    item = dataset[0]
    missing = [name for name in ("input_ids", "labels") if name not in item]
    if missing:
        raise ConfigError(
            f"train_dataset: its items have no {' and no '.join(missing)}, which SFTTrainer would "
            "make: tokenise them before, all to one length, or train files of rows by data.chat"
        )
    if args.max_length is not None and len(item["input_ids"]) > args.max_length:
        raise ConfigError(
            f"max_length={args.max_length}: items have {how_many(len(item['input_ids']), 'token')}"
            ": cut them, or set it to None"
        )


def _default_collator(processing: Any) -> Callable[[list[Any]], Any]:
    """Return the collator that the Trainer takes where none is given."""
    from transformers import (
        DataCollatorWithPadding,
        PreTrainedTokenizerBase,
        SequenceFeatureExtractor,
        default_data_collator,
    )

    pads = isinstance(processing, PreTrainedTokenizerBase | SequenceFeatureExtractor)
    found: Callable[[list[Any]], Any] = (
        DataCollatorWithPadding(processing) if pads else default_data_collator
    )
    return found


def _order_seed(args: TrainingArguments) -> int | None:
    """Return the seed of the order; None where items come in their own."""
    if args.train_sampling_strategy == "sequential":
        return None
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


def _weighting(given: GivenModel, shape: EpochShape, last: int) -> dict[str, Any]:
    """Return what weighs alike in a step, as the Trainer has it."""
    fills = last > shape.whole_steps < shape.steps
    if fills and not given.accepts_loss_kwargs:
        raise ConfigError(
            f"train_dataset: the last step of an epoch has fewer than {shape.batch} x "
            f"{shape.batches_per_step} items, which this model cannot weight, as it takes no "
            "num_items_in_batch: set dataloader_drop_last, and gradient_accumulation_steps to a "
            f"divisor of {shape.batches}"
        )
    if fills or (given.accepts_loss_kwargs and shape.batches_per_step > 1):
        return {"loss_weighting": "tokens"}
    return {} if given.accepts_loss_kwargs else {"loss_weighting": "micro_batches"}


@dataclass(frozen=True)
class _EachOnce:
    """Held-out items as rows, in order."""

    dataset: Any
    items: int

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Placed:
        return Placed(self.dataset[index])


def _keep(saves: Frequency, last: int) -> dict[str, Any]:
    """Return the snapshots that checkpoints are written of; the last step needs none."""
    if saves.strategy == "best":
        return {"best": 1}
    if saves.strategy == "no" or saves.every >= last:
        return {}
    # A checkpoint is written within the step after it, but with one segment a step is short.
    return {"every": saves.every, "last": 2 if saves.every == 1 else 1}


def _merge(tree: dict[str, Any], more: Mapping[str, Any], prefix: str = "") -> None:
    """Put sections into a config; raises ConfigError for a key that is there already."""
    for key, value in more.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(tree.get(key, {}), dict):
            _merge(tree.setdefault(key, {}), value, f"{name}.")
        elif key in tree:
            raise ConfigError(
                f"{name} is said by the arguments of swaptrain.hf.train: leave it out"
            )
        else:
            tree[key] = value
