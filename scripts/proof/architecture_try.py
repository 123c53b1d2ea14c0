"""Tries one architecture in this process: `architecture_try.py NAME FOLDER` prints its row as JSON.

The tiny model is saved as a checkpoint. swaptrain and a loop of torch and transformers alone train
it for three steps from there, and losses and weights are compared bit for bit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from architecture_batches import micro_batch
from architecture_configs import ARCHITECTURES, Architecture
from safetensors.torch import load_file
from torch import Tensor, nn

from swaptrain.capture.init.construct import construct
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.errors import SwaptrainError
from swaptrain.models.build import model_factory
from swaptrain.models.initial_weights import InitialWeights
from swaptrain.models.stored.pretrained import Pretrained
from swaptrain.models.thaw import thaw, thawed_by_loading
from swaptrain.models.trials.rows_apart import keeps_rows_apart
from swaptrain.reference import train_reference
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.train import train

STEPS, MICRO_BATCHES, ROWS, LR, DECAY = 3, 2, 2, 1e-3, 0.1
CHECKPOINT_SEED, SEED = 1234, 5


@dataclass(frozen=True)
class Trained:
    """What a run of either side leaves."""

    losses: list[float]
    """Per step, the mean of its micro-batches."""
    weights: Mapping[str, Tensor]


class Plain:
    """An architecture as a user of torch and transformers has it."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    @cached_property
    def config(self) -> Any:
        """The config; raises KeyError where this transformers lacks the model type."""
        config = transformers.CONFIG_MAPPING[self.architecture.model_type]
        return _without_caches(config(**self.architecture.fields))

    @cached_property
    def cls(self) -> Any:
        """The model's class; an Auto class is resolved for the config."""
        head = getattr(transformers, self.architecture.head)
        return head._model_mapping[type(self.config)] if hasattr(head, "_model_mapping") else head

    def constructed(self, seed: int) -> nn.Module:
        """Return the model that the constructor makes under a seed."""
        torch.manual_seed(seed)
        model: nn.Module = self.cls._from_config(self.config, dtype=torch.float32)
        return model

    def loaded(self, directory: Path) -> nn.Module:
        """Return the model with the weights of a checkpoint; every tensor has to be there.

        They move into memory of their own. from_pretrained leaves them where the file is mapped, at
        any address, where kernels of convolutions add in another order than elsewhere.
        """
        model, found = self.cls.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        missing = [*found["missing_keys"], *found["mismatched_keys"], *found["unexpected_keys"]]
        if missing:
            raise ValueError(f"from_pretrained finds no place for, or lacks, {missing[:3]}")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
        return model  # type: ignore[no-any-return]

    def batch(self, step: int, micro: int) -> dict[str, Tensor]:
        """Return a micro-batch of a step, from 1."""
        return micro_batch(self.architecture.kind, (step - 1) * MICRO_BATCHES + micro, ROWS)

    def trained(self, directory: Path) -> Trained:
        """Train from a checkpoint."""
        model = self.loaded(directory).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
        losses = []
        for step in range(1, STEPS + 1):
            total = 0.0
            for micro in range(MICRO_BATCHES):
                result = model(**self.batch(step, micro), **self.architecture.constants)
                (result.loss / MICRO_BATCHES).backward()
                total += float(result.loss.detach())
            losses.append(total / MICRO_BATCHES)
            optimizer.step()
            optimizer.zero_grad()
        return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})

    def trained_in_bfloat16(self, directory: Path) -> Trained:
        """Train from a checkpoint as swaptrain.reference says what bfloat16 means."""
        found = train_reference(
            lambda: self.loaded(directory),
            self.batch,
            steps=STEPS,
            micro_batches=MICRO_BATCHES,
            seed=SEED,
            dtype=torch.bfloat16,
            lr=LR,
            weight_decay=DECAY,
            constants=self.architecture.constants,
        )
        return Trained(found.losses, found.parameters)


