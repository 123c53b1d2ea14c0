"""The command line: parse, then hand over; torch is imported only by the verb that needs it."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from swaptrain.config import Config, load_config
from swaptrain.config_paths import expand_argument
from swaptrain.errors import ConfigError, DamagedStoreError, StoppedBySignal, SwaptrainError
from swaptrain.execute.stopping import StopRequest
from swaptrain.observe.output import open_standard_streams, silence
from swaptrain.store.files import run_error

__all__ = ["SPIN_COUNT", "main"]

SPIN_COUNT = 10_000
"""Rounds of GNU's OpenMP before a thread that waits sleeps: 0.1 to 0.2 ms."""
_PROGRAM = "python -m swaptrain"
_EPILOG = """\
Verbs:
  plan      show segments, memory, disk and bytes per step, and train nothing
  inspect   show what a run directory holds
  export    write the weights of a run to a safetensors file, also while it trains
  verify    read all that a run would go on from, and list what is damaged

`python -m swaptrain VERB --help` explains a verb; docs/config.md every key of a config.

Exit codes: 0 finished; 1 failed, can be resumed; 2 the config or a budget is wrong, nothing was
touched; 3 the store is damaged; 130 or 143 stopped by a signal, can be resumed."""

# A command returns what is to be done, so that the work runs outside of the parser and its own
# handling of signals and broken pipes.
Action = Callable[[], None]

ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The YAML file that describes the job.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Config keys to set over the file, such as train.steps=100 memory.host=8GiB.",
        show_default=False,
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory (run.dir).")]


class ExportType(StrEnum):
    """The dtypes that `export --dtype` offers."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def _train(
    config: ConfigOption,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what run.dir holds and start over.")
    ] = False,
    accept_change: Annotated[
        bool,
        typer.Option(
            "--accept-change",
            help="Resume though the learning rate, its schedule or the weight decay differ.",
        ),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step",
            metavar="N",
            help="Go back to the snapshot of step N (store.keep) and train on from there; all that "
            "came after it is lost.",
        ),
    ] = None,
) -> Action:
    """Train a model that fits neither in GPU memory nor in RAM, from an SSD.

    Starts the run in run.dir, or resumes it exactly where it stopped.
    """

    def action() -> None:
        if fresh and from_step is not None:
            raise ConfigError("--fresh deletes the snapshots that --from-step goes back to")
        loaded = _load(config, overrides)
        _set_up_torch()
        from swaptrain.execute.train import train

        train(loaded, fresh=fresh, accept_change=accept_change, from_step=from_step)

    return action


def _plan(config: ConfigOption, overrides: Overrides = None) -> Action:
    """Show segments, memory, disk and bytes per step of a config, and train nothing."""

    def action() -> None:
        loaded = _load(config, overrides)
        _set_up_torch()
        from swaptrain.execute.plan import print_plan

        print_plan(loaded)

    return action


def _inspect(run: RunArgument) -> Action:
    """Show what a run directory holds: config, steps, segments, bytes."""

    def action() -> None:
        run_dir = _check_run(run)
        from swaptrain.observe.inspect import inspect_run

        inspect_run(run_dir)

    return action


def _export(
    run: RunArgument,
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE.safetensors", help="The file to write.")
    ],
    dtype: Annotated[
        ExportType | None,
        typer.Option(help="Write in this dtype; the default is the one that was trained in."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", metavar="N", help="Take the snapshot of step N (store.keep) instead."
        ),
    ] = None,
) -> Action:
    """Write the weights of a run to a safetensors file.

    Of a run that trains, as they are at the end of the step in progress: the trainer waits until
    they are read. Of any other, as its last commit left them.
    """

    def action() -> None:
        target = expand_argument(to)
        if target.suffix != ".safetensors":
            raise ConfigError(f"--to {target}: the file's name must end in .safetensors")
        run_dir = _check_run(run)
        from swaptrain.store.export import export_weights

        chosen = dtype.value if dtype else None
        export_weights(run_dir, target, chosen, from_step=from_step, note=print)

    return action


def _verify(
    run: RunArgument,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Restore what a snapshot holds the same bytes of."),
    ] = False,
) -> Action:
    """Read all that a run would go on from, and its snapshots, and list what is damaged.

    Every chunk is compared with its checksum, at the speed of the disk. Exit code 0 if nothing is
    wrong, else 3. A run that is training can be checked: it is not disturbed. --repair is refused
    while it trains.
    """

    def action() -> None:
        run_dir = _check_run(run)
        from swaptrain.observe.verify_run import verify_run

        verify_run(run_dir, mend=repair)

    return action


_VERBS: dict[str, Callable[..., Action]] = {
    "plan": _plan,
    "inspect": _inspect,
    "export": _export,
    "verify": _verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv`) and return its exit code; prints all errors."""
    open_standard_streams()
    try:
        action = _parse(list(sys.argv[1:] if argv is None else argv))
        if action is not None:
            with StopRequest():
                action()
        sys.stdout.flush()
    except StoppedBySignal as stop:
        _say(str(stop))
        return stop.exit_code
    except SwaptrainError as error:
        _say("; ".join([f"error: {error}", *_advice_on(error), *getattr(error, "__notes__", ())]))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # the reader of a pipe has gone: `inspect RUN | head`
        return 1
    except OSError as error:
        _say(f"error: {_described(error)}")
        silence(sys.stdout)  # it may be what failed
        return 1
    except Exception:
        traceback.print_exc()
        _say("this is a bug in swaptrain: please report it with the lines above")
        return 1
    return 0


