"""The model that is trained: a directory, or a model of transformers that is written to one."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

from swaptrain.config.load import parse_config
from swaptrain.config.paths import written_path
from swaptrain.config.yaml_text import dump_yaml
from swaptrain.errors import ConfigError
from swaptrain.hf.unchanged import check_unchanged
from swaptrain.models.build import model_factory
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.strict_json import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GivenModel", "given_model"]

_INITIAL = "initial"
_DIGEST = "swaptrain.json"
_NOT_MATHEMATICS = {"architectures", "dtype", "transformers_version", "_name_or_path", "use_cache"}


@dataclass(frozen=True)
class GivenModel:
    """What is known of a model before it is captured."""

    tree: dict[str, Any]
    """The section `model`, as far as the model determines it."""
    columns: frozenset[str]
    """The arguments that its forward takes, and other names of labels."""
    accepts_loss_kwargs: bool
    """Whether the Trainer tells it the number of labels in a step."""
    frozen: tuple[str, ...] = ()
    """Parameters that it has frozen."""
    undecided: tuple[str, ...] = ()
    """Parameters that one of the Trainer and swaptrain would decay, and the other not."""
    in_memory: PreTrainedModel | None = None

    @contextmanager
    def written(self) -> Iterator[None]:
        """Let the directory be there; one that was made for a start that is refused goes."""
        made = self.in_memory is not None and _write(self.in_memory, Path(self.tree["hf"]))
        try:
            yield
        except ConfigError:
            if made:
                shutil.rmtree(self.tree["hf"])
                with suppress(OSError):  # others have put something into it
                    Path(self.tree["hf"]).parent.rmdir()
            raise


def given_model(model: str | Path | PreTrainedModel, output_dir: Path, *, bf16: bool) -> GivenModel:
    """Return what is trained; a model in memory is written to `output_dir/initial` first.

    Raises ConfigError where it is none of transformers, has adapters, or is not the one that the
    run in `output_dir` began from.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        _check_weights(model, bf16=bf16)
        with TemporaryDirectory(prefix="swaptrain-hf-") as folder:
            config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
            (Path(folder) / "config.json").write_text(
                json.dumps(config, default=str), encoding="utf-8"
            )
            check_unchanged(model, _without_weights(Path(folder)))
        return replace(_described(model, output_dir / _INITIAL), in_memory=model)
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is {type(model).__name__}: give a PreTrainedModel of transformers or a "
            "directory, and adapters as peft_config; any other module is trained by a config"
        )
    directory = Path(model).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model: {directory} has no config.json: give a directory of a model")
    return _described(_without_weights(directory), directory.absolute())


def _described(model: PreTrainedModel, directory: Path) -> GivenModel:
    parameters = inspect.signature(model.forward).parameters
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        accepts = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return GivenModel(
        tree={"hf": str(directory), "architecture": type(model).__name__},
        columns=frozenset((*parameters, "labels", "label", "label_ids")),
        accepts_loss_kwargs=bool(accepts),
        frozen=tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        undecided=_undecided(model),
    )


def _undecided(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the trained parameters on whose decay the Trainer and swaptrain differ.

    Here parameters of two dimensions and more decay; there those that no name says are norms.
    """
    from transformers import Trainer

    theirs = set(Trainer.get_decay_parameter_names(None, model))
    trained = ((name, p.ndim > 1) for name, p in model.named_parameters() if p.requires_grad)
    return tuple(name for name, decays in trained if decays != (name in theirs))


def _without_weights(directory: Path) -> PreTrainedModel:
    """Return the model of a directory without a byte of weights, or raise ConfigError."""
    try:
        names = parse_json((directory / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model: cannot read {directory / 'config.json'}: {error}") from error
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"model: {directory / 'config.json'} names no architectures: save the model with "
            "save_pretrained, or give it itself"
        )
    tree = {
        "model": {"hf": written_path(str(directory)), "architecture": str(names[0])},
        "data": {"text": ["-"]},
        "train": {"steps": 1},
        "run": {"dir": written_path(str(directory))},
    }
    config = parse_config(dump_yaml(tree), source="swaptrain.hf.train")
    with torch.device("meta"):
        found: Any = model_factory(config, asks=False).make()
    return cast("PreTrainedModel", found)


def _check_weights(model: PreTrainedModel, *, bf16: bool) -> None:
    """Raise ConfigError for a model that is no plain one with values."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("model has adapters already: give the base, and them as peft_config")
    taken = {torch.float32, torch.bfloat16} if bf16 else {torch.float32}
    others = {p.dtype for p in model.parameters()} - taken
    if others or any(p.is_meta for p in model.parameters()):
        found = ", ".join(map(str, others)) or "no values (meta)"
        raise ConfigError(f"model has weights of {found}: load it with dtype=torch.float32")


def _write(model: PreTrainedModel, to: Path) -> bool:
    """Write a model that is not there yet; return whether it was not."""
    digests = {"weights": _digest(model), "config": _config_digest(model)}
    noted = to / _DIGEST
    if noted.is_file():
        before = json.loads(noted.read_text(encoding="utf-8"))
        if others := [key for key, digest in digests.items() if before.get(key) != digest]:
            raise ConfigError(
                f"model has other {' and '.join(others)} than the run in {to.parent} began from: "
                f"to go on, give {to} as the model; to begin anew, name another output_dir"
            )
        return False
    aside = to.with_name(to.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(aside)
    write_aside(aside / _DIGEST, json.dumps(digests).encode())
    shutil.rmtree(to, ignore_errors=True)
    aside.rename(to)
    return True


def _digest(model: PreTrainedModel) -> str:
    """Return a digest of all weights and buffers that are saved."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _config_digest(model: PreTrainedModel) -> str:
    """Return a digest of the class and of what its config says of the mathematics."""
    found = {k: v for k, v in model.config.to_diff_dict().items() if k not in _NOT_MATHEMATICS}
    text = json.dumps([type(model).__name__, found], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
