"""One training job for every system that is compared: model, weights, data, and what a step took.

A job is a directory: `config.json` of a Llama, `weights/model.safetensors` (what its constructor
draws under seed 0, float32, which is what swaptrain begins with) and `tokens.npy`. Needs torch,
transformers, safetensors and numpy; not swaptrain, so that a system with an environment of its own
can use it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SEQUENCE = 512
VOCABULARY = 32000
BETAS, EPS, WEIGHT_DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-4
LORA_RANK, LORA_ALPHA = 16, 32

SHAPES: dict[str, tuple[int, int, int, int]] = {
    # name: hidden size, layers, intermediate size, heads
    "4m": (64, 2, 172, 4),
    "270m": (1024, 16, 2816, 16),
    "1.3b": (2048, 22, 5632, 32),
    "2.6b": (2560, 32, 6912, 20),
}


def write_job(directory: Path, shape: str, *, sequences: int, weights: bool = True) -> None:
    """Write a job, where `weights` is false without them; its data are walks over 1000 tokens.

    The data can be learned: each token is one to three above the one before it, modulo 1000.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, intermediate, heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    if weights:
        torch.manual_seed(0)
        drawn = dict(LlamaForCausalLM(config).named_parameters())
        (directory / "weights").mkdir(exist_ok=True)
        save_file(drawn, directory / "weights" / "model.safetensors", metadata={"format": "pt"})
    random = np.random.default_rng(1234)
    starts = random.integers(0, 1000, (sequences, 1))
    walks = (starts + random.integers(1, 4, (sequences, SEQUENCE)).cumsum(1)) % 1000
    np.save(directory / "tokens.npy", walks.astype(np.uint16).reshape(-1))


def swaptrain_config(
    job: Path, run_dir: Path, *, micro_batches: int, steps: int, device: str = "cpu"
) -> dict[str, Any]:
    """Return a config, but for its budgets, with which swaptrain does the job in `run_dir`."""
    return {
        "model": {"hf": str(job), "dtype": "bfloat16"},
        "data": {
            "tokens": [str(job / "tokens.npy")],
            "sequence_length": SEQUENCE,
            "micro_batch": 1,
            "micro_batches": micro_batches,
            "shuffle": False,
        },
        "optimizer": {
            "name": "adamw",
            "lr": LR,
            "betas": list(BETAS),
            "weight_decay": WEIGHT_DECAY,
        },
        "train": {"steps": steps},
        "device": device,
        "run": {"dir": str(run_dir)},
    }


def write_config(job: Path, shape: str, *, micro_batches: int, steps: int) -> Path:
    """Write a job without weights and a config with which swaptrain does it; return its path."""
    import yaml

    write_job(job, shape, sequences=64, weights=False)
    config = job / "swaptrain.yaml"
    tree = swaptrain_config(job, job / "run", micro_batches=micro_batches, steps=steps)
    config.write_text(yaml.safe_dump(tree))
    return config


@dataclass(frozen=True)
class Options:
    """What every peer is told."""

    job: Path
    work: Path
    micro_batches: int
    steps: int
    threads: int
    clip_norm: float | None
    device: torch.device


def options(description: str) -> Options:
    """Parse the command line of a peer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--job", type=Path, required=True, help="the directory of the job")
    parser.add_argument("--work", type=Path, required=True, help="a directory for its own files")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    found = Options(**vars(parser.parse_args()))
    torch.set_num_threads(found.threads)
    return found


def batches(job: Options) -> Iterator[list[Tensor]]:
    """Yield, for each step, its micro-batches: token ids [1, 512] in memory."""
    tokens = np.load(job.job / "tokens.npy", mmap_mode="r").reshape(-1, SEQUENCE)
    for step in range(job.steps):
        rows = range(step * job.micro_batches, (step + 1) * job.micro_batches)
        yield [torch.from_numpy(tokens[row % len(tokens)].astype(np.int64))[None] for row in rows]


def empty_model(job: Options) -> nn.Module:
    """Return the model without memory for its parameters, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(job.job)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    rotary = type(model.model.rotary_emb)(config)  # buffers made on meta are empty
    model.model.rotary_emb = rotary.to(job.device)
    return model.train()


def initial_weights(job: Options) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial weights one after the other, float32."""
    from safetensors import safe_open

    with safe_open(job.job / "weights" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def put(model: nn.Module, name: str, tensor: Tensor) -> nn.Parameter:
    """Replace a parameter of the model by one over `tensor`."""
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(tensor)
    setattr(model.get_submodule(owner), leaf, parameter)
    return parameter


class Meter:
    """Prints one JSON line a step: seconds, loss, bytes that went to and from the disk, peaks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """A step begins."""
        self._io = _disk_bytes()
        self._begun = time.perf_counter()

    def end(self, losses: Sequence[float]) -> None:
        """A step is done; to have its losses was to wait for it, but for its updates."""
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._begun
        read, written = (
            after - before for after, before in zip(_disk_bytes(), self._io, strict=True)
        )
        row: dict[str, Any] = {
            "step_s": seconds,
            "ended_at": time.time(),
            "loss": sum(losses) / len(losses),
            "read_bytes": read,
            "write_bytes": written,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_device_bytes": torch.cuda.max_memory_reserved(self._device) if on_cuda else None,
        }
        print("STEP " + json.dumps(row), flush=True)


def _disk_bytes() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
