"""`swaptrain.train`, `plan` and `open`: a run in a script."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swaptrain.api.objects import HandedOver, use_collate, use_data, use_model
from swaptrain.api.progress import progress_of
from swaptrain.api.run import Run
from swaptrain.api.settings import configured
from swaptrain.api.surroundings import restored
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, StoppedBySignal
from swaptrain.given import handed_over
from swaptrain.store.paths import RunPaths

__all__ = ["open_run_dir", "plan", "train"]

Rows = Callable[[dict[str, Any]], object]


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    eval: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    dir: str | Path | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    memory: str | None = None,
    dtype: str | None = None,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    sequence_length: int | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    optimizer: str | Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    base: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    eval_every: int | None = None,
    on_step: Rows | None = None,
    on_eval: Rows | None = None,
    on_commit: Callable[[int], object] | None = None,
    fresh: bool = False,
    accept_change: bool = False,
    from_step: int | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model that need not fit in memory; return the run, whose weights are on the disk.

    The same call goes on where a kill or Ctrl-C has stopped it.

        run = swaptrain.train(model=make_model, data=dataset, dir="runs/mine", steps=200,
                              memory="8GiB", optimizer={"name": "adamw", "lr": 3e-4})

    `config` is a YAML file or nested mappings, as docs/config.md describes them; `overrides` sets
    dotted keys over it, such as {"store.keep.best": 2}, and so do the arguments: `steps` is
    train.steps, `memory` memory.host, `dir` run.dir, and so on.

    `model` is a function that returns a module, a directory of the hub, a config of transformers,
    or a module of at most 512 MiB. `data` and `eval` are a file, a list of texts or of rows, a
    `datasets.Dataset`, a dataset with __len__ and __getitem__, or a function that returns one;
    `data` may be a function of (step, micro_batch) that returns a batch. `collate` makes a
    micro-batch of a list of items.

    `on_step` and `on_eval` get rows of metrics.jsonl, `on_commit` the number of a step that is on
    the disk. What one of them raises ends the run where nothing is lost, and comes out of here.

    Raises ConfigError before anything is written where something is wrong, RunError where the run
    failed and can go on, DamagedStoreError, KeyboardInterrupt after the instruction in progress.
    """
    arguments = {
        name: value
        for name, value in locals().items()
        if name in _ARGUMENTS and name not in ("config", "overrides")
    }
    given, full = _prepared(config, overrides, model, data, eval, collate, dir, arguments)
    from swaptrain.verbs.listener import Listener
    from swaptrain.verbs.train import train as train_run

    listener = Listener(on_step, on_eval, on_commit)
    with restored(), handed_over(given.functions):
        try:
            train_run(
                full,
                fresh=fresh,
                accept_change=accept_change,
                from_step=from_step,
                listener=listener,
                progress=progress_of(full.memory.host, quiet=quiet),
            )
        except StoppedBySignal as stop:
            if listener.error is not None:
                raise listener.error from None
            if stop.exit_code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(str(stop)) from None
            raise
    if listener.error is not None:
        raise listener.error
    return Run(full, given)


def plan(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    eval: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    dir: str | Path | None = None,
    quiet: bool = False,
    **arguments: Any,
) -> Any:
    """Return what a run takes, and print it: segments, memory, disk, bytes and seconds of a step.

    The arguments are those of `train`; nothing is written or trained.
    """
    unknown = arguments.keys() - _ARGUMENTS
    if unknown:
        raise ConfigError(f"plan has no argument {', '.join(sorted(unknown))}")
    given, full = _prepared(config, overrides, model, data, eval, collate, dir, arguments)
    from swaptrain.verbs.plan import plan as plan_run
    from swaptrain.verbs.plan_table import show

    with restored(), handed_over(given.functions):
        report = plan_run(full)
    if not quiet:
        show(report, full)
    return report


