"""The command line: parse, then hand over; torch is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from swaptrain import cli_start
from swaptrain.config.load import load_config
from swaptrain.config.paths import expand_argument
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, DamagedStoreError, StoppedBySignal, SwaptrainError
from swaptrain.machine.torch_settings import set_up_torch
from swaptrain.observe.output import open_standard_streams, silence
from swaptrain.run.signals import StopRequest
from swaptrain.store.disk.durable_files import run_error
from swaptrain.store.paths import RunPaths
from swaptrain.units import parse_size

if TYPE_CHECKING:
    from swaptrain.verbs.export import Form

__all__ = ["main"]

_PROGRAM = "python -m swaptrain"
_EPILOG = """\
Verbs:
  plan      show segments, memory, disk and bytes per step, and train nothing
  inspect   show what a run directory holds
  eval      what held-out data says of a run: loss, perplexity, accuracy
  generate  write text with the weights of a run, which need not fit in memory
  export    write the weights of a run to a safetensors file, also while it trains
  verify    read all that a run would go on from, and list what is damaged
  init      write a config for a model directory and files
  migrate   print the config that a file of Axolotl, LLaMA-Factory or TRL means here

`python -m swaptrain VERB --help` explains a verb; docs/config.md every key of a config.

Exit codes: 0 finished; 1 failed, can be resumed; 2 the config or a budget is wrong, nothing was
touched; 3 the store is damaged; 130 or 143 stopped by a signal, can be resumed."""

Arguments = argparse.Namespace


def _train(given: Arguments) -> None:
    """Train a model that fits neither in GPU memory nor in RAM, from an SSD.

    Starts the run in run.dir, or resumes it exactly where it stopped.
    """
    if given.fresh and given.from_step is not None:
        raise ConfigError("--fresh deletes the snapshots that --from-step goes back to")
    loaded = _load(given)
    set_up_torch()
    from swaptrain.verbs.train import train

    train(loaded, fresh=given.fresh, accept_change=given.accept_change, from_step=given.from_step)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
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


def _plan(given: Arguments) -> None:
    """Show segments, memory, disk and bytes per step of a config, and train nothing."""
    loaded = _load(given)
    set_up_torch()
    from swaptrain.verbs.plan import print_plan

    print_plan(loaded)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the YAML file that describes the job",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY.SUB=VALUE",
        help="config keys to set over the file, such as train.steps=100 memory.host=8GiB",
    )


def _inspect(given: Arguments) -> None:
    """Show what a run directory holds: config, steps, segments, bytes."""
    run_dir = _check_run(given.run)
    from swaptrain.verbs.inspect import inspect_run

    inspect_run(run_dir)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory (run.dir)")


_OTHER_FILES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json", ".yaml")
"""Ends of names of files that an export does not write."""


def _export(given: Arguments) -> None:
    """Write the weights of a run: to a safetensors file, as an adapter, or merged into its base.

    Of a run that trains, as they are at the end of the step in progress: the trainer waits until
    they are read. Of any other, as its last commit left them.
    """
    if (given.to is None) == (given.adapter is None):
        raise ConfigError("give one of --to DIR, --to FILE.safetensors and --adapter DIR")
    if given.merged and given.to is None:
        raise ConfigError("--merged writes a model: give --to DIR, or --to FILE.safetensors")
    target = expand_argument(given.to or given.adapter)
    if given.to is not None and target.suffix in _OTHER_FILES:
        raise ConfigError(f"--to {target}: name a directory, or a file that ends in .safetensors")
    shard_bytes = parse_size(given.max_shard)
    run_dir = _check_run(given.run)
    from swaptrain.verbs.export import export_weights

    form: Form = "adapter" if given.adapter is not None else "merged" if given.merged else "all"
    export_weights(
        run_dir,
        target,
        given.dtype,
        form=form,
        from_step=given.from_step,
        shard_bytes=shard_bytes,
        state=given.state,
        note=print,
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="the model as the hub has it, for from_pretrained; or FILE.safetensors: weights alone",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="write the adapter (lora) as PEFT does: adapter_model.safetensors and its config",
    )
    parser.add_argument(
        "--max-shard",
        default="5GB",
        metavar="SIZE",
        help="most bytes of one file of weights in a directory (default 5GB)",
    )
    parser.add_argument(
        "--state",
        action="store_true",
        help="write what the optimizer holds of each parameter too, and the step",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="merge the adapter (lora) into its base",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="write in this dtype; the default is that of the checkpoint, or of the training",
    )
    _step_argument(parser)


def _init(given: Arguments) -> None:
    """Write a commented config for a model directory and files, after looking at both.

    Adapters or all weights, dtype, memory, lengths and batches are chosen by what the machine has;
    the comments say why, and what a run will take. The disk is measured, for six seconds. No file
    is overwritten.
    """
    set_up_torch()
    cli_start.init(given, _say)


def _eval(given: Arguments) -> None:
    """Print what held-out data says of a run: loss, perplexity, accuracy; nothing changes.

    The data are those of the config's eval section, over which keys such as eval.batches=all are
    set, or the files of --data. Of a run that trains, its weights at the end of the step in
    progress, where the trainer waits; else those of its last step.
    """
    run_dir = None
    if given.config is None:
        if not given.overrides or "=" in given.overrides[0]:
            raise ConfigError("give one of RUN and --config FILE")
        run_dir = _check_run(Path(given.overrides.pop(0)))
        given.config = RunPaths(run_dir).config
    loaded = _load(given)
    set_up_torch()
    from swaptrain.verbs.evaluate import evaluate_run, with_held_out
    from swaptrain.verbs.recorded_code import refuse_code

    if run_dir is not None:
        keys = [override.partition("=")[0].strip() for override in given.overrides]
        cure = "give --config FILE"
        refuse_code(loaded, run_dir, ("model", "data", "eval"), given=keys, cure=cure)
        run = loaded.run.model_copy(update={"dir": run_dir})
        loaded = loaded.model_copy(update={"run": run})
    if given.data:
        loaded = with_held_out(loaded, given.data)
    print(evaluate_run(loaded, given.from_step, _say).line())


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the config of a run, whose run.dir is taken"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="RUN | KEY.SUB=VALUE",
        help="without --config a run directory whose model is no code; config keys to set over it",
    )
    parser.add_argument(
        "--data",
        action="append",
        metavar="FILE",
        help="held-out data instead of those of the config, all of it: text, rows (.jsonl), or "
        "token ids (.bin, .npy); a glob too, and more than once",
    )
    _step_argument(parser)


def _step_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--step", "--from-step"),
        type=int,
        dest="from_step",
        metavar="N",
        help="take the snapshot of step N (store.keep), and let a run that trains go on",
    )


def _generate(given: Arguments) -> None:
    """Write text with the weights of a run, which need not fit in memory.

    The weights pass through memory once for each token, for all prompts together; as much of them
    as memory.host allows stays there. Of a run that trains, its weights at the end of the step in
    progress, where the trainer waits. The likeliest token is taken, or one is drawn where
    --temperature, --top-p or --top-k is given. Text goes to the standard output, of several prompts
    as JSON Lines.
    """
    if (given.run is None) == (given.config is None):
        raise ConfigError("give one of RUN and --config FILE")
    if (given.prompt is None) == (given.prompts is None):
        raise ConfigError("give one of --prompt TEXT and --prompts FILE")
    if given.run is not None and given.set:
        raise ConfigError("--set sets keys over a config: give --config FILE")
    _check_sampling(given)
    run_dir = None if given.run is None else _check_run(given.run)
    loaded = None if given.config is None else load_config(expand_argument(given.config), given.set)
    set_up_torch()
    from swaptrain.generate import Prompt, Sampling, read_prompts
    from swaptrain.verbs.generate import as_row, generate_text, recorded

    if loaded is None:
        assert run_dir is not None
        loaded = recorded(run_dir)
    is_one = given.prompt is not None
    prompts = [Prompt(given.prompt)] if is_one else read_prompts(expand_argument(given.prompts))
    found = generate_text(
        loaded,
        prompts,
        Sampling(given.max_new_tokens, given.temperature, given.top_p, given.top_k, given.seed),
        is_chat=given.chat,
        tokenizer=None if given.tokenizer is None else expand_argument(given.tokenizer),
        from_step=given.from_step,
        write=(lambda text: print(text, end="", flush=True)) if is_one else None,
        note=_say,
    )
    if not is_one:
        for prompt, text in zip(prompts, found.texts, strict=True):
            print(as_row(prompt, text))


def _check_sampling(given: Arguments) -> None:
    if given.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {given.max_new_tokens}: give 1 or more")
    if given.top_k is not None and given.top_k < 1:
        raise ConfigError(f"--top-k is {given.top_k}: give 1 or more")
    if given.temperature is not None and not 0 < given.temperature < float("inf"):
        raise ConfigError(f"--temperature is {given.temperature}: give a number above 0")
    if given.top_p is not None and not 0 < given.top_p <= 1:
        raise ConfigError(f"--top-p is {given.top_p}: give a number above 0, at most 1")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a run directory whose model is no code"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the config of a run, whose run.dir is taken"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="a config key to set over the file, such as memory.host=8GiB",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the text to go on with")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="several: one a line, or .jsonl with prompt or messages, all in one batch",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, by the chat template"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens of each text (default 128)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="draw, at this temperature")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw of the likeliest, to P")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw of the K likeliest")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default 0)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="instead of data.tokenizer of the config"
    )
    _step_argument(parser)


def _verify(given: Arguments) -> None:
    """Read all that a run would go on from, and its snapshots, and list what is damaged.

    Every chunk is compared with its checksum, at the speed of the disk. Exit code 0 if nothing is
    wrong, else 3. A run that is training can be checked: it is not disturbed. --repair is refused
    while it trains.
    """
    run_dir = _check_run(given.run)
    from swaptrain.verbs.verify import verify_run

    verify_run(run_dir, mend=given.repair)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument(
        "--repair", action="store_true", help="restore what a snapshot holds the same bytes of"
    )


@dataclass(frozen=True)
class _Verb:
    """A word of the command line."""

    run: Callable[[Arguments], None]
    """Does it; its docstring is the help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]


_TRAIN = _Verb(_train, _train_arguments)
_VERBS = {
    "plan": _Verb(_plan, _config_arguments),
    "inspect": _Verb(_inspect, _run_arguments),
    "eval": _Verb(_eval, _eval_arguments),
    "generate": _Verb(_generate, _generate_arguments),
    "export": _Verb(_export, _export_arguments),
    "verify": _Verb(_verify, _verify_arguments),
    "init": _Verb(_init, cli_start.init_arguments),
    "migrate": _Verb(cli_start.migrate, cli_start.migrate_arguments),
}


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong usage, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help")


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
    return lambda: verb.run(given)


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


def _load(given: Arguments) -> Config:
    for word in given.overrides:
        if word in _VERBS:
            raise ConfigError(f"the verb comes first: {_PROGRAM} {word} --help")
    return load_config(expand_argument(given.config), given.overrides)


def _check_run(run: Path) -> Path:
    run_dir = expand_argument(run)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory; give the run.dir of a config")
    from swaptrain.store.access.containment import check_contained

    check_contained(run_dir)
    return run_dir


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