def _without_caches(config: Any) -> Any:
    """Return the config, in which a model and its parts keep no keys and values of a generation.

    A cache copies them, and attention adds in another order where they lie otherwise in memory.
    """
    config.use_cache = False
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            _without_caches(part)
    return config


def config_of(
    plain: Plain, folder: Path, hf: Any, dtype: str = "float32", check: bool = True
) -> Config:
    """Return the config of a run."""
    architecture = plain.architecture
    tree = {
        "model": {
            "hf": hf, "architecture": plain.cls.__name__, "dtype": dtype,
            "constants": dict(architecture.constants),
        },
        "data": {
            "python": "architecture_batches:items", "kwargs": {"kind": architecture.kind},
            "micro_batch": ROWS, "micro_batches": MICRO_BATCHES, "shuffle": False,
        },
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY},
        "train": {"steps": STEPS, "seed": SEED, "threads": 1, "check_capture": check},
        "device": "cpu",
        "memory": {"host": "512MiB", "segment": "128KiB"},
        "store": {"commit": {"lag": 1}},
        "run": {"dir": str(folder)},
    }  # fmt: skip
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    return load_config(path)


def run(config: Config) -> Trained:
    """Train with swaptrain, and read the weights from the file that is exported."""
    train(config)
    lines = (config.run.dir / "metrics.jsonl").read_text().splitlines()
    to = config.run.dir.with_suffix(".safetensors")
    export_weights(config.run.dir, to, "float32")
    return Trained([json.loads(line)["loss"] for line in lines], load_file(to))


def compared(plain: Trained, found: Trained, begun: Mapping[str, Tensor] | None = None) -> str:
    """Return `bits`, or by how much losses and weights differ.

    `begun` are the first weights of a bfloat16 run, which keeps those that it does not train in
    bfloat16.
    """
    if missing := plain.weights.keys() - found.weights.keys():
        return f"lacks {sorted(missing)[0]}"
    different = [k for k, w in plain.weights.items() if not torch.equal(w, found.weights[k])]
    rounded = [k for k in different if begun and _is_rounded(begun[k], plain.weights[k], found, k)]
    different = [k for k in different if k not in rounded]
    if plain.losses == found.losses and not different:
        return f"bits, {len(rounded)} untrained rounded" if rounded else "bits"
    pairs = zip(plain.losses, found.losses, strict=True)
    loss = max(abs(ours - theirs) / abs(theirs) for theirs, ours in pairs)
    worst = max((_relative(plain.weights[k], found.weights[k]) for k in different), default=0.0)
    return f"losses to {loss:.0e}, {len(different)} of {len(plain.weights)} weights to {worst:.0e}"


def _is_rounded(begun: Tensor, plain: Tensor, found: Trained, name: str) -> bool:
    """Whether a weight that training leaves alone is there in bfloat16."""
    return torch.equal(plain, begun) and torch.equal(found.weights[name], begun.bfloat16().float())


