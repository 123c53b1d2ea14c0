"""The `lora` section: fields of PEFT's LoraConfig, by PEFT's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from swaptrain.config.kinds import (
    Folder,
    Fraction,
    Layers,
    Names,
    NamesOrPattern,
    Positive,
    PositiveNumber,
)
from swaptrain.config.section import Section

__all__ = ["LoraConfig"]

_REFUSED = {
    "pissa": "which changes the base itself",
    "olora": "which changes the base itself",
    "loftq": "which changes the base itself",
    "corda": "which changes the base itself",
    "eva": "which needs passes over the data before it begins",
    "orthogonal": "which is not known to give the same bits",
}


class LoraConfig(Section):
    """Adapters that are trained while the model stays as it is, with PEFT's words and mathematics.

    It needs `pip install 'swaptrain[lora]'`. The seed `train.seed` is given again just before the
    adapters are made. null: the model itself is trained.
    """

    source: Folder | None = Field(default=None, alias="from")
    """Directory of an adapter that PEFT saved (`adapter_config.json`, `adapter_model.safetensors`),
    to go on with it; no other key of this section is given then. null: a new adapter."""
    r: Positive = 8
    """Rank of the adapters."""
    lora_alpha: PositiveNumber = 8.0
    """What an adapter adds is scaled by `lora_alpha / r`."""
    lora_dropout: Fraction = 0.0
    """Dropout before an adapter."""
    target_modules: NamesOrPattern | None = None
    """Modules that get adapters: a list of names or ends of names, a regular expression of whole
    names, or `all-linear`, which leaves the output layer out. null: PEFT's choice for the kind of
    model."""
    exclude_modules: NamesOrPattern | None = None
    """Modules that get none all the same."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base are trained too."""
    use_rslora: bool = False
    """true: scaled by `lora_alpha / sqrt(r)`."""
    use_dora: bool = False
    """true: DoRA, which trains a weight's magnitude by itself. It makes the whole adapted weight in
    each forward."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """true: A as PEFT's default and B zero; gaussian: A normal and B zero; false: both random."""
    modules_to_save: Names | None = None
    """Modules that are trained in full, and saved with the adapter: a new head."""
    layers_to_transform: Layers | None = None
    """Numbers of the layers that get adapters. null: all."""
    layers_pattern: Names | None = None
    """Names of the lists of layers that these numbers count in."""
    rank_pattern: dict[str, Positive] = {}
    """Other ranks, by names or regular expressions of modules."""
    alpha_pattern: dict[str, PositiveNumber] = {}
    """Other values of `lora_alpha`, likewise."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_refused(cls, found: Any) -> Any:
        given = found if isinstance(found, dict) else {}
        wanted = given.get("init_lora_weights")
        name = wanted.lower() if isinstance(wanted, str) else ""
        reason = next((text for word, text in _REFUSED.items() if name.startswith(word)), None)
        if reason is not None:
            raise ValueError(
                f"init_lora_weights: {wanted} is not supported, {reason}; choose true, false or "
                "gaussian"
            )
        if given.get("target_parameters"):
            raise ValueError(
                "target_parameters is not supported (LoRA on stacked experts changes the parameter "
                "itself in each forward); name modules in target_modules"
            )
        return found

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        others = self.model_fields_set - {"source"}
        if self.source is not None and others:
            raise ValueError(
                f"from names an adapter, which says itself what its {sorted(others)[0]} is: leave "
                "out either"
            )
        return self

    @model_serializer(mode="wrap")
    def _alone(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `from` as it is read: alone."""
        fields: dict[str, Any] = handler(self)
        if self.source is None:
            return fields
        return {name: value for name, value in fields.items() if name in ("source", "from")}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the fields that are PEFT's."""
        return tuple(name for name in cls.model_fields if name != "source")

    def fields(self) -> dict[str, Any]:
        """Return the fields as PEFT's LoraConfig takes them: whole numbers as such."""
        return {name: _plain(getattr(self, name)) for name in self.field_names()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and value.is_integer() and value:
        return int(value)
    return list(value) if isinstance(value, tuple) else value
