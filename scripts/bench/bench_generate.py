"""Compare `generate` with transformers in memory, and offloaded to the disk by accelerate.

Same weights in bfloat16, prompts and number of new tokens; one system after the other, each as a
process that begins with a cold page cache, swaptrain and accelerate under a hard memory limit.
Prints the seconds of a token (all prompts of the batch together), what was read of the disk, peak
memory, and whether the tokens are those of transformers in memory.

    pip install accelerate
    python scripts/bench/bench_generate.py
    python scripts/bench/bench_generate.py --case 1.3b --systems swaptrain in_memory
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_lora import write_base
from kernel_limits import can_limit, run_limited
from rich.console import Console
from rich.table import Table

from swaptrain.machine.torch_settings import SPIN_COUNT
from swaptrain.memory.malloc import tune
from swaptrain.units import MIB, format_size, parse_size

__all__ = ["main"]

SYSTEMS = ("swaptrain", "in_memory", "offloaded")
BASE_BYTES = 700 * MIB
"""What Python, torch and transformers take before a weight is there, page tables included."""
WORDS = 32000


@dataclass(frozen=True)
class Case:
    """A model, what swaptrain may take beyond its base, and accelerate's limit."""

    shape: str
    host: str
    offloaded_limit: str


CASES = {
    "270m": Case("270m", "300MiB", "1GiB"),
    "1.3b": Case("1.3b", "768MiB", "2200MiB"),
    "small": Case("4m", "64MiB", "2GiB"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print case after case; with --child be one of the systems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in CASES if name != "small"]
    parser.add_argument("--case", nargs="+", choices=CASES, default=usual)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 8], help="sizes of a batch")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each (default 16)")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="directory on the disk")
    parser.add_argument("--child", choices=[*SYSTEMS, "store"], help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        return child(options)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_generate.", dir=options.work) as directory:
        for name in options.case:
            compare(name, CASES[name], Path(directory).resolve() / name, options)
    return 0


def compare(name: str, case: Case, job: Path, options: argparse.Namespace) -> None:
    """Print a table of one case."""
    write_base(job, case.shape)
    write_words(job)
    done = run_limited([sys.executable, __file__, "--child=store", f"--job={job}"], {})
    if done.returncode:
        raise SystemExit(done.stderr)
    host_bytes = parse_size(case.host)
    limits = {
        "swaptrain": BASE_BYTES + host_bytes,
        "offloaded": parse_size(case.offloaded_limit),
        "in_memory": None,
    }
    table = Table(title=f"{name}: {options.tokens} tokens, memory.host {case.host}")
    for column in ("prompts", "system", "limit", "s/token", "tokens/s", "read", "peak", "tokens"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for prompts in options.prompts:
        right: list[list[int]] | None = None
        for system in sorted(options.systems, key=lambda system: system != "in_memory"):
            print(f"{name}, {prompts} prompts: {system} ...", file=sys.stderr, flush=True)
            limit = limits[system] if can_limit() else None
            command = [sys.executable, __file__, f"--child={system}", f"--job={job}"]
            command += [f"--prompts={prompts}", f"--tokens={options.tokens}", f"--host={case.host}"]
            forget(job)
            environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPIN_COUNT)}
            done = run_limited(command, environment, memory_bytes=limit)
            if done.returncode:
                error = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
                table.add_row(str(prompts), system, shown(limit), error[:60])
                continue
            row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            right = row["tokens"] if system == "in_memory" else right
            same = "" if right is None else "the same" if row["tokens"] == right else "others"
            per_s = prompts * options.tokens / row["seconds"]
            sizes = [format_size(row[key]) for key in ("read_bytes", "peak_bytes")]
            took = [f"{row['seconds'] / options.tokens:.2f}", f"{per_s:.2f}"]
            table.add_row(str(prompts), system, shown(limit), *took, *sizes, same)
    Console().print(table)


def forget(job: Path) -> None:
    """Let the page cache go: what another process read would not count towards a limit."""
    os.sync()
    for file in job.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def shown(limit: int | None) -> str:
    """Return a limit for the table."""
    return "none" if limit is None else format_size(limit)


def write_words(job: Path) -> None:
    """Write a tokenizer of as many words as the model has."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(WORDS - 1)} | {"end": WORDS - 1}
    backend = Tokenizer(models.WordLevel(words))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(job / "tokenizer.json"))
    (job / "tokenizer_config.json").write_text(json.dumps({"eos_token": "end"}))


def child(options: argparse.Namespace) -> int:
    """Generate by one system and print what it took as JSON."""
    tune()  # as the command line does it
    import torch

    torch.set_num_threads(2)
    if options.child == "store":
        from swaptrain.verbs.train import train

        train(config_of(options.job, "4GiB"))
        return 0
    count = options.prompts[0]
    texts = [" ".join(f"w{17 * p + n}" for n in range(32)) for p in range(count)]
    if options.child == "swaptrain":
        tokens, seconds, read_bytes = by_swaptrain(options, texts)
    else:
        tokens, seconds, read_bytes = by_transformers(options, texts)
    peak_bytes = most_resident_bytes()
    row = {"tokens": tokens, "seconds": seconds, "read_bytes": read_bytes, "peak_bytes": peak_bytes}
    print(json.dumps(row))
    return 0


def by_swaptrain(options: argparse.Namespace, texts: list[str]) -> tuple[Any, float, int]:
    """Generate from a run of no steps."""
    from swaptrain.generate import Prompt, Sampling
    from swaptrain.verbs.generate import generate_text

    before = read_of_disk()
    prompts = [Prompt(text) for text in texts]
    found = generate_text(config_of(options.job, options.host), prompts, Sampling(options.tokens))
    return [row.tolist() for row in found.tokens], found.seconds, read_of_disk() - before


def config_of(job: Path, host: str) -> Any:
    """Return the config of a run of no steps."""
    from swaptrain.config.schema import Config

    return Config.model_validate({
        "model": {"hf": str(job), "dtype": "bfloat16"},
        "data": {"tokens": [str(job / "tokens.npy")], "tokenizer": str(job)},
        "memory": {"host": host},
        "train": {"steps": 0, "check_capture": False},
        "run": {"dir": str(job / "run")},
    })  # fmt: skip


def by_transformers(options: argparse.Namespace, texts: list[str]) -> tuple[Any, float, int]:
    """Generate with all weights in memory, or with accelerate's files."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    arguments: dict[str, Any] = {"dtype": torch.bfloat16}
    if options.child == "offloaded":
        folder = options.job / "offload"
        limit = {"cpu": parse_size(options.host)}
        arguments |= {"device_map": "auto", "max_memory": limit, "offload_folder": str(folder)}
    model: Any = AutoModelForCausalLM.from_pretrained(options.job, **arguments).eval()
    codec = Tokenizer.from_file(str(options.job / "tokenizer.json"))
    ids = torch.tensor([codec.encode(text).ids for text in texts])
    before, begun = read_of_disk(), time.perf_counter()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, do_sample=False,
        pad_token_id=WORDS - 1, eos_token_id=WORDS - 1, use_cache=True,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    return found[:, ids.shape[1] :].tolist(), seconds, read_of_disk() - before


def most_resident_bytes() -> int:
    """Return the most that was resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024


def read_of_disk() -> int:
    """Return the bytes that this process has read of disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    sys.exit(main())
