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

__all__ = ["ADAPTER", "HEADS", "adapter_config", "adapter_fields", "check_saved"]
__all__ += ["checked_fields", "inject", "saved_names", "task_type"]

ADAPTER = "default"
"""PEFT's name of an adapter that nobody has named: it is a part of its parameters' names."""
HEADS = ("classifier", "score")
"""What PEFT trains in full where a task is to classify: the model has one of them."""
_TASKS = (
    ("CAUSAL_LM", "CAUSAL_LM", ()),
    ("SEQ_2_SEQ_LM", "SEQ_TO_SEQ_CAUSAL_LM", ()),
    ("SEQ_CLS", "SEQUENCE_CLASSIFICATION", HEADS),
    ("TOKEN_CLS", "TOKEN_CLASSIFICATION", HEADS),
    ("QUESTION_ANS", "QUESTION_ANSWERING", ("qa_outputs",)),
)
"""PEFT's tasks, transformers' lists of their classes, and what PEFT trains in full for them."""
_CONFIG = "adapter_config.json"
_MEANS_NOTHING = {
    *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode"),
    *("peft_type", "peft_version", "revision", "task_type"),
}
"""Fields of an adapter's config that change nothing of what is trained; PEFT finds out itself how a
layer's weight is laid out."""
_OF_PEFT = re.compile(r"\.(lora_\w+|base_layer|original_module|modules_to_save)\.")
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
    _check_nested(module)


def _check_nested(module: nn.Module) -> None:
    """Refuse adapters inside of a module that is trained in full: PEFT cannot save them."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    trained = [p for p, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for path, inner in module.named_modules():
        outer = next((one for one in trained if path.startswith(f"{one}.")), None)
        if outer is not None and isinstance(inner, LoraLayer | ModulesToSaveWrapper):
            within = path.removeprefix(f"{outer}.")
            raise ConfigError(
                f"lora.modules_to_save: {outer} is trained in full, and {within} in it is adapted "
                "or named too: name it in lora.exclude_modules, or the module by more of its name"
            )


def check_saved(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse modules to train in full that are not there: PEFT passes over them in silence."""
    from peft.utils import ModulesToSaveWrapper

    trained = [p for p, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    missing = [name for name in names if not any(path.endswith(name) for path in trained)]
    # But for names of heads, which PEFT gives for a task, beside one that is there.
    if missing and not ({*missing} <= {*HEADS, "qa_outputs"} and {*names} - {*missing}):
        others = [p for p, _ in module.named_modules() if p and not _OF_PEFT.search(f".{p}.")]
        raise ConfigError(
            f"lora.modules_to_save: the model has no module {missing[0]}; "
            f"{nearest(missing[0], others)}"
        )


def saved_names(module: nn.Module, base: str | None) -> dict[str, str]:
    """Return the module's names of what an adapter consists of, by the names in PEFT's file.

    By PEFT's own rule of what is saved: adapters, modules to save, biases, and embeddings in full
    where they have other rows than in the directory `base`. A tied tensor has several names there.
    """
    peft = _peft()
    config: Any = module.peft_config[ADAPTER]  # type: ignore[index]  # PEFT puts it there
    config.base_model_name_or_path = base
    state = module.state_dict(keep_vars=True)
    own = {id(tensor): name for name, tensor in reversed(state.items())}
    with warnings.catch_warnings(action="ignore"):
        saved = peft.get_peft_model_state_dict(module, state, ADAPTER)
    return {f"{_PREFIX}{name}": own[id(tensor)] for name, tensor in saved.items()}


def task_type(section: LoraConfig, model: str) -> str | None:
    """Return PEFT's word for what a model of the class `model` does, by which others load it.

    An adapter that is gone on with keeps its own. For a task that classifies PEFT takes for given
    that the head was trained in full. Raises ConfigError as `adapter_fields` does.
    """
    if section.source is not None:
        found = str(_read(section.source / _CONFIG).get("task_type"))
        return found if found in [str(task.value) for task in _peft().TaskType] else None
    from transformers.models.auto import modeling_auto

    saved = {*(section.modules_to_save or ())}
    for task, mapping, heads in _TASKS:
        classes = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
        if model in classes and (not heads or saved.intersection(heads)):
            return task
    return None


def adapter_config(module: nn.Module, base: str | None, task: str | None) -> dict[str, Any]:
    """Return adapter_config.json as PEFT writes it for a module with adapters on `base`.

    `base` is a directory; in the hub's cache it is called by its name there. `task` is PEFT's type.
    """
    config: Any = module.peft_config[ADAPTER]  # type: ignore[index]  # PEFT puts it there
    # The directory: PEFT looks there for how many rows the embeddings had.
    config.inference_mode, config.base_model_name_or_path = True, base
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        found: dict[str, Any] = json.loads((Path(directory) / _CONFIG).read_text())
    found["task_type"] = task
    if base is not None:
        found["base_model_name_or_path"], found["revision"] = _base_name(Path(base).absolute())
    # Sets, which have another order in each process.
    return {
        name: sorted(value) if isinstance(getattr(config, name, None), set) else value
        for name, value in found.items()
    }


def _base_name(directory: Path) -> tuple[str, str | None]:
    """Return ORG/NAME and REVISION of CACHE/models--ORG--NAME/snapshots/REVISION, else the path."""
    cached = directory.parent.parent.name
    if directory.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/"), directory.name
    return str(directory), None


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
