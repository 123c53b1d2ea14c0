"""What a resumed run may change: the differences between two configs, in three groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import dump_yaml
from swaptrain.errors import ConfigError

__all__ = ["Change", "Changes", "changes", "check_resume", "resume_rule", "with_recorded"]

Rule = Literal["free", "with --accept-change", "no"]

_FREE = (
    "data.cache",
    "data.workers",
    "distributed",
    "eval",
    "memory.device",
    "memory.host",
    "run",
    "store.keep",
    "store.paths",
    "store.commit.lag",
    "store.verify",
    "train.check_capture",
    "train.epochs",
    "train.report_to",
    "train.steps",
    "train.recompute",
)
_GROUP = re.compile(r"^optimizer\.groups\.\d+\.")
_ACCEPTABLE = ("optimizer.lr", "optimizer.schedule", "optimizer.weight_decay")


@dataclass(frozen=True)
class Change:
    """One key that differs, with both values as they are written in YAML."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass(frozen=True)
class Changes:
    """The keys that differ between the recorded config and the new one, by what they need."""

    free: tuple[Change, ...] = ()
    acceptable: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()


def resume_rule(key: str) -> Rule:
    """Say whether a dotted key may change when a run is resumed."""
    if any(key == name or key.startswith(name + ".") for name in _FREE):
        return "free"
    group = _GROUP.sub("optimizer.", key)
    if any(group == name or group.startswith(f"{name}.") for name in _ACCEPTABLE):
        return "with --accept-change"
    return "no"


def with_recorded(old: Config, new: Config) -> Config:
    """Return `new` with what the run recorded at creation where `new` leaves it open (null).

    That is `optimizer.schedule.decay_steps`, whose default is the first `train.steps`, and
    `data.packing`, `train.loss_weighting` and `store.commit.unit`, whose defaults depend on the
    model. `old` is the config as recorded in `run.dir/config.yaml`.
    """
    if new.store.commit.unit is None:
        commit = new.store.commit.model_copy(update={"unit": old.store.commit.unit})
        store = new.store.model_copy(update={"commit": commit})
        new = new.model_copy(update={"store": store})
    if new.data.packing is None:
        data = new.data.model_copy(update={"packing": old.data.packing})
        new = new.model_copy(update={"data": data})
    if new.train.loss_weighting is None:
        train = {"loss_weighting": _as_begun(old).train.loss_weighting}
        new = new.model_copy(update={"train": new.train.model_copy(update=train)})
    if new.optimizer.schedule.decay_steps is not None:
        return new
    recorded = old.resolved().optimizer.schedule.decay_steps
    schedule = new.optimizer.schedule.model_copy(update={"decay_steps": recorded})
    optimizer = new.optimizer.model_copy(update={"schedule": schedule})
    return new.model_copy(update={"optimizer": optimizer})


def _as_begun(old: Config) -> Config:
    """Return a recorded config with what it does not say: what runs did that had no such key."""
    old = old.resolved()
    if old.train.loss_weighting is not None:
        return old
    train = old.train.model_copy(update={"loss_weighting": "micro_batches"})
    return old.model_copy(update={"train": train})


def changes(old: Config, new: Config) -> Changes:
    """Compare the recorded config with the new one, after `with_recorded`, key by key."""
    groups: dict[Rule, list[Change]] = {"free": [], "with --accept-change": [], "no": []}
    new_tree = with_recorded(old, new).to_tree()
    for change in _differences(_as_begun(old).to_tree(), new_tree, ""):
        groups[resume_rule(change.key)].append(change)
    return Changes(
        tuple(groups["free"]), tuple(groups["with --accept-change"]), tuple(groups["no"])
    )


def check_resume(old: Config, new: Config, *, accept_change: bool) -> Config:
    """Return the config to go on with; raises ConfigError naming the keys that must not change."""
    found = changes(old, new)
    if found.refused:
        lines = "\n".join(f"  {change}" for change in found.refused)
        raise ConfigError(
            f"the run in {new.run.dir} was created with another config; these keys cannot change:\n"
            f"{lines}\nset them back, choose another run.dir, or start over with --fresh"
        )
    if found.acceptable and not accept_change:
        lines = "\n".join(f"  {change}" for change in found.acceptable)
        raise ConfigError(
            f"the run in {new.run.dir} trains with other values than the config has (the run's -> "
            f"the config's):\n{lines}\n"
            "set them back, or give --accept-change to go on with the new ones"
        )
    return with_recorded(old, new)


def _differences(old: Any, new: Any, name: str) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else str(key)
            yield from _differences(old.get(key), new.get(key), inner)
    elif _are_sections(old) and _are_sections(new) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{name}.{number}")
    elif type(old) is not type(new) or old != new:
        yield Change(name, old, new)


def _are_sections(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, dict) for one in value)


def _shown(value: Any) -> str:
    text = dump_yaml({"": value}).partition(":")[2].strip()
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
