"""What a model directory holds: how large the model is, and what it begins from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from swaptrain.config.load import parse_config
from swaptrain.config.paths import written_path
from swaptrain.config.yaml_text import one_line_yaml
from swaptrain.models.build import model_factory
from swaptrain.start.look_at_data import DataFacts
from swaptrain.strict_json import read_json
from swaptrain.units import MIB, format_count

__all__ = ["ModelFacts", "look_at_model"]

_MOST_BYTES = 16 * MIB


@dataclass(frozen=True)
class ModelFacts:
    """A model of transformers, as its directory describes it."""

    description: str
    """Name of its class."""
    parameters: int
    stored: str | None
    """Dtype of most of its weights, as safetensors writes it; None: it has none, and is drawn."""
    positions: int | None
    """Most tokens of a sequence, where the model says so."""
    is_masked: bool
    """Whether it predicts masked tokens, not the next one."""

    def line(self) -> str:
        """Say it in one sentence."""
        start = "drawn weights" if self.stored is None else f"weights in {self.stored}"
        most = "" if self.positions is None else f", {self.positions:,} positions"
        return f"{self.description}, {format_count(self.parameters)} parameters{most}, {start}"


def look_at_model(directory: str, data: DataFacts) -> ModelFacts:
    """Return what the model is that such data would train, made without memory.

    Raises ConfigError where the directory holds none, or it is for other data.
    """
    is_masked = data.kind == "text" and _says_masked(Path(directory))
    where, tokenizer = one_line_yaml(written_path(directory)), one_line_yaml(data.tokenizer)
    mask = ", mask: 0.15" if is_masked else ""
    config = parse_config(
        f"model: {{hf: {where}}}\ndata: {{{data.kind}: [x], tokenizer: {tokenizer}{mask}}}\n"
        "train: {steps: 1}\nrun: {dir: x}\n",
        source="--model",
    )
    factory = model_factory(config)
    with torch.device("meta"):
        module = factory.make()
    checkpoint = factory.checkpoint()
    stored = None
    if checkpoint is not None:
        counts: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            counts[tensor.dtype] += tensor.numel
        stored = counts.most_common(1)[0][0] if counts else None
    return ModelFacts(
        factory.description,
        sum(p.numel() for p in module.parameters()),
        stored,
        None if factory.positions is None else factory.positions[1],
        is_masked,
    )


def _says_masked(directory: Path) -> bool:
    try:
        found = read_json(directory / "config.json", _MOST_BYTES)
    except (OSError, ValueError):
        return False  # which the factory says in words
    named = found.get("architectures") if isinstance(found, dict) else None
    return isinstance(named, list) and any(str(name).endswith("ForMaskedLM") for name in named)
