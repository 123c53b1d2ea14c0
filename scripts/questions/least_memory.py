"""The least memory of models with one large layer, whole and in ranges.

    python scripts/questions/least_memory.py
    python scripts/questions/least_memory.py --plan --shapes xlm-roberta-large llama-4-scout
    python scripts/questions/least_memory.py --plan --shapes xlm-roberta-large --train 256MiB

Each shape is written as a checkpoint of the right names and shapes with nothing in it, which takes
no disk to speak of. Without computing: what the largest instruction needs of slabs, and what the
first weights take, with two micro-batches of 128 tokens. torch takes more while it computes. With
--plan that is measured: `plan` is asked with too small a `memory.host`, and printed is what its
refusal names. With --train two steps are trained in so much memory, and the most is printed that
they took beyond the base.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from rich.table import Table

from swaptrain.config.load import load_config
from swaptrain.models.adapters.lora import adapter_fields
from swaptrain.models.build import build, model_factory
from swaptrain.planning.budgets.creation import creation_bytes
from swaptrain.planning.cuts import Cutter
from swaptrain.planning.update_rules import update_rules
from swaptrain.program.row_ranges import WHOLE
from swaptrain.units import format_size

ATTENTION = ["q_proj", "q_b_proj", "v_proj", "o_proj"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Shape:
    """A model of transformers."""

    config: str
    model: str
    fields: dict[str, Any]
    key: str
    """Of memory: what divides it."""
    lora: bool = False
    data: str = "text"
    micro_batch: int = 1


_MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM", {"num_experts_per_tok": 2}),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768},
    ),
    "gpt-oss-20b": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 32}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {"first_k_dense_replace": 3}),
}  # fmt: skip
"""Of each four layers; what is not said here is the default of transformers."""
SHAPES = {
    "xlm-roberta-large": Shape(
        "XLMRobertaConfig", "XLMRobertaForSequenceClassification",
        {
            "vocab_size": 250002, "hidden_size": 1024, "num_hidden_layers": 24,
            "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5,
        },
        "rows", data="labelled_text", micro_batch=2,
    ),
    "llama-4-scout": Shape(
        "Llama4TextConfig", "Llama4ForCausalLM",
        {
            "num_hidden_layers": 2, "num_local_experts": 16, "interleave_moe_layer_step": 1,
            "attn_temperature_tuning": False,
        },
        "experts", lora=True,
    ),
    **{
        name + ("" if not lora else " lora"): Shape(
            config, model, {**fields, "num_hidden_layers": 4}, "experts", lora=lora
        )
        for lora in (False, True)
        for name, (config, model, fields) in _MIXTURES.items()
    },
}  # fmt: skip
"""Of Scout two layers; `lora`: adapters on its attention."""


def write_empty(shape: Shape, folder: Path) -> int:
    """Write a checkpoint in bfloat16 that is one hole; return its parameters."""
    config = getattr(transformers, shape.config)(**shape.fields, architectures=[shape.model])
    with torch.device("meta"):
        model = getattr(transformers, shape.model)(config)
    config.save_pretrained(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        shown = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
        header[name] = shown
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end // 2


@dataclass
class Job:
    """The config of a shape, and what is asked of it."""

    shape: Shape
    folder: Path
    config: Path = field(init=False)

    def __post_init__(self) -> None:
        shape, self.config = self.shape, self.folder / "job.yaml"
        data = f"tests.support.datasets:{shape.data}"
        tree = {
            "model": {"hf": str(self.folder / "base"), "dtype": "bfloat16"},
            "data": {"python": data, "micro_batch": shape.micro_batch, "micro_batches": 2},
            "train": {"steps": 2, "threads": 2, "check_capture": False},
            "memory": {"host": "64MiB"},
            "run": {"dir": str(self.folder / "run")},
            **({"lora": {"r": 16, "target_modules": ATTENTION}} if shape.lora else {}),
        }
        self.config.write_text(yaml.safe_dump(tree))

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command in the root of the repository."""
        command = [sys.executable, "-m", "swaptrain", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def reckoned(self) -> list[str]:
        """Return slabs and creation whole, how large ranges are, and both in ranges."""
        config = load_config(self.config).resolved()
        factory = model_factory(config)
        ids = torch.zeros(1, 128, dtype=torch.int64)
        labels = ids if self.shape.data == "text" else ids[:, 0]
        adapter = None if config.lora is None else adapter_fields(config.lora)
        batch = {"input_ids": ids, "labels": labels}
        built = build(config, factory, batch, adapter=adapter, draw=False)
        cutter = Cutter(config, built, update_rules(config.optimizer, 0, built.initial.module))
        found: list[str] = []
        targets = cutter.targets()
        for ways in ([(target, WHOLE) for target in targets], [*cutter.least_ways(targets)]):
            cut = min((cutter.cut(*way) for way in ways), key=lambda c: c.peaks.instruction_bytes)
            ranges = cut.ranges.experts or cut.ranges.rows
            found += [f"{ranges:,}" if ranges else "whole"]
            found += [format_size(cut.peaks.instruction_bytes)]
            found += [format_size(creation_bytes(built.initial, cut.layouts))]
        return found[1:]

    def least(self, *keys: str) -> str:
        """Return the budget that the refusal of `plan` names."""
        done = self.ask("plan", "--config", str(self.config), *keys)
        found = re.search(r"set memory\.host to (\S+?)(,|$)", done.stderr, re.MULTILINE)
        if found is None:
            raise SystemExit(f"plan ended with {done.returncode}:\n{done.stderr}")
        return found[1]

    def peak(self, host: str) -> str:
        """Return the most that two steps took beyond the base."""
        done = self.ask("--config", str(self.config), f"memory.host={host}")
        if done.returncode:
            raise SystemExit(f"training ended with {done.returncode}:\n{done.stderr}")
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        peak_bytes = max(json.loads(line)["peak_host_bytes"] for line in lines)
        return f"{peak_bytes / 2**20:.0f} MiB of {host}"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--plan", action="store_true", help="measure too, as plan does")
    parser.add_argument("--train", metavar="SIZE", help="train two steps in so much memory")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    columns = ["slabs", "creation", "range", "slabs in ranges", "creation in ranges"]
    if arguments.plan:
        columns = ["whole", "in ranges", "taken by two steps"]
    table = Table("shape", "parameters", *columns)
    for name in arguments.shapes:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            job = Job(shape, Path(folder))
            (job.folder / "base").mkdir()
            parameters = write_empty(shape, job.folder / "base")
            row = [] if arguments.plan else job.reckoned()
            if arguments.plan:
                row = [job.least(f"memory.{shape.key}={10**9}"), job.least()]
                row += [] if arguments.train is None else [job.peak(arguments.train)]
            table.add_row(name, f"{parameters:,}", *row)
            print(name, *row, flush=True)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
