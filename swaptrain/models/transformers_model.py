"""Models of transformers, from a Hugging Face config: nothing is downloaded, no code is run."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.data import open_example
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.memory.collector import uncollected
from swaptrain.models.adapters.refused import refuse_adapters
from swaptrain.models.classes import Job, choose_class, fitting
from swaptrain.models.factory import Factory, described
from swaptrain.models.fewer_layers import most_layers, with_fewer_layers
from swaptrain.models.resize import grow, grown_size
from swaptrain.models.stored.checkpoint import Checkpoint, open_checkpoint
from swaptrain.models.trials.rows_apart import keeps_rows_apart, reads_padding

__all__ = ["hugging_face_factory", "job_of"]

# Keys that transformers 4 wrote into every config.json; some classes of transformers 5 do not have
# them, and take them all the same.
_OLD_KEYS = frozenset({
    "add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "prefix",
    "pruned_heads", "sep_token_id", "task_specific_params", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "torchscript", "use_bfloat16",
})  # fmt: skip


def hugging_face_factory(
    config: Config, job: Job | None = None, layers: int | None = None, chosen: Any = None
) -> Factory:
    """Return the constructor of the model that `model.hf` describes, of the class for the job.

    Without a job it is what the config's data says. With at most `layers` layers, and of the class
    `chosen` where that is known.

    Raises ConfigError when the directory, the architecture or a key does not exist, and where no
    class is known to do the job.
    """
    # Nothing is downloaded, whatever a config names: models of other libraries, kernels, backbones.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with uncollected():
        import transformers
        import transformers.modeling_utils  # which each class of a model needs
    job = job or job_of(config)
    transformers.logging.set_verbosity_error()
    tree = _read_config(config.model.hf)
    fields = _without_code(tree)
    architectures = fields.get("architectures") or []
    model_type = str(fields.pop("model_type"))
    config_class = _config_class(model_type)
    if isinstance(config.model.hf, Mapping):
        _check_keys(config_class, fields, model_type)
    try:
        with _offline():
            hf_config = config_class(**fields)
    except Exception as error:  # its checks raise errors of several libraries
        raise ConfigError(f"model.hf: {config_class.__name__}: {described(error)}") from error
    _set_outputs(hf_config)
    if layers is not None:
        hf_config = with_fewer_layers(hf_config, layers)
    with _offline():
        cls = chosen or choose_class(hf_config, config.model.architecture, architectures, job)

    def make() -> nn.Module:
        # The config may name a lower dtype; the masters are float32 all the same.
        try:
            with _offline():
                # Of its own, since a model that grows notes that in its config.
                model: nn.Module = cls._from_config(deepcopy(hf_config), dtype=torch.float32)
        except SwaptrainError:
            raise
        except Exception as error:  # whatever the values of the config lead to
            raise ConfigError(f"model.hf: {cls.__name__}: {described(error)}") from error
        return model

    size = grown_size(config, hf_config)
    vocabulary = getattr(hf_config, "vocab_size", None) if size is None else size

    def checkpoint() -> Checkpoint | None:
        if config.model.hf is None or isinstance(config.model.hf, Mapping):
            return None
        found = open_checkpoint(Path(config.model.hf))
        if found is not None and tree.get("quantization_config"):
            raise ConfigError(
                f"model.hf: the weights of {config.model.hf} are quantised (quantization_config in "
                "its config.json), and swaptrain trains them in full: convert the checkpoint first"
            )
        return found

    def fewer_layers(most: int) -> Factory | None:
        if most >= most_layers(hf_config):
            return None
        return hugging_face_factory(config, job, most, cls)

    return Factory(
        make,
        vocabulary,
        cls.__name__,
        checkpoint,
        None if size is None else partial(grow, size=size),
        _positions(hf_config),
        fewer_layers,
        partial(keeps_rows_apart, cls, hf_config),
        partial(reads_padding, cls, hf_config),
        lambda: fitting(hf_config, job),
    )


def job_of(config: Config, example: Mapping[str, Tensor] | None = None) -> Job:
    """Return what the data says of what the model is trained for; `example` is a micro-batch."""
    if config.data.python is None:
        return Job("causal" if config.data.mask is None else "masked")

    @cache
    def batch() -> Mapping[str, Tensor]:
        return example or open_example(config.data, model_vocabulary=None)

    return Job("items", batch, tuple(config.model.constants))


def _set_outputs(hf_config: Any) -> None:
    """Let the model and its parts return objects, and no caches, whatever an old config says."""
    from transformers import PretrainedConfig

    hf_config.use_cache = False
    hf_config.return_dict = True
    if getattr(hf_config, "torchscript", False):  # which makes tuples too
        hf_config.torchscript = False
    for part in vars(hf_config).values():
        if isinstance(part, PretrainedConfig):
            _set_outputs(part)


def _positions(hf_config: Any) -> tuple[str, int] | None:
    """Return the model's own name for max_position_embeddings (n_positions), and its value."""
    key = "max_position_embeddings"
    count = getattr(hf_config, key, None)
    name = (getattr(hf_config, "attribute_map", None) or {}).get(key, key)
    return (name, count) if isinstance(count, int) else None


