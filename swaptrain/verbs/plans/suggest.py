"""What other budgets, batches, dtypes of state, and adapters would take: tried, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from swaptrain.config.load import config_of
from swaptrain.config.schema import Config
from swaptrain.config.yaml_text import Tree
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.memory.limits import available_bytes
from swaptrain.units import GIB, exact_size, format_duration, format_size
from swaptrain.verbs.plans.planned import Planned, other_budgets, planned

__all__ = ["Refused", "TriedConfig", "print_choices", "suggest"]

_MOST_SHOWN = 8
_SHARE = 0.9
"""Of the RAM that is free: what a suggestion may take of it."""
_LORA = {"lora.r": 16, "lora.lora_alpha": 32, "lora.target_modules": "all-linear"}
_CODED = ("adadelta", "adagrad", "adam", "adamw", "adamax", "asgd", "nadam", "radam", "rmsprop")


@dataclass(frozen=True)
class TriedConfig:
    """A config that works, with what it takes."""

    changes: Mapping[str, Any]
    """Dotted keys and their values, over the config; none is the config as it is."""
    effect: str
    """What changes of the result, in words."""
    step_s: float | None
    token_s: float | None
    """Seconds a token (an item, for data without tokens)."""
    ram_bytes: int
    """memory.host, and the base beside it."""
    disk_bytes: int
    write_bytes: int
    """Of a step."""
    tokens: int
    """Of a step."""

    @property
    def words(self) -> str:
        """The changes as they are written on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items()) or "as it is"

    @property
    def written_a_token(self) -> float:
        return self.write_bytes / self.tokens


@dataclass(frozen=True)
class Refused:
    """A config that does not work here."""

    changes: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class _Candidate:
    changes: Mapping[str, Any]
    effect: str
    same_model: bool = True
    """Whether the captured model stays as it is."""


def suggest(found: Planned, note: Callable[[str], None]) -> tuple[list[TriedConfig], list[Refused]]:
    """Return the config and others, the fewest seconds a token first, and what was refused.

    Each is cut, measured and rehearsed as `plan` does it. Last comes what is best of each kind
    together. `note` hears what is tried. Raises ConfigError for a run that exists.
    """
    if found.root is not None:
        raise ConfigError(
            f"--suggest: {found.config.run.dir} holds a run, of which little can change: choose "
            "another run.dir"
        )
    choices, refused = [_choice(found, {}, "")], []

    def attempt(candidate: _Candidate) -> None:
        note(f"trying {_words(candidate.changes)}")
        try:
            config = _changed(found.config, candidate.changes)
            again = other_budgets(found, config) if candidate.same_model else planned(config)
        except SwaptrainError as error:
            refused.append(Refused(candidate.changes, str(error).splitlines()[0]))
        else:
            choices.append(_choice(again, candidate.changes, candidate.effect))

    tried = list(_candidates(found))
    for candidate in tried:
        attempt(candidate)
    together = _together(tried, choices)
    if together is not None:
        attempt(together)
    return sorted(choices, key=_order), refused


