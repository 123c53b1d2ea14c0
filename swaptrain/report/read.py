"""Everything that a report says of a run, read from its directory; nothing of it is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from swaptrain.config.yaml_text import one_line_yaml, read_yaml
from swaptrain.observe.starts import read_starts
from swaptrain.report.instruction_memory import InstructionMemory, read_instruction_memory
from swaptrain.report.rows import StepRows, moment, number, read_columns
from swaptrain.report.timeline import TracedSteps, read_trace
from swaptrain.store.paths import RunPaths
from swaptrain.strict_json import parse_json

__all__ = ["RunFiles", "RunState", "Sample", "StartSeen", "read_run_files"]

_T = TypeVar("_T")
_LONGEST_TEXT = 200
_LONGEST_SAMPLE = 4_000
_LONGEST_LINE = 1 << 20
_MOST_SAMPLES = 5_000


@dataclass(frozen=True)
class RunState:
    """What the store and the config of a run say, in words."""

    text: str
    """Where the run is."""
    facts: Sequence[tuple[str, str]]
    host_bytes: int | None
    """memory.host; None where the config was not looked at."""
    last_step: int | None
    """That it was asked for."""
    writer: str | None = None
    """The process that trains now."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Of the creation."""


@dataclass(frozen=True)
class StartSeen:
    """A line of starts.jsonl, as far as it can be used."""

    time: float
    texts: Mapping[str, str]
    """Host, pid, device, and by name what of machine and versions is known."""
    first_step: float
    forecast: Mapping[str, float]
    """Numbers by name; NaN for one that is not known."""

    def expects(self, name: str) -> float:
        """Return a number of the forecast, NaN where it has none."""
        return self.forecast.get(name, float("nan"))


@dataclass(frozen=True)
class Sample:
    """What the model wrote after a step."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, eq=False)
class RunFiles:
    """A run directory at one moment."""

    path: Path
    label: str
    """What a chart calls it."""
    state: RunState
    config_text: str
    config: Mapping[str, str]
    """Dotted key to value, as YAML in one line."""
    rows: StepRows
    starts: Sequence[StartSeen]
    trace: TracedSteps | None
    memory: InstructionMemory | None
    samples: Sequence[Sample]
    problems: Sequence[str]
    """What could not be read, in words."""


def read_run_files(path: Path, label: str, state: RunState) -> RunFiles:
    """Return what the files of a run say; what is missing or torn becomes a problem in words.

    Raises ConfigError where there is no config.yaml.
    """
    paths, problems = RunPaths(path), list[str]()

    def tried(file: Path, read: Callable[[Path], _T], otherwise: _T) -> _T:
        try:
            if file.exists() and not file.is_file():
                raise ValueError("it is no file")
            return read(file)
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"{file.name} is not what a run writes: {error}")
        return otherwise

    tree = read_yaml(paths.config, advice="give the run.dir of a config")
    rows = tried(paths.metrics, read_columns, StepRows({"step": np.zeros(0)}))
    if rows.refused:
        lines = "one line" if rows.refused == 1 else f"{rows.refused:,} lines"
        problems.append(
            f"{lines} of {paths.metrics.name} cannot be read as a step that follows, and are left "
            "out"
        )
    trace = tried(paths.trace, read_trace, None)
    if trace is not None and trace.problem is not None:
        problems.append(f"{paths.trace.name}: {trace.problem}")
    return RunFiles(
        path=path,
        label=label,
        state=state,
        config_text=paths.config.read_text(encoding="utf-8", errors="replace"),
        config=_flat(tree.values),
        rows=rows,
        starts=tried(paths.starts, _starts, []),
        trace=trace,
        memory=tried(paths.memory, read_instruction_memory, None),
        samples=tried(paths.samples, _samples, []),
        problems=problems,
    )


def _flat(values: Any, above: str = "") -> dict[str, str]:
    """Return the leaves of a config by dotted key."""
    if not isinstance(values, dict) or not values:
        return {above: one_line_yaml(values)}
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}.{key}" if above else str(key))
    return found


def _starts(path: Path) -> list[StartSeen]:
    return [_start(line) for line in read_starts(path)]


def _start(line: Mapping[str, Any]) -> StartSeen:
    texts = {name: _text(line.get(name)) for name in ("host", "pid", "device", "threads")}
    for group in ("versions", "machine"):
        found = line.get(group)
        if isinstance(found, dict):
            # torch is in both; what is called device is its name in `machine`.
            texts |= {_key(name, group): _text(value) for name, value in found.items()}
    for name in ("parameters", "segments", "last_step"):
        texts[name] = _text(line.get(name))
    forecast = line.get("forecast")
    return StartSeen(
        time=moment(line["time"]),
        texts={name: text for name, text in texts.items() if text},
        first_step=number(line.get("first_step")),
        forecast={
            str(name): number(value)
            for name, value in (forecast.items() if isinstance(forecast, dict) else ())
        },
    )


def _key(name: Any, group: str) -> str:
    return "device name" if (name, group) == ("device", "machine") else str(name)


def _text(value: Any) -> str:
    """Return a short text that can be shown; nothing for what is none."""
    if type(value) is int:
        return str(value)
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value.isprintable() else ""


def _samples(path: Path) -> list[Sample]:
    found: list[Sample] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            try:
                row = parse_json(line)
            except ValueError:
                continue  # torn, or longer than any
            found += _of_row(row)
            if len(found) > _MOST_SAMPLES:
                break
    return found[:_MOST_SAMPLES]


def _of_row(row: Any) -> list[Sample]:
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return []
    rows = row.get("samples")
    return [
        Sample(row["step"], _cut(sample.get("prompt")), _cut(sample.get("text")))
        for sample in (rows if isinstance(rows, list) else ())
        if isinstance(sample, dict)
    ]


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} ..."
