"""The least `memory.device` for long sequences, whole and in ranges of tokens, without computing.

    python scripts/questions/long_sequences.py [--tokens N ...] [--ranges N ...] [--layers N]

A Llama of the shape of Llama 3 8B with few layers, bfloat16 and AdamW, one sequence a micro-batch,
is captured with its weights unmade and cut for all sizes of segments. Printed is the least that the
largest instruction of a step needs, by what plan reckons: what it reads, writes and computes at
once, without kernels' scratch. For `memory.host` what torch takes comes on top.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from swaptrain.compute.device_prefetch import needed_bytes
from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.models.build import build, model_factory
from swaptrain.planning.cuts import Cutter, short_steps
from swaptrain.planning.update_rules import update_rules
from swaptrain.units import format_size

VOCABULARY = 128_256
LLAMA_3_8B = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rope_theta": 500_000.0, "tie_word_embeddings": False,
}  # fmt: skip


def least_needed(tokens: int, ranges: int | None, layers: int, folder: Path) -> str:
    """Return what the largest instruction needs, with the instruction; or why there is no plan."""
    tree = {
        "model": {
            "hf": {**LLAMA_3_8B, "num_hidden_layers": layers, "max_position_embeddings": tokens},
            "dtype": "bfloat16",
        },
        "data": {"text": ["{stdlib}/*.py"], "sequence_length": tokens, "micro_batch": 1},
        "memory": {"tokens": ranges},
        "train": {"steps": 1},
        "run": {"dir": str(folder / "run")},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(path).resolved()
    factory = model_factory(config)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    built = build(config, factory, {"input_ids": ids, "labels": ids}, draw=False)
    cutter = Cutter(config, built, update_rules(config.optimizer, 0, built.initial.module))
    found: list[tuple[int, str]] = []
    for target_bytes in cutter.targets():
        try:
            cut = cutter.cut(target_bytes)
        except ConfigError:  # a part of the model is larger than such a segment may be
            continue
        program = short_steps(cut.builder).step()
        each = {i: needed_bytes([i], cut.captured, cut.layouts) for i in program}
        largest = max(each, key=each.__getitem__)
        found.append((each[largest], largest.operation.value))
    size, operation = min(found)
    return f"{format_size(size)} ({operation})"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131_072])
    parser.add_argument("--ranges", type=int, nargs="+", default=[2048, 512])
    parser.add_argument("--layers", type=int, default=1)
    arguments = parser.parse_args()
    table = Table("tokens", "whole", *(f"in ranges of {each:,}" for each in arguments.ranges))
    for tokens in arguments.tokens:
        cells = []
        for ranges in (None, *arguments.ranges):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    cells.append(least_needed(tokens, ranges, arguments.layers, Path(folder)))
                except SwaptrainError as error:
                    cells.append(str(error).splitlines()[0])
            print(tokens, ranges, cells[-1], flush=True)
        table.add_row(f"{tokens:,}", *cells)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
