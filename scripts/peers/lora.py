"""LoRA of the job with transformers and PEFT alone: in memory, checkpointing, or memory-mapped.

The base is frozen in bfloat16, the adapters (all linear layers) and their moments are in float32,
as PEFT has them. `mapped`: the base's tensors are views of the mapped checkpoint, which the kernel
pages. The job is that of job.py, with its weights in bfloat16.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from job import LORA_ALPHA, LORA_RANK, LR, Meter, batches, empty_model, options
from safetensors import safe_open
from torch import nn


def main() -> None:
    """Train as the last argument says: plain, checkpointing or mapped."""
    kind = sys.argv.pop()
    job = options(__doc__ or "")
    model = empty_model(job)
    _load(model, job.job / "model.safetensors", mapped=kind == "mapped")
    adapted = _with_adapters(model).to(job.device)
    if kind != "plain":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    meter = Meter(job.device)
    for micro_batches in batches(job):
        meter.begin()
        losses = []
        for ids in micro_batches:
            ids = ids.to(job.device)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        meter.end(losses)


def _load(model: nn.Module, path: Path, *, mapped: bool) -> None:
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not mapped:
        state = {name: tensor.clone() for name, tensor in state.items()}
    model.load_state_dict(state, assign=True, strict=False)


def _with_adapters(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear")
    with warnings.catch_warnings(action="ignore"):
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()


if __name__ == "__main__":
    main()
