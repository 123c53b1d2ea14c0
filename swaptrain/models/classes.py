"""The class of transformers that does a job: what a config is taken for, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from swaptrain.errors import ConfigError
from swaptrain.models.trials.leak import Sight, sight_of

__all__ = ["Job", "choose_class", "fitting"]

_KEY = "model.architecture"
_CAUSAL, _MASKED = "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING"
_BASE = ("MODEL_MAPPING", "MODEL_FOR_TEXT_ENCODING_MAPPING", "MODEL_FOR_IMAGE_MAPPING")
"""Lists of classes that end in hidden states, most of them without a loss."""
_TO_SEQUENCES = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
_BY_TOKEN = (_CAUSAL, _MASKED, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING")
_BY_ITEM = (
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "MODEL_FOR_AUDIO_XVECTOR_MAPPING",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a model is to be trained for, as far as the data says it."""

    kind: Literal["causal", "masked", "items"]
    """Text whose next token is predicted, text whose masked tokens are, or a data set's items."""
    batch: Callable[[], Mapping[str, Tensor]] = dict
    """Gives a micro-batch of the items."""
    constants: Iterable[str] = ()
    """Names of the further arguments of the forward."""
    asks: bool = True
    """Whether a class is asked what it sees; a run that exists has been asked."""
    note: Callable[[str], None] = lambda _: None
    """Hears of a class that is taken although it could not be asked."""


def choose_class(config: Any, named: str | None, architectures: Iterable[str], job: Job) -> Any:
    """Return the class for a job: the one that is named, else the one that fits.

    `named` is the config's `model.architecture`, `architectures` what config.json says.

    Raises:
        ConfigError: the named class does not do the job, none does, or several do.
    """
    listed = [str(name) for name in architectures]
    for name, key in [(named, _KEY)] if named else [(name, "architectures") for name in listed]:
        cls = _class(name)
        if cls is None and key == _KEY:
            raise ConfigError(
                f"{_KEY}: transformers has no model class {name!r}. {fitting(config, job)}"
            )
        if cls is None:
            continue
        if not _belongs(cls, config):
            raise ConfigError(
                f"{key}: {name} is no class for model_type {config.model_type!r}. "
                f"{fitting(config, job)}"
            )
        problem = _problem(cls, config, job)
        if problem:
            raise ConfigError(f"model.hf: {name} {problem}. {fitting(config, job)}")
        return _noted(cls, config, job)
    if listed:
        raise ConfigError(
            f"model.hf: transformers has no {' and no '.join(listed)}, which its config names in "
            f"architectures: code beside a config is never run. {fitting(config, job)}"
        )
    return _by_job(config, job)


def _noted(cls: Any, config: Any, job: Job) -> Any:
    """Return a class, after a word on it where nobody could ask it what it sees."""
    if job.kind != "items" and job.asks and _sight(cls, config, job) is None:
        job.note(
            f"{cls.__name__} was not asked which tokens its predictions see, since no small model "
            "of it could be made: transformers lists it for this job"
        )
    return cls


def fitting(config: Any, job: Job) -> str:
    """Say which classes of a config do a job, and how one is named."""
    found = [name for name, cls in _classes(config).items() if not _problem(cls, config, job)]
    first = {
        "causal": "data.text and data.tokens train the prediction of the next token",
        "masked": "data.mask trains the prediction of masked tokens",
        "items": f"The data's items have {', '.join(job.batch())}" if job.kind == "items" else "",
    }[job.kind]
    if found:
        return f"{first}: set {_KEY} to {' or '.join(found)}"
    cure = {
        "causal": "take another model_type, or let data.python give items with labels",
        "masked": "take a model_type with a masked-language class, or leave data.mask out",
        "items": "rename the keys to arguments of the class that is meant",
    }[job.kind]
    every = ", ".join(_classes(config)) or "none"
    if job.kind == "causal":
        masked = replace(job, kind="masked")
        able = [name for name, cls in _classes(config).items() if not _problem(cls, config, masked)]
        if able:
            cure = f"set data.mask to 0.15 to train {able[0]} on masked tokens, or {cure}"
        if _decodes(config, job):
            cure = f"set is_decoder to true, with which {_decodes(config, job)} does, or {cure}"
    return f"{first}, and no class of {config.model_type} does that (it has {every}): {cure}"


def _by_job(config: Any, job: Job) -> Any:
    classes = _classes(config)
    if not classes:
        raise ConfigError(
            f"model.hf: transformers has no model with a loss for model_type {config.model_type!r}"
        )
    if job.kind == "items":
        return _by_items(config, classes, job)
    mapping = _CAUSAL if job.kind == "causal" else _MASKED
    own = [cls for cls in classes.values() if mapping in _mappings(cls.__name__, config)]
    if own and not (job.kind == "causal" and getattr(config, "is_encoder_decoder", False)):
        problem = _problem(own[0], config, job)
        if not problem:
            return _noted(own[0], config, job)
        raise ConfigError(
            f"model.hf: {own[0].__name__}, which transformers has for model_type "
            f"{config.model_type!r}, {problem}. {fitting(config, job)}"
        )
    raise ConfigError(f"model.hf: model_type {config.model_type!r}: {fitting(config, job)}")


