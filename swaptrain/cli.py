"""The command line: parse, then hand over; torch is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swaptrain.commands import check, look, start, use
from swaptrain.commands.arguments import Arguments, config_arguments, load, say, say_first
from swaptrain.errors import ConfigError, DamagedStoreError, StoppedBySignal, SwaptrainError
from swaptrain.machine.torch_settings import set_up_torch
from swaptrain.memory.collector import uncollected
from swaptrain.observe.output import open_standard_streams, silence
from swaptrain.ranks.launch import launched
from swaptrain.run.signals import StopRequest
from swaptrain.store.disk.durable_files import run_error

__all__ = ["main"]

_PROGRAM = "python -m swaptrain"
_ECHO_S = 3.0
"""For which a process that is silent lets the one that speaks end first: torchrun ends all others,
at once, when the first one has ended."""
_EPILOG = """\
Verbs:
  plan      show segments, memory, disk and bytes per step, and train nothing
  inspect   show what a run directory holds, a tensor of it, or what differs between two
  report    write one HTML page of a run, with charts, or of two side by side
  eval      what held-out data says of a run: loss, perplexity, accuracy
  generate  write text with the weights of a run, which need not fit in memory
  export    write the weights of a run to a safetensors file, also while it trains
  verify    read all that a run would go on from, and list what is damaged
  compare   take steps of a job in plain PyTorch too, and say whether all bits are equal
  doctor    check disk, memory, processor and packages of this machine for a run
  init      write a config for a model directory and files
  reshard   let a run of several processes go on with another number of them
  migrate   print the config that a file of Axolotl, LLaMA-Factory or TRL means here

`python -m swaptrain VERB --help` explains a verb; docs/config.md every key of a config.

Exit codes: 0 finished; 1 failed, can be resumed; 2 the config or a budget is wrong, nothing was
touched; 3 the store is damaged; 130 or 143 stopped by a signal, can be resumed."""


def _train(given: Arguments) -> None:
    """Train a model that fits neither in GPU memory nor in RAM, from an SSD.

    Starts the run in run.dir, or resumes it exactly where it stopped.
    """
    if given.fresh and given.from_step is not None:
        raise ConfigError("--fresh deletes the snapshots that --from-step goes back to")
    with _said_once():
        loaded = load(given)
    launch = launched()
    if launch is None or not launch.ranks.rank:
        say_first(f"{given.config} is read: loading torch, and then the model and its data")
    set_up_torch()
    with uncollected():
        from swaptrain.verbs.train import train

    if launch is not None:
        from swaptrain.verbs.train_together import TogetherOptions, train_together

        options = TogetherOptions(given.fresh, given.accept_change, given.from_step)
        train_together(loaded, launch, options)
        return
    train(loaded, fresh=given.fresh, accept_change=given.accept_change, from_step=given.from_step)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="delete what run.dir holds and start over"
    )
    parser.add_argument(
        "--accept-change",
        action="store_true",
        help="resume though the learning rate, its schedule or the weight decay differ",
    )
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="go back to the snapshot of step N (store.keep) and train on from there; all that "
        "came after it is lost",
    )


@dataclass(frozen=True)
class _Verb:
    """A word of the command line."""

    run: Callable[[Arguments], None]
    """Does it; its docstring is the help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]


_TRAIN = _Verb(_train, _train_arguments)
_VERBS = {
    "plan": _Verb(look.plan, look.plan_arguments),
    "inspect": _Verb(look.inspect, look.inspect_arguments),
    "report": _Verb(look.report, look.report_arguments),
    "eval": _Verb(use.evaluate, use.evaluate_arguments),
    "generate": _Verb(use.generate, use.generate_arguments),
    "export": _Verb(use.export, use.export_arguments),
    "verify": _Verb(look.verify, look.verify_arguments),
    "compare": _Verb(check.compare, check.compare_arguments),
    "doctor": _Verb(check.doctor, check.doctor_arguments),
    "init": _Verb(start.init, start.init_arguments),
    "reshard": _Verb(use.reshard, use.reshard_arguments),
    "migrate": _Verb(start.migrate, start.migrate_arguments),
}


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong usage, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv`) and return its exit code; prints all errors."""
    open_standard_streams()
    try:
        with _said_once():
            action = _parse(list(sys.argv[1:] if argv is None else argv))
        if action is not None:
            with StopRequest():
                action()
        sys.stdout.flush()
    except StoppedBySignal as stop:
        if not stop.is_echo:
            say(str(stop))
        return stop.exit_code
    except SwaptrainError as error:
        if error.is_echo:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_ECHO_S)
            return error.exit_code
        say("; ".join([f"error: {error}", *_advice_on(error), *getattr(error, "__notes__", ())]))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # the reader of a pipe has gone: `inspect RUN | head`
        return 1
    except OSError as error:
        say(f"error: {_described(error)}")
        silence(sys.stdout)  # it may be what failed
        return 1
    except Exception:
        traceback.print_exc()
        say("this is a bug in swaptrain: please report it with the lines above")
        return 1
    return 0


@contextmanager
def _said_once() -> Iterator[None]:
    """Let the first process of a machine say alone what is wrong with the command line."""
    try:
        yield
    except SwaptrainError as error:
        with suppress(ConfigError):
            launch = launched()
            error.is_echo = launch is not None and launch.local_rank > 0
        raise


def _parse(argv: list[str]) -> Callable[[], None] | None:
    """Return what the arguments ask for, or None if that was the help, which is printed."""
    verb, name = _TRAIN, ""
    if not argv:
        argv = ["--help"]
    elif argv[0] in _VERBS:
        name, *argv = argv
        verb = _VERBS[name]
    elif not argv[0].startswith("-") and "=" not in argv[0]:
        raise ConfigError(f"unknown verb {argv[0]!r}; {_advice(argv[0])}")
    parser = _Parser(
        prog=f"{_PROGRAM} {name}".rstrip(),
        description=inspect.getdoc(verb.run),
        epilog=None if name else _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    try:
        # Intermixed: overrides and options come in any order.
        given, unknown = parser.parse_known_intermixed_args(argv)
    except SystemExit:  # after the help
        return None
    if unknown:
        close = difflib.get_close_matches(unknown[0], parser._option_string_actions, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        parser.error(f"unknown argument {unknown[0]}{meant}")
    if getattr(given, "config", None) is not None:
        for word in getattr(given, "overrides", ()):
            if word in _VERBS:
                raise ConfigError(f"the verb comes first: {_PROGRAM} {word} --help")
    if verb is not _TRAIN:
        _check_alone(name)
    return lambda: verb.run(given)


def _check_alone(name: str) -> None:
    """Raise ConfigError for a verb that torchrun has started several times: each would do it."""
    try:
        launch = launched()
    except ConfigError:
        return  # no torchrun: what trains would refuse it
    if launch is not None:
        instead = " (--ranks N prices several)" if name == "plan" else ""
        raise ConfigError(
            f"{name} is done by one process, and torchrun has started {launch.ranks.count}: run "
            f"{_PROGRAM} {name} without torchrun, or unset WORLD_SIZE{instead}"
        )


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
    from swaptrain.store.check.advice import advice

    return advice(error)


def _described(error: OSError) -> str:
    """Put an error that nobody expected in words; one without a file is of the standard output."""
    named = error.filename2 or error.filename
    if named is None:
        return f"the system reports: {error.strerror or error}"
    return str(run_error(error, Path(os.fsdecode(named)), "use"))