def _parse(argv: list[str]) -> Action | None:
    """Return what the arguments ask for, or None if that was the help, which is printed."""
    command, verb = _train, ""
    if not argv:
        argv = ["--help"]
    elif argv[0] in _VERBS:
        verb, argv = argv[0], argv[1:]
        command = _VERBS[verb]
    elif not argv[0].startswith("-") and "=" not in argv[0]:
        raise ConfigError(f"unknown verb {argv[0]!r}; {_advice(argv[0])}")
    program = f"{_PROGRAM} {verb}".rstrip()
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(epilog=None if verb else "\b\n" + _EPILOG.replace("\n\n", "\n\n\b\n"))(command)
    # In every version of typer, BadParameter is a kind of the error for wrong usage.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        result: Any = typer.main.get_command(app).main(
            args=argv, prog_name=program, standalone_mode=False
        )
    except usage_error as error:
        message: str = error.format_message()
        message = message.replace("Value error, ", "").rstrip(".")
        raise ConfigError(f"{message}. See {program} --help") from None
    return result if callable(result) else None


def _advice(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"to train: {_PROGRAM} --config {word}"
    close = difflib.get_close_matches(word, _VERBS, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"to train: {_PROGRAM} --config FILE; the verbs are {', '.join(_VERBS)}"


def _advice_on(error: SwaptrainError) -> list[str]:
    if not isinstance(error, DamagedStoreError):
        return []
    from swaptrain.store.advice import advice

    return advice(error)


def _load(config: Path, overrides: Sequence[str] | None) -> Config:
    for word in overrides or ():
        if word in _VERBS:
            raise ConfigError(f"the verb comes first: {_PROGRAM} {word} --help")
    return load_config(expand_argument(config), overrides or ())


def _check_run(run: Path) -> Path:
    run_dir = expand_argument(run)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory; give the run.dir of a config")
    from swaptrain.store.contained import check_contained

    check_contained(run_dir)
    return run_dir


def _set_up_torch() -> None:
    """Set up what torch reads when it is imported: the allocator, and how its threads wait.

    Threads that spin for long while they wait for each other take the cores from the I/O threads,
    and make a step ten times slower where another process wants them too. Threads that sleep at
    once take 70 microseconds to wake, before each operation, ten times what a small one takes.
    So they spin for a tenth of a millisecond. Waiting changes no result.
    """
    from swaptrain.memory.malloc import tune
    from swaptrain.store.files import user_cache

    # torch makes this directory when it is imported, else under a name in /tmp that anybody knows.
    with suppress(OSError):
        torch_cache = user_cache() / "torch"
        torch_cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(torch_cache))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    tune()


def _described(error: OSError) -> str:
    """Put an error that nobody expected in words; one without a file is of the standard output."""
    named = error.filename2 or error.filename
    if named is None:
        return f"the system reports: {error.strerror or error}"
    return str(run_error(error, Path(os.fsdecode(named)), "use"))


def _say(message: str) -> None:
    # A standard error that fails (a log on a full disk) must not change the exit code.
    try:
        print(f"swaptrain: {message}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