def _read_config(source: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a Hugging Face config: inline, or from a directory's config.json."""
    if source is None:
        raise ConfigError("model: give one of model.hf and model.python")
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source) / "config.json"
    if not path.is_file():
        refuse_adapters(Path(source))
        advice = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
            advice = (
                f"; if it is a name of the hub, it is not in the local cache: hf download {source}"
            )
        raise ConfigError(
            f"model.hf: {path} does not exist; give a directory with a config.json{advice}"
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"model.hf: cannot read {path}: {error}") from error
    if not isinstance(tree, dict) or "model_type" not in tree:
        raise ConfigError(f"model.hf: {path} has no model_type")
    return tree


def _special_float(found: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, since JSON has it not."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


@contextmanager
def _offline() -> Iterator[None]:
    """Let nothing be downloaded, whatever a config names: backbones of other libraries, kernels."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _without_code(tree: Any) -> Any:
    """Return a config without what names code: files beside it, and kernels to be downloaded."""
    if isinstance(tree, list):
        return [_without_code(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    for key, value in tree.items():
        named = value.values() if isinstance(value, dict) else [value]
        if "implementation" in key and any("/" in str(name) for name in named):
            raise ConfigError(
                f"model.hf: {key} is {value!r}, a kernel that would be downloaded and run: choose "
                "eager or sdpa"
            )
    return {key: _without_code(value) for key, value in tree.items() if key != "auto_map"}


def _config_class(model_type: str) -> Any:
    """Return transformers' config class of a model type; raises ConfigError."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except KeyError:
        raise ConfigError(
            f"model.hf: transformers has no model_type {model_type!r}"
            + _suggestion(model_type, CONFIG_MAPPING.keys())
        ) from None


def _check_keys(cls: Any, keys: Iterable[str], model_type: str) -> None:
    """Refuse keys that the config class does not know: it would take them without a word.

    Keys within parts (`text_config`) are not checked: models give them some that no class names.
    """
    try:
        default = cls()
    except Exception:  # some classes have no defaults; then nothing says what they know
        return
    proper = {*default.to_dict(), *default.attribute_map}
    taken = proper | _generic_keys() | _keys_in_code(cls)
    for key in keys:
        known = key in taken or (hasattr(default, key) and not callable(getattr(default, key)))
        if not known and not _is_read_by_model(cls, key):
            raise ConfigError(
                f"model.hf: unknown key {key!r} for model_type {model_type}"
                + _suggestion(key, proper, "; remove it")
            )


def _generic_keys() -> set[str]:
    """Return the keys that every Hugging Face config takes."""
    from transformers import GenerationConfig, PretrainedConfig

    return {*PretrainedConfig().to_dict(), *GenerationConfig().to_dict(), *_OLD_KEYS}


def _keys_in_code(cls: Any) -> set[str]:
    """Return the texts in the initialisers of a class: names of further keys, such as rope_theta.

    Config classes take keys that are no fields out of their `**kwargs` by name.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        for name in ("__init__", "__post_init__", "convert_rope_params_to_dict"):
            function = vars(base).get(name)
            code = getattr(inspect.unwrap(function), "__code__", None) if function else None
            if code is not None:
                found.update(text for text in code.co_consts if isinstance(text, str))
    return found


def _is_read_by_model(cls: type, key: str) -> bool:
    """Whether the model's code reads a key that its config class lacks: Qwen 3 MoE's head_dim."""
    name = cls.__module__.replace(".configuration_", ".modeling_")
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a package that is none
        return False
    if found is None or found.origin is None or name == cls.__module__:
        return False
    code = Path(found.origin).read_text(encoding="utf-8")
    return re.search(rf"""\bconfig(\.|, ['"]){re.escape(key)}\b""", code) is not None


def _suggestion(word: str, known: Iterable[str], otherwise: str = "") -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else otherwise
