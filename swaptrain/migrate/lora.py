"""The `lora` section and a base in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swaptrain.migrate.draft import Draft

__all__ = ["AdapterDefaults", "add_adapter", "add_base"]


@dataclass(frozen=True)
class AdapterDefaults:
    """What the tool that made a file takes for a key that is absent, and its names of the keys."""

    r: int | None
    alpha: float | None
    """None: twice the rank."""
    dropout: float
    rank_key: str
    rslora_key: str = "use_rslora"
    dora_key: str = "use_dora"


def add_adapter(
    draft: Draft,
    adapter: AdapterDefaults,
    targets: Any,
    saved: list[str],
    names: tuple[str, str],
) -> None:
    """Set the `lora` section; `targets` None is PEFT's choice for the kind of model.

    `names` are the keys that targets and modules to save stand in.
    """
    given = draft.given
    r = given.count(adapter.rank_key)
    if r is not None:
        draft.set("lora.r", r, adapter.rank_key)
    elif adapter.r is not None:
        draft.default("lora.r", adapter.r)
        r = adapter.r
    alpha, dropout = given.number("lora_alpha"), given.number("lora_dropout")
    if alpha is not None:
        draft.set("lora.lora_alpha", alpha, "lora_alpha")
    elif adapter.alpha is not None:
        draft.default("lora.lora_alpha", adapter.alpha)
    elif r is not None:
        draft.default("lora.lora_alpha", 2 * r)
    if dropout is not None:
        draft.set("lora.lora_dropout", dropout, "lora_dropout")
    elif adapter.dropout:
        draft.default("lora.lora_dropout", adapter.dropout)
    draft.set("lora.target_modules", targets, "PEFT's choice" if targets is None else names[0])
    if saved:
        draft.set("lora.modules_to_save", saved, names[1])
    for key, theirs in (("use_rslora", adapter.rslora_key), ("use_dora", adapter.dora_key)):
        if given.flag(theirs):
            draft.set(f"lora.{key}", True, theirs)


def add_base(draft: Draft, *, nested: bool) -> None:
    """Set `model.base`; `nested`: whether the tool quantizes the scales of 4 bits once more."""
    given = draft.given
    four, eight = given.flag("load_in_4bit"), given.flag("load_in_8bit")
    bits = given.count("quantization_bit")
    method = given.text("quantization_method")
    kind = given.text("bnb_4bit_quant_type", "quantization_type") or "nf4"
    for key in ("use_bnb_nested_quant", "double_quantization"):
        if given.has(key):
            nested = bool(given.flag(key))
    if bits not in (None, 4, 8):
        draft.remark("quantization_bit", bits, "model.base is nf4 (4 bits) or int8: choose one")
    if method not in (None, "bnb", "bitsandbytes"):
        draft.remark("quantization_method", method, "model.base quantizes a base of full weights")
    if four or bits == 4:
        draft.set("model.base", "nf4", "load_in_4bit" if four else "quantization_bit")
        if kind != "nf4":
            draft.remark("bnb_4bit_quant_type", kind, "the codes here are nf4's")
        if nested:
            draft.say(
                "4 bits: the scales are not quantized once more here (double quantization), so "
                "the base has slightly other values"
            )
    elif eight or bits == 8:
        draft.set("model.base", "int8", "load_in_8bit" if eight else "quantization_bit")
        draft.say(
            "8 bits: weights alone are rounded here, by rows; bitsandbytes rounds what they are "
            "multiplied with as well"
        )