def _relative(wanted: Tensor, found: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def begins(plain: Plain, checkpoint: Path, scratch: Path) -> str:
    """Say whether initial weights have the bits of the constructor and of from_pretrained."""
    tree = {"model_type": plain.architecture.model_type, **plain.architecture.fields}
    factory = model_factory(config_of(plain, scratch / "own", tree), plain.batch(1, 0))
    own = InitialWeights(construct(factory.make, seed=SEED, scratch_dir=scratch))
    return _different(plain.constructed(SEED), own) or _loads(plain, checkpoint, scratch) or "bits"


def _loads(plain: Plain, directory: Path, scratch: Path) -> str:
    """Say what of a checkpoint swaptrain does not begin from as transformers does."""
    config = config_of(plain, scratch / "loads", str(directory))
    factory = model_factory(config, plain.batch(1, 0))
    checkpoint = factory.checkpoint()
    assert checkpoint is not None
    construction = construct(factory.make, seed=SEED, scratch_dir=scratch)
    stored = Pretrained(construction.module, checkpoint)
    thaw(stored.module, thawed_by_loading(stored.module, stored.missing))
    stored.load()
    return _different(plain.loaded(directory), InitialWeights(construction, stored))


def _different(model: nn.Module, found: InitialWeights) -> str:
    """Name the first tensor of the model that another begins without, or with other bits."""
    buffers, parameters = dict(found.module.named_buffers()), dict(found.module.named_parameters())
    same = {
        name: p.requires_grad == parameters[name].requires_grad
        and torch.equal(p, found.value(name))
        for name, p in model.named_parameters()
    }
    same |= {name: torch.equal(b, buffers[name]) for name, b in model.named_buffers()}
    different = [name for name, equal in same.items() if not equal]
    return f"{len(different)} tensors differ: {different[0]}" if different else ""


def exported(run_dir: Path, checkpoint: Path, directory: Path) -> str:
    """Export a directory, and say whether it has the checkpoint's names and shapes."""
    export_weights(run_dir, directory, "float32")
    wanted, found = shapes(checkpoint), shapes(directory)
    if wanted == found:
        return "names"
    for name in sorted(wanted.keys() ^ found.keys()):
        return f"{'lacks' if name in wanted else 'adds'} {name}"
    return "other shapes"


def shapes(directory: Path) -> dict[str, torch.Size]:
    """Return the names and shapes of a directory's tensors."""
    return {
        name: tensor.shape
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def packs(plain: Plain) -> str:
    """Say whether packed rows stay apart, for a model that is given ids and labels of one shape."""
    batch = plain.batch(1, 0)
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape:
        return "-"
    return "yes" if keeps_rows_apart(plain.cls, plain.config) else "no"


def reimported(plain: Plain, directory: Path, weights: Mapping[str, Tensor], scratch: Path) -> str:
    """Say whether transformers and swaptrain begin from an exported directory with its bits."""
    names = dict(plain.loaded(directory).named_parameters())
    different = [n for n, p in names.items() if not torch.equal(p.detach(), weights[n])]
    if different:
        return f"{len(different)} tensors differ: {different[0]}"
    return _loads(plain, directory, scratch) or "bits"


def tried(name: str, scratch: Path) -> dict[str, str]:
    """Return the row of an architecture."""
    architecture = ARCHITECTURES[name]
    plain, row = Plain(architecture), {"class": architecture.head, "trains": "no"}
    try:
        row["class"] = plain.cls.__name__
    except (KeyError, AttributeError):
        return row | {"refused": f"transformers {transformers.__version__} does not have it"}
    checkpoint = scratch / "checkpoint"
    try:
        plain.constructed(CHECKPOINT_SEED).save_pretrained(checkpoint)
        expected = plain.trained(checkpoint)
    except Exception as error:  # whatever this version of transformers makes of the config
        return row | {"refused": f"plain PyTorch fails: {type(error).__name__}: {_line(error)}"}
    try:
        found = run(config_of(plain, scratch / "run", str(checkpoint)))
        row |= {"trains": "yes", "float32": compared(expected, found)}
        row["begins"] = begins(plain, checkpoint, scratch)
        row["export"] = exported(scratch / "run", checkpoint, scratch / "again")
        row["re-import"] = reimported(plain, scratch / "again", found.weights, scratch)
        row["packs"] = packs(plain)
    except SwaptrainError as error:
        return row | {"trains": "refused", "refused": _line(error)}
    try:
        low = run(config_of(plain, scratch / "low", str(checkpoint), "bfloat16", check=False))
        begun = {name: p.detach() for name, p in plain.loaded(checkpoint).named_parameters()}
        row["bfloat16"] = compared(plain.trained_in_bfloat16(checkpoint), low, begun)
    except SwaptrainError as error:
        row |= {"bfloat16": "refused", "refused": f"in bfloat16: {_line(error)}"}
    return row


def _line(error: Exception) -> str:
    """Return a message as one line, without the directory that Python's packages lie in."""
    return re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(json.dumps(tried(sys.argv[1], Path(sys.argv[2]))))