def print_choices(choices: list[TriedConfig], refused: list[Refused], console: Console) -> None:
    """Print the best ones, the fewest seconds a token first, with the config as it is."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("change", "step", "a token", "RAM", "disk", "written a token", "what else"):
        left = name in ("change", "what else")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    shown = choices[:_MOST_SHOWN]
    shown += [choice for choice in choices[_MOST_SHOWN:] if not choice.changes]
    for choice in shown:
        table.add_row(
            choice.words,
            "-" if choice.step_s is None else format_duration(choice.step_s),
            "-" if choice.token_s is None else format_duration(choice.token_s),
            format_size(choice.ram_bytes),
            format_size(choice.disk_bytes),
            format_size(choice.written_a_token),
            choice.effect,
        )
    console.print(table, markup=False, highlight=False)
    for one in refused:
        console.print(f"not {_words(one.changes)}: {one.reason}", markup=False, highlight=False)


def _order(choice: TriedConfig) -> tuple[float, int]:
    return (choice.token_s if choice.token_s is not None else float("inf"), choice.ram_bytes)


def _choice(found: Planned, changes: Mapping[str, Any], effect: str) -> TriedConfig:
    return TriedConfig(
        changes=changes,
        effect=effect,
        step_s=found.price.step_s,
        token_s=found.token_s,
        ram_bytes=found.config.memory.host + found.made.base_bytes,
        disk_bytes=found.disk_bytes,
        write_bytes=found.write_bytes,
        tokens=found.tokens,
    )


def _candidates(found: Planned) -> Iterator[_Candidate]:
    config = found.config
    host_bytes, count = config.memory.host, config.data.micro_batches
    free_bytes = available_bytes()
    most = float("inf") if free_bytes is None else _SHARE * free_bytes
    for factor in (0.5, 2, 4):
        size_bytes = int(host_bytes * factor)
        if found.made.base_bytes + size_bytes <= most:
            yield _Candidate({"memory.host": _size(size_bytes)}, "none: the same bits")
    for factor in (2, 4):
        yield _Candidate({"data.micro_batches": count * factor}, f"batches {factor} times as large")
    trains_all = config.lora is None
    if trains_all and config.optimizer.state == "float32" and config.optimizer.name in _CODED:
        for state in ("bfloat16", "8bit"):
            yield _Candidate({"optimizer.state": state}, "moments rounded after each step")
    commit = config.store.commit
    if commit.unit == "segment":
        unit = {"store.commit.unit": "step"}
        yield _Candidate(unit, "none: a kill repeats a step")
    if commit.every == 1:
        every = {"store.commit.unit": "step", "store.commit.every": 10}
        yield _Candidate(every, "none: a kill repeats up to ten steps")
    if config.model.dtype == "float32":
        dtype = {"model.dtype": "bfloat16"}
        yield _Candidate(dtype, "computed in bfloat16, masters in float32", same_model=False)
    if isinstance(config.model.hf, str) and find_spec("peft") is not None:
        effect = "adapters of rank 16 on all linear layers, not the model"
        if trains_all and config.optimizer.groups is None and config.train.freeze is None:
            yield _Candidate(_LORA, effect, same_model=False)
            coded = {**_LORA, "model.base": "nf4"}
            yield _Candidate(coded, f"{effect}, on a base of 4 bits", same_model=False)
        elif not trains_all and config.model.base is None:
            for form in ("int8", "nf4"):
                base = {"model.base": form}
                yield _Candidate(base, "frozen weights as codes", same_model=False)


def _together(tried: list[_Candidate], choices: list[TriedConfig]) -> _Candidate | None:
    """Return the best of each key that helps the same training, in one candidate."""
    given, best = choices[0], dict[str, TriedConfig]()
    same = {_words(candidate.changes) for candidate in tried if candidate.same_model}
    for choice in choices[1:]:
        key = next(iter(choice.changes))
        faster = (choice.token_s or 0) < (best.get(key, given).token_s or 0)
        if faster and _words(choice.changes) in same:
            best[key] = choice
    if len(best) < 2:
        return None
    changes = {key: value for choice in best.values() for key, value in choice.changes.items()}
    effects = [c.effect for c in best.values() if not c.effect.startswith("none: the")]
    return _Candidate(changes, "; ".join(effects) or "none: the same bits")


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with other values; raises ConfigError for what does not go together."""
    values: dict[str, Any] = config.to_tree()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        section[name] = value
    return config_of(Tree(values, {}), _words(changes)).resolved()


def _words(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in changes.items())


def _size(size_bytes: int) -> str:
    """Return a size as a config says it, in whole GiB or MiB."""
    unit = GIB if size_bytes >= 4 * GIB else 2**20
    return exact_size(max(1, round(size_bytes / unit)) * unit)
