"""LoRA of the job in Soup, which streams a frozen base from the disk layer by layer.

Soup takes text, so the job's tokens become words of a tokenizer of whole words. A row of 512 tokens
is the answer of a conversation, of which the chat template shows nothing else. On a CPU Soup
computes in float32. The one function that says so is replaced: it streams and computes bfloat16, as
the others do (`--stock`: it is not). Losses are Soup's own: it shuffles and warms up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from job import LORA_ALPHA, LORA_RANK, LR, SEQUENCE, VOCABULARY, Meter, Options, options

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train with `soup train`; its steps are measured by a callback of transformers."""
    stock = "--stock" in sys.argv
    if stock:
        sys.argv.remove("--stock")
    job = options(__doc__ or "")
    job.work.mkdir(parents=True, exist_ok=True)
    os.environ.update(HF_HUB_OFFLINE="1", SOUP_LAYER_STREAM_CACHE_DIR=str(job.work / "shards"))
    write_base(job)
    config = write_config(job)
    measure_steps(job)

    from soup_cli.cli import app
    from soup_cli.utils import layer_stream

    if not stock:
        layer_stream.resolve_stream_dtype = lambda device="cuda": "bfloat16"
    sys.argv = ["soup", "train", "--config", str(config), "--yes"]
    app()


def write_base(job: Options) -> None:
    """Write the base's directory, with a tokenizer, and the rows as conversations."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    base = job.work / "base"
    base.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (base / name).unlink(missing_ok=True)
        os.link(job.job / name, base / name)  # Soup refuses links by name
    words = {str(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="31999",
        eos_token="31998",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(base)
    tokens = np.load(job.job / "tokens.npy").reshape(-1, SEQUENCE)
    with (job.work / "chat.jsonl").open("w") as file:
        for row in tokens:
            answer = {"role": "assistant", "content": " ".join(map(str, row))}
            messages = [{"role": "user", "content": "0"}, answer]
            print(json.dumps({"messages": messages}), file=file)


def write_config(job: Options) -> Path:
    """Write Soup's config; its YAML takes JSON."""
    lora = {"r": LORA_RANK, "alpha": LORA_ALPHA, "dropout": 0.0, "target_modules": PROJECTIONS}
    tree = {
        "base": str(job.work / "base"),
        "task": "sft",
        "data": {
            "train": str(job.work / "chat.jsonl"),
            "format": "chatml",
            "train_on_responses_only": False,
            "max_length": SEQUENCE,
            "val_split": 0.0,
        },
        "training": {
            "epochs": 1,
            "lr": LR,
            "batch_size": 1,
            "gradient_accumulation_steps": job.micro_batches,
            "quantization": "none",
            "lora": lora,
            "stream_layers": True,
            "stream_source": "disk",
            "stream_disk_kind": "nvme",
            "save_steps": 100_000,
            "logging_steps": 1,
        },
        "output": str(job.work / "out"),
    }
    path = job.work / "soup.yaml"
    path.write_text(json.dumps(tree, indent=1))
    return path


def measure_steps(job: Options) -> None:
    """Let every Trainer measure its steps, check their shape, and stop behind the last."""
    import transformers

    meter = Meter(job.device)
    shapes: list[tuple[int, ...]] = []

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step >= job.steps

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" not in logs:
                return  # the summary behind the last step
            meter.end([logs["loss"]])
            if set(shapes) != {(1, SEQUENCE)}:
                raise SystemExit(f"Soup's batches have the shapes {set(shapes)}")

    made = transformers.Trainer.__init__
    step = transformers.Trainer.training_step

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.add_callback(Steps())

    def train(self: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return step(self, model, inputs, *arguments, **named)

    transformers.Trainer.__init__ = make
    transformers.Trainer.training_step = train


if __name__ == "__main__":
    main()