def _by_items(config: Any, classes: Mapping[str, Any], job: Job) -> Any:
    """Return the one class that takes the items, or what the architecture was made for."""
    fits = {name: cls for name, cls in classes.items() if not _problem(cls, config, job)}
    ends = {n for n in fits if not set(_mappings(n, config)) <= set(_BASE)}
    fits = {name: cls for name, cls in fits.items() if name in ends} or fits
    if len(fits) == 1:
        return next(iter(fits.values()))
    for cls in fits.values():
        lists = _mappings(cls.__name__, config)
        if getattr(config, "is_encoder_decoder", False):
            if any(name in lists for name in _TO_SEQUENCES):
                return cls
        elif _CAUSAL in lists and not _unfit_for_next(_sight(cls, config, job), cls, config):
            return cls
    raise ConfigError(f"model.hf: model_type {config.model_type!r}: {fitting(config, job)}")


def _problem(cls: Any, config: Any, job: Job) -> str:
    """Say why a class does not do a job; an empty text where it does."""
    if job.kind == "items":
        return _unfit_for_items(cls, config, job)
    if not {"input_ids", "labels"} <= set(inspect.signature(cls.forward).parameters):
        return "takes no input_ids and labels, and computes no loss of text"
    sight = _sight(cls, config, job)
    if job.kind == "causal":
        return _unfit_for_next(sight, cls, config)
    if not job.asks:
        return ""
    if sight is None:
        return "" if _MASKED in _mappings(cls.__name__, config) else "could not be tried"
    if getattr(config, "is_encoder_decoder", False):
        return "has a decoder, for which masked text has no input: give data.python"
    if not sight.first:
        return "shifts the labels, which masked tokens must not be"
    return "" if sight.following else "sees no token after the masked one"


def _unfit_for_next(sight: Sight | None, cls: Any, config: Any) -> str:
    """Say why a class does not predict the next token; an empty text where it does."""
    if sight is not None:
        if sight.itself and sight.first:
            return "predicts each token where it sees it, since it shifts no labels"
        return "sees the tokens that it is to predict: it is not causal" if sight.itself else ""
    listed = _CAUSAL in _mappings(cls.__name__, config)
    if listed and getattr(config, "is_decoder", True):
        return ""  # every other class of that list was found to be causal
    return "could not be tried on text, and nothing says that it is causal"


def _sight(cls: Any, config: Any, job: Job) -> Sight | None:
    if not job.asks:
        return Sight(itself=False, following=True, first=True)
    return sight_of(cls, config)


def _decodes(config: Any, job: Job) -> str:
    """Return a class that would be causal as a decoder, or an empty text."""
    from copy import deepcopy

    if getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False):
        return ""
    changed = deepcopy(config)
    changed.is_decoder = True
    for name, cls in _classes(config).items():
        if _CAUSAL in _mappings(name, config) and not _problem(cls, changed, job):
            return name
    return ""


def _unfit_for_items(cls: Any, config: Any, job: Job) -> str:
    """Say why a class does not take the items of a data set; an empty text where it does."""
    batch = job.batch()
    parameters = inspect.signature(cls.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {*batch, *job.constants}
    if not batch.keys() & parameters.keys():
        return f"has no argument {', '.join(batch)}"
    for key in batch:
        # Keywords that a forward hands on may be anything, but the labels are its own.
        if key not in parameters and (not anything or "label" in key or "positions" in key):
            return f"has no argument {key}"
    for key in job.constants:
        if key not in parameters and (not anything or "loss" in key):
            return f"has no argument {key}, which model.constants gives"
    missing = [
        name
        for name, p in parameters.items()
        if name not in given
        and p.default is p.empty
        and name != "self"
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        return f"needs {', '.join(missing)}"
    return _misshapen(_mappings(cls.__name__, config), batch)


def _misshapen(lists: list[str], batch: Mapping[str, Tensor]) -> str:
    """Say why labels of this shape are not those of a class in these lists of transformers."""
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if labels is None:
        return ""
    if ids is not None and any(name in _BY_TOKEN for name in lists) and labels.ndim < ids.ndim:
        return f"takes a label for each token, and labels have the shape {list(labels.shape)}"
    if (
        any(name in _BY_ITEM for name in lists)
        and labels.ndim > 1
        and not labels.is_floating_point()
    ):
        return f"takes one label for an item, and labels have the shape {list(labels.shape)}"
    if "MODEL_FOR_MULTIPLE_CHOICE_MAPPING" in lists and ids is not None and ids.ndim < 3:
        return "takes several choices for an item"
    if "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING" in lists and labels.ndim < 3:
        return f"takes a label for each pixel, and labels have the shape {list(labels.shape)}"
    if any(name in _TO_SEQUENCES for name in lists) and labels.ndim < 2:
        return f"takes a sequence of labels, and labels have the shape {list(labels.shape)}"
    return ""


def _class(name: str) -> Any:
    """Return the class of transformers of that name; None where it is no model."""
    import transformers

    cls = getattr(transformers, name, None)
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        return cls
    return None


def _belongs(cls: Any, config: Any) -> bool:
    wanted = getattr(cls, "config_class", None)
    return wanted is None or isinstance(config, wanted)


def _mappings(name: str, config: Any) -> list[str]:
    """Return the lists of transformers that a class is in for a config."""
    return _listed(config).get(name, [])


def _classes(config: Any) -> dict[str, Any]:
    """Return the classes of transformers for a config, by name."""
    found = {name: _class(name) for name in _listed(config)}
    return {name: cls for name, cls in found.items() if cls is not None}


def _listed(config: Any) -> dict[str, list[str]]:
    """Return in which of transformers' lists a config's classes are, by their names."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for name in sorted(vars(modeling_auto)):
        mapping = getattr(modeling_auto, name)
        if not name.startswith("MODEL") or not name.endswith("_MAPPING"):
            continue
        key = mapping._reverse_config_mapping.get(type(config).__name__)
        names = mapping._model_mapping.get(key, ())
        for cls in (names,) if isinstance(names, str) else names:
            found.setdefault(cls, []).append(name)
    return found
