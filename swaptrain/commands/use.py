"""The verbs that make something of a run's weights: eval, generate, export, reshard."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swaptrain.commands.arguments import (
    Arguments,
    check_run,
    load,
    run_arguments,
    say,
    step_argument,
    whole_run,
)
from swaptrain.config.load import load_config
from swaptrain.config.paths import expand_argument
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.machine.torch_settings import set_up_torch
from swaptrain.store.paths import RunPaths, rank_dirs
from swaptrain.units import parse_size

if TYPE_CHECKING:
    from swaptrain.verbs.export import Form

__all__ = ["evaluate", "evaluate_arguments", "export", "export_arguments"]
__all__ += ["generate", "generate_arguments", "reshard", "reshard_arguments"]

_OTHER_FILES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json", ".yaml")
"""Ends of names of files that an export does not write."""


def export(given: Arguments) -> None:
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
    run_dir = check_run(given.run)
    from swaptrain.ranks.layout import joined
    from swaptrain.ranks.limits import refuse_part
    from swaptrain.verbs.export import export_weights

    refuse_part(run_dir)
    form: Form = "adapter" if given.adapter is not None else "merged" if given.merged else "all"
    with joined(run_dir, say) as there:
        export_weights(
            there,
            target,
            given.dtype,
            form=form,
            from_step=given.from_step,
            shard_bytes=shard_bytes,
            state=given.state,
            note=print,
        )


def export_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
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
    step_argument(parser)


def evaluate(given: Arguments) -> None:
    """Print what held-out data says of a run: loss, perplexity, accuracy; nothing changes.

    The data are those of the config's eval section, over which keys such as eval.batches=all are
    set, or the files of --data. Of a run that trains, its weights at the end of the step in
    progress, where the trainer waits; else those of its last step.
    """
    run_dir = None
    if given.config is None:
        if not given.overrides or "=" in given.overrides[0]:
            raise ConfigError("give one of RUN and --config FILE")
        run_dir = check_run(Path(given.overrides.pop(0)))
        given.config = RunPaths((rank_dirs(run_dir) or [run_dir])[0]).config
    loaded = load(given)
    set_up_torch()
    from swaptrain.verbs.evaluate import evaluate_run, with_held_out
    from swaptrain.verbs.recorded_code import refuse_code

    if run_dir is not None:
        keys = [override.partition("=")[0].strip() for override in given.overrides]
        cure = "give --config FILE"
        refuse_code(loaded, run_dir, ("model", "data", "eval"), given=keys, cure=cure)
        loaded = _moved(loaded, run_dir)
    if given.data:
        loaded = with_held_out(loaded, given.data)
    with whole_run(loaded.run.dir) as there:
        print(evaluate_run(_moved(loaded, there), given.from_step, say).line())


def _moved(config: Config, run_dir: Path) -> Config:
    """Return the config of a run that lies elsewhere."""
    run = config.run.model_copy(update={"dir": run_dir})
    return config.model_copy(update={"run": run})


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
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
    step_argument(parser)


def generate(given: Arguments) -> None:
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
    run_dir = None if given.run is None else check_run(given.run)
    loaded = None if given.config is None else load_config(expand_argument(given.config), given.set)
    set_up_torch()
    whole_dir = loaded.run.dir if loaded is not None else run_dir
    assert whole_dir is not None, "one of the two was given"
    with whole_run(whole_dir) as there:
        _generate(given, None if loaded is None else _moved(loaded, there), there)


def _generate(given: Arguments, loaded: Config | None, run_dir: Path) -> None:
    """Write text with the weights in `run_dir`, by the config that is given or recorded there."""
    from swaptrain.generate import Prompt, Sampling, read_prompts
    from swaptrain.verbs.generate import as_row, generate_text, recorded

    if loaded is None:
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
        note=say,
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


def generate_arguments(parser: argparse.ArgumentParser) -> None:
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
    step_argument(parser)


def reshard(given: Arguments) -> None:
    """Let a run of several processes (torchrun) go on with another number of them.

    Segments move to the directories of their new owners: by links on one disk, else by copies. The
    directories of all ranks lie in RUN: those of several machines are brought together first. The
    run keeps its config: M has to divide data.micro_batches, and store.commit.unit stays step. With
    --ranks 1 it becomes a run of one process, which every verb reads.
    """
    if given.ranks < 1:
        raise ConfigError(f"--ranks is {given.ranks}: give 1 or more")
    run_dir = expand_argument(given.run)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory; give the run.dir of a config")
    from swaptrain.verbs.reshard import reshard_run

    reshard_run(run_dir, given.ranks, print)


def reshard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `reshard`."""
    run_arguments(parser)
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="M", help="how many processes go on with it"
    )
