"""How the learning rate moves: names and arguments of transformers' schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swaptrain.migrate.draft import Draft

__all__ = ["add_schedule"]

_NAMES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "linear",
    "warmup_stable_decay": "wsd",
}
_KEY = "optimizer.schedule"
_POLYNOMIAL_END = 1e-7
"""Where transformers lets a polynomial end."""


def add_schedule(draft: Draft, key: str, default: str, lr: float, steps: int | None) -> str:
    """Set the schedule, without its warmup; return their name of it.

    `key` is theirs for the name, `lr` the peak, and `steps` the number of steps where it is known.
    """
    named = str(draft.given.text(key) or default).lower()
    arguments = _arguments(draft)
    comment = f"{key}: {named}" if draft.given.has(key) else f"default of {draft.tool}"
    if named not in _NAMES:
        draft.set(f"{_KEY}.name", "cosine", f"instead of {key}: see the end")
        draft.remark(
            key,
            named,
            "constant, linear, cosine and wsd are there: cosine is in its place",
        )
        return named
    draft.set(f"{_KEY}.name", _NAMES[named], comment)
    least = _least(draft, named, arguments, lr)
    if least:
        draft.set(f"{_KEY}.min_lr_ratio", least, "of lr, at the end of the decay")
    if named == "polynomial" and arguments.pop("power", 1.0) != 1.0:
        draft.remark(key, named, "a power other than 1 is not there: the decay is linear")
    if named == "warmup_stable_decay":
        _add_decay(draft, arguments, steps)
    if arguments.pop("num_cycles", 0.5) != 0.5:
        draft.remark("lr_scheduler_kwargs", "num_cycles", "the cosine falls once, without restarts")
    if arguments:
        draft.remark("lr_scheduler_kwargs", arguments, "no key: the schedule has no such argument")
    return named


def _arguments(draft: Draft) -> dict[str, Any]:
    found = draft.given.take("lr_scheduler_kwargs")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise draft.given.wrong("lr_scheduler_kwargs", found, "a mapping of keys")
    return dict(found)


def _number(draft: Draft, arguments: dict[str, Any], *names: str) -> float | None:
    """Take the first of these arguments that is there; raises ConfigError for what is no number."""
    found = [value for name in names if (value := arguments.pop(name, None)) is not None]
    if not found:
        return None
    try:
        return float(found[0])
    except (TypeError, ValueError, OverflowError):
        raise draft.given.wrong(
            "lr_scheduler_kwargs", found[0], f"a number as {names[0]}"
        ) from None


def _least(draft: Draft, named: str, arguments: dict[str, Any], lr: float) -> float:
    """Return the factor at the end of the decay."""
    if named == "polynomial":
        end = _number(draft, arguments, "lr_end")
        return (_POLYNOMIAL_END if end is None else end) / lr
    if named in ("cosine_with_min_lr", "warmup_stable_decay"):
        ratio = _number(draft, arguments, "min_lr_rate", "min_lr_ratio")
        return ratio or (_number(draft, arguments, "min_lr") or 0.0) / lr
    return 0.0


def _add_decay(draft: Draft, arguments: dict[str, Any], steps: int | None) -> None:
    decay = _number(draft, arguments, "num_decay_steps")
    shape = arguments.pop("decay_type", "cosine")
    arguments.pop("num_stable_steps", None)  # what is left
    if shape != "linear":
        draft.remark("lr_scheduler_kwargs", f"decay_type: {shape}", "the decay is linear here")
    if decay is not None and steps:
        draft.set(f"{_KEY}.decay_fraction", min(1.0, decay / steps), "num_decay_steps")
    elif decay is not None:
        draft.remark(
            "lr_scheduler_kwargs",
            f"num_decay_steps: {decay:g}",
            f"set {_KEY}.decay_fraction to that part of all steps, which plan says",
        )