def open_run_dir(dir: str | Path, *, model: Any = None, data: Any = None, eval: Any = None) -> Run:
    """Return a run that exists, as `train` returned it; raises ConfigError where there is none.

    `model`, `data` and `eval` are what `train` was given, where a function makes them: code is not
    taken from a run directory, which may be somebody else's.
    """
    paths = RunPaths(Path(dir))
    if not paths.config.exists():
        raise ConfigError(f"{dir} is not a run directory: it has no config.yaml")
    config = load_config(paths.config)
    # Where it lies now, not where it was made.
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": paths.run_dir})})
    given = HandedOver()
    use_model(given, model)
    tokenizer = str(config.data.tokenizer)
    use_data(given, data, "data", paths.run_dir, tokenizer=tokenizer)
    use_data(given, eval, "eval", paths.run_dir, tokenizer=tokenizer)
    if given.keys:
        config = configured(config.to_tree(), {}, given.keys)
    if given.batches is not None:
        given.batches.micro_batches = config.data.micro_batches
        given.batches.steps = max(1, config.train.last_step)
    return Run(config, given, is_own=False)


_ARGUMENTS = frozenset(
    {
        *("steps", "epochs", "memory", "dtype", "micro_batch", "micro_batches", "sequence_length"),
        *("tokenizer", "chat_template", "optimizer", "lora", "base", "device", "seed", "dir"),
        "eval_every",
    }
)


def _prepared(
    config: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    model: Any,
    data: Any,
    eval: Any,
    collate: Callable[[list[Any]], Any] | None,
    dir: str | Path | None,
    arguments: Mapping[str, Any],
) -> tuple[HandedOver, Config]:
    """Return the objects of a call, and the config that names them."""
    given = HandedOver()
    use_model(given, model)
    run_dir = Path(dir) if dir is not None else _run_dir(config, overrides)
    named = dict(arguments)
    tokenizer = _tokenizer(config, overrides, named.get("tokenizer"), model)
    named["tokenizer"] = tokenizer
    use_data(given, data, "data", run_dir, tokenizer=tokenizer)
    use_data(given, eval, "eval", run_dir, tokenizer=tokenizer)
    use_collate(given, collate)
    if isinstance(named.get("optimizer"), str):
        named["optimizer"] = {"name": named["optimizer"]}
    if eval is not None and named.get("eval_every") is None:
        named["eval_every"] = (overrides or {}).get("eval.every", 100)
    full = configured(config, overrides, {**given.keys, **named, "dir": dir})
    if given.batches is not None:
        given.batches.micro_batches = full.data.micro_batches
        given.batches.steps = max(1, full.train.last_step)
        if full.data.micro_batch != given.batches.items:
            raise ConfigError(
                f"micro_batch is {full.data.micro_batch}, and the batches of data have "
                f"{given.batches.items} items: leave it out"
            )
    return given, full


def _tokenizer(
    config: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    argument: str | Path | None,
    model: Any,
) -> str | None:
    """Return the tokenizer of a call: named anywhere, else that of the model's directory."""
    found: Any = (overrides or {}).get("data.tokenizer") or argument
    if found is None and isinstance(config, Mapping):
        found = (config.get("data") or {}).get("tokenizer")
    if found is None and isinstance(config, str | Path):
        found = load_config(Path(config)).data.tokenizer
    if found is None and isinstance(model, str | Path):
        found = model if (Path(model) / "tokenizer.json").is_file() else None
    return None if found is None else str(found)


def _run_dir(
    config: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
) -> Path:
    """Return where rows of a script are written: the run directory, as far as it is known."""
    found: Any = (overrides or {}).get("run.dir")
    if found is None and isinstance(config, Mapping):
        found = (config.get("run") or {}).get("dir")
    if found is None and isinstance(config, str | Path):
        found = load_config(Path(config)).run.dir
    if found is None:
        raise ConfigError("dir: give the directory of the run, such as dir='runs/mine'")
    return Path(found)
