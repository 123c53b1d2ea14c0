"""`swaptrain.train`, `plan` and `open`: a run in a script."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swaptrain.api.objects import HandedOver, use_collate, use_data, use_model
from swaptrain.api.progress import progress_of
from swaptrain.api.run import Run
from swaptrain.api.settings import configured, merged, value_of
from swaptrain.api.surroundings import restored
from swaptrain.api.written_data import is_text_rows, written
from swaptrain.config.load import load_config
from swaptrain.config.paths import cached_model, expand_path, written_path
from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import Tree
from swaptrain.errors import ConfigError, StoppedBySignal
from swaptrain.given import handed_over
from swaptrain.store.paths import RunPaths
from swaptrain.units import how_many

__all__ = ["open_run_dir", "plan", "train"]

Rows = Callable[[dict[str, Any]], object]

_EVERY = 100
"""Steps between evaluations, where data is given for them and nothing says when."""
_MOST_BYTES_OF_WORDS = 514
"""A vocabulary up to twice that of bytes is taken for one of bytes."""


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
    given, full = _prepared(config, overrides, model, data, eval, collate, arguments)
    from swaptrain.verbs.listener import Listener
    from swaptrain.verbs.train import train as train_run

    listener = Listener(on_step, on_eval, on_commit)
    with restored(), handed_over(given.functions), written(given.files):
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
    arguments["dir"] = dir
    from swaptrain.verbs.plan import plan as plan_run
    from swaptrain.verbs.plans.table import show

    with TemporaryDirectory(prefix="swaptrain-plan-") as folder:
        given, full = _prepared(
            config, overrides, model, data, eval, collate, arguments, Path(folder)
        )
        with restored(), handed_over(given.functions), written(given.files):
            report = plan_run(full)
    if not quiet:
        show(report, full)
    return report


def open_run_dir(
    dir: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    eval: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Run:
    """Return a run that exists, as `train` returned it; raises ConfigError where there is none.

    `model`, `data`, `eval` and `collate` are what `train` was given, where a function makes them:
    code is not taken from a run directory, which may be somebody else's.
    """
    paths = RunPaths(Path(_expanded(str(dir), "dir")).absolute())
    if not paths.config.exists():
        raise ConfigError(f"{dir} is not a run directory: it has no config.yaml")
    config = load_config(paths.config)
    # Where it lies now, not where it was made.
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": paths.run_dir})})
    given = HandedOver()
    use_model(given, model)
    use_data(
        given,
        data,
        "data",
        paths.data,
        tokenizer=str(config.data.tokenizer),
        collates=collate is not None or config.data.collate is not None,
    )
    use_collate(given, collate)
    if given.keys:
        tree = config.to_tree()
        if data is not None:
            tree["data"] |= {**dict.fromkeys(("text", "chat", "tokens", "python")), "kwargs": {}}
        config = configured(tree, {}, given.keys)
    _tell_batches(given, config)
    return Run(config, given, is_own=False, held_out=eval)


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
    arguments: Mapping[str, Any],
    folder: Path | None = None,
) -> tuple[HandedOver, Config]:
    """Return the objects of a call, and the config that names them; nothing is written.

    Texts and rows are to be written to `folder`, or to the run's own.
    """
    given = HandedOver()
    use_model(given, model)
    use_collate(given, collate)
    named = dict(arguments)
    if isinstance(named.get("optimizer"), str):
        named["optimizer"] = {"name": named["optimizer"]}
    tree, _ = merged(config, overrides, {**given.keys, **named})
    if folder is None:
        folder = RunPaths(_run_dir(tree)).data
    if named.get("tokenizer") is None and value_of(tree, "data.tokenizer") is None:
        named["tokenizer"] = _tokenizer(tree, (data, eval))
    tokenizer = value_of(tree, "data.tokenizer") or named.get("tokenizer")
    for section, source in (("data", data), ("eval", eval)):
        use_data(
            given,
            source,
            section,
            folder,
            tokenizer=None if tokenizer is None else str(tokenizer),
            collates=value_of(tree, "data.collate") is not None,
        )
    if eval is not None and value_of(tree, "eval.every") is None:
        named["eval_every"] = _EVERY
    full = configured(config, overrides, {**given.keys, **named})
    _tell_batches(given, full)
    return given, full


def _tell_batches(given: HandedOver, config: Config) -> None:
    """Tell batches of a function which they are; raises ConfigError where a key says otherwise."""
    if given.batches is None:
        return
    given.batches.micro_batches = config.data.micro_batches
    given.batches.steps = max(1, config.train.last_step)
    if config.data.micro_batch != given.batches.items:
        raise ConfigError(
            f"micro_batch is {config.data.micro_batch}, and the batches of data have "
            f"{how_many(given.batches.items, 'item')}: leave it out"
        )
    if config.data.shuffle:
        raise ConfigError("data.shuffle: batches of a function come as it gives them: leave it out")


def _run_dir(tree: Tree) -> Path:
    """Return where a run is to be; raises ConfigError where nothing says it."""
    found = value_of(tree, "run.dir")
    if found is None:
        raise ConfigError("dir: give the directory of the run, such as dir='runs/mine'")
    return Path(_expanded(str(found), "dir")).absolute()


def _tokenizer(tree: Tree, sources: Sequence[Any]) -> str | None:
    """Return the tokenizer of the model's directory; None where there is none.

    Raises ConfigError where texts or rows would become bytes of which the model knows nothing.
    """
    model = value_of(tree, "model.hf")
    if isinstance(model, str):
        directory = Path(cached_model(_expanded(model, "model")))
        if (directory / "tokenizer.json").is_file():
            return written_path(str(directory))
        where = f"{model} has no tokenizer.json"
    elif isinstance(model, Mapping):
        words = model.get("vocab_size")
        if isinstance(words, int) and words <= _MOST_BYTES_OF_WORDS:
            return None
        where = "the model's vocabulary is not one of bytes"
    else:
        return None
    if any(map(is_text_rows, sources)):
        raise ConfigError(
            f"tokenizer: {where}: give tokenizer=DIR for texts and rows, or tokenizer='bytes'"
        )
    return None


def _expanded(path: str, argument: str) -> str:
    try:
        return expand_path(path)
    except ValueError as error:
        raise ConfigError(f"{argument}: {error}") from None
