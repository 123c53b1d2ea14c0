"""LoRA adapters on a base that stays as it is: PEFT's own modules and PEFT's own mathematics."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from swaptrain.config.lora import LoraConfig
from swaptrain.errors import ConfigError
from swaptrain.models.factory import described
from swaptrain.models.freeze import nearest

__all__ = ["ADAPTER", "HEADS", "adapter_config", "adapter_fields", "checked_fields", "inject"]
__all__ += ["saved_names", "task_type"]

ADAPTER = "default"
"""PEFT's name of an adapter that nobody has named: it is a part of its parameters' names."""
HEADS = ("classifier", "score")
"""What PEFT trains in full where a task is to classify: the model has one of them."""
_CONFIG = "adapter_config.json"
_MEANS_NOTHING = {
    *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode"),
    *("peft_type", "peft_version", "revision", "task_type"),
}
"""Fields of an adapter's config that change nothing of what is trained; PEFT finds out itself how a
layer's weight is laid out."""
_PREFIX = "base_model.model."
"""What PEFT puts before the names in an adapter's file."""


def adapter_fields(section: LoraConfig) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig that a `lora` section, or the adapter it names, gives.

    Raises ConfigError for an adapter that is no LoRA or asks for what swaptrain does not train. A
    field of it that is not known by name is never handed to PEFT: some name code to be imported.
    """
    if section.source is None:
        return section.fields()
    path = section.source / _CONFIG
    found = _read(path)
    _refuse_unknown(found, path)
    given = {name: found[name] for name in LoraConfig.field_names() if found.get(name) is not None}
    return checked_fields(given, f"lora.from: {path}")


def checked_fields(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return fields that somebody else wrote down, checked as those of a `lora` section are.

    Raises ConfigError, which says `where`, for an unknown one and for an impossible value.
    """
    try:
        given = {name: value for name, value in found.items() if value is not None}
        return LoraConfig.model_validate(given).fields()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {key}: {first['msg']}") from error


def inject(module: nn.Module, fields: Mapping[str, Any]) -> None:
    """Put the adapters of PEFT's LoraConfig with these fields into a module, and freeze the rest.

    Raises ConfigError where PEFT is not installed, or refuses.
    """
    peft = _peft()
    try:
        with warnings.catch_warnings(action="ignore"):
            peft.inject_adapter_in_model(peft.LoraConfig(**fields), module, ADAPTER)
    except Exception as error:  # PEFT's, on a model of any kind
        raise ConfigError(f"lora: {_plain(described(error))}") from error
    _check_saved(module, fields.get("modules_to_save") or ())


def _check_saved(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse modules to train in full that are not there: PEFT passes over them in silence.

    But for one of the two heads of which it names both for a task.
    """
    from peft.utils import ModulesToSaveWrapper

    trained = [p for p, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    missing = [name for name in names if not any(path.endswith(name) for path in trained)]
    if missing and not ({*missing} <= {*HEADS} and {*HEADS} & ({*names} - {*missing})):
        others = [path for path, _ in module.named_modules() if path and path not in trained]
        raise ConfigError(
            f"lora.modules_to_save: the model has no module {missing[0]}; "
            f"{nearest(missing[0], others)}"
        )


def saved_names(module: nn.Module) -> dict[str, str]:
    """Return the names in PEFT's file of what an adapter consists of, by the module's names.

    By PEFT's own rule of what is saved: adapters, modules to save, biases, embeddings in full.
    """
    peft = _peft()
    state = module.state_dict(keep_vars=True)
    own = {id(tensor): name for name, tensor in reversed(state.items())}
    with warnings.catch_warnings(action="ignore"):
        saved = peft.get_peft_model_state_dict(module, state, ADAPTER)
    return {own[id(tensor)]: f"{_PREFIX}{name}" for name, tensor in saved.items()}


def task_type(section: LoraConfig, model: str) -> str | None:
    """Return PEFT's word for what a model of the class `model` does, by which others load it.

    An adapter that is gone on with keeps its own. Raises ConfigError as `adapter_fields` does.
    """
    if section.source is None:
        return "CAUSAL_LM" if model.endswith("ForCausalLM") else None
    found = _read(section.source / _CONFIG).get("task_type")
    return found if found in {*_peft().TaskType} else None


def adapter_config(module: nn.Module, base: str | None, task: str | None) -> dict[str, Any]:
    """Return adapter_config.json as PEFT writes it for a module with adapters on `base`.

    `base` is a directory; in the hub's cache it is called by its name there. `task` is PEFT's type.
    """
    config: Any = module.peft_config[ADAPTER]  # type: ignore[index]  # PEFT puts it there
    config.inference_mode, config.task_type = True, task
    config.base_model_name_or_path = None if base is None else _base_name(Path(base).absolute())
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        found: dict[str, Any] = json.loads((Path(directory) / _CONFIG).read_text())
    # Sets, which have another order in each process.
    return {
        name: sorted(value) if isinstance(getattr(config, name, None), set) else value
        for name, value in found.items()
    }


def _base_name(directory: Path) -> str:
    """Return ORG/NAME of CACHE/models--ORG--NAME/snapshots/REVISION, and else the path."""
    cached = directory.parent.parent.name
    if directory.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return str(directory)


def _read(path: Path) -> dict[str, Any]:
    """Return what an adapter's config says; raises ConfigError where it is of no LoRA."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"lora.from: cannot read {path}: {error}; it has to be a directory that PEFT's "
            "save_pretrained wrote"
        ) from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else None
        raise ConfigError(f"lora.from: {path} is of the kind {kind!r}: only LORA is trained")
    return found


def _refuse_unknown(found: Mapping[str, Any], path: Path) -> None:
    known = {*LoraConfig.field_names(), *_MEANS_NOTHING}
    usual = json.loads(json.dumps(_peft().LoraConfig().to_dict(), default=list))
    for name, value in found.items():
        if name not in known and value not in (None, False, [], {}) and value != usual.get(name):
            raise ConfigError(
                f"lora.from: {path} sets {name} to {str(value)[:60]!r}, which swaptrain does not "
                "train: it would be another adapter without it"
            )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora needs PEFT: pip install 'swaptrain[lora]'") from error
    return peft


def _plain(text: str) -> str:
    """Return PEFT's message without its set's braces, and not longer than can be read."""
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 400 else text[:397] + "..."
