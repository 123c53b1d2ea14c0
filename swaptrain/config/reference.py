"""The reference of all config keys, as Markdown, generated from the models: docs/config.md."""

from __future__ import annotations

import types
from collections.abc import Iterator
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swaptrain.config.kinds import ValueKind
from swaptrain.config.messages import section_of
from swaptrain.config.resume_rules import resume_rule
from swaptrain.config.schema import Config
from swaptrain.config.section import key_of
from swaptrain.config.yaml_text import dump_yaml
from swaptrain.units import exact_size

__all__ = ["markdown"]

_COLUMNS = 100
"""Of prose; a row of a table is one line."""
_HEAD = """\
# Config reference

`python -m swaptrain --config FILE [key.sub=value ...]` reads one YAML file, puts the overrides over
it and checks the whole before it touches anything. This page is generated from the code
(`python -m swaptrain.config.reference > docs/config.md`).

- **Overrides** are YAML too: `train.steps=100`, `eval=null`, `optimizer='{name: sgd, lr: 0.1}'`,
  `data.text='[a/*.txt, b/*.txt]'`. Quote them for the shell where it needs it. The last one wins.
- **Sizes** have a unit: `4GiB` is 4 x 2^30 bytes, `4GB` is 4 x 10^9. A bare number is refused.
- **Numbers** may be written as `3e-4` or `1_000`. Only `true` and `false` are truth values: `no`,
  `on`, `12:30` and dates are text.
- **Paths** that are relative are relative to the current directory, not to the config file. In
  every path a leading `~` or `~user`, `$VAR` and `${VAR}` are replaced. A variable that is not set
  is refused; `$$` stands for a `$`, and `./~x` for a name that begins with `~`. Arguments of the
  command line (`--config`, RUN, `--to`) are expanded too, unless they name what is there. `kwargs`
  are not.
- **Unknown keys** are errors, and so is a key that is given twice. All errors are shown at once.
- **On resume**: `free` keys may change whenever a run is started again; others only with
  `--accept-change` (from the next step on). A key with `no` may not change: the run's recorded
  state or its exact result depends on it. `python -m swaptrain --config FILE --fresh` starts
  over.
- The config with all defaults filled in is written to `run.dir/config.yaml`.
"""

_SCHEDULES = """
### Formulas of the schedules

Steps s count from 1, or with `from_zero` from 0; w is `warmup_steps`, d is `decay_steps`, f is
`min_lr_ratio`, q is `decay_fraction`. The learning rate of step s is `lr` times a factor:

- warmup, for s <= w: `s / w`
- after it, with `t = clip((s - w) / max(1, d - w), 0, 1)`:

| name | factor |
|---|---|
| constant | `1` |
| linear | `1 - (1 - f) t` |
| cosine | `f + (1 - f) (1 + cos(pi t)) / 2` |
| wsd | `1 - (1 - f) u`, with `e = max(w, d - q d)` and `u = clip((s - e) / max(1, d - e), 0, 1)` |

wsd is thus 1 until the last `q d` of the `d` steps (never before the warmup ends), and then falls
linearly to f.
"""


def markdown() -> str:
    """Return docs/config.md: a table for each section, with every key, default and meaning."""
    parts = [_HEAD, "## Top level\n", _table(Config, "")]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += list(_section(name, section))
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _section(name: str, section: type[BaseModel], level: int = 2) -> Iterator[str]:
    yield f"\n{'#' * level} `{name}`\n"
    yield fill(_prose(section.__doc__ or ""), _COLUMNS) + "\n"
    yield _table(section, f"{name}.")
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _section(f"{name}.{key}", inner, level + 1)
    if name.endswith(".schedule"):
        yield _SCHEDULES


def _table(section: type[BaseModel], prefix: str) -> str:
    rows = ["| key | type | default | meaning | on resume |", "|---|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = (
            f"`{prefix}{key_of(name, field)}`",
            _type(field),
            _default(field),
            _prose(field.description or (section_of(field.annotation) or section).__doc__ or ""),
            _rule(prefix + key_of(name, field), field),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if section.model_config.get("extra") == "allow":
        rows.append(f"| any other `{prefix}` key | any | | An argument of the class. | no |")
    return "\n".join(rows)


def _prose(text: str) -> str:
    """Join the lines of each paragraph; inside a table a paragraph is a sentence more."""
    return " ".join(text.split())


def _rule(key: str, field: FieldInfo) -> str:
    section = section_of(field.annotation)
    if section is None:
        return resume_rule(key)
    fields = section.model_fields.items()
    rules = {_rule(f"{key}.{key_of(name, inner)}", inner) for name, inner in fields}
    return rules.pop() if len(rules) == 1 else "see its keys"


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    kinds = [meta for meta in field.metadata if isinstance(meta, ValueKind)]
    optional, options = False, [annotation]
    if isinstance(annotation, types.UnionType) or str(get_origin(annotation)) == "typing.Union":
        options = [option for option in get_args(annotation) if option is not type(None)]
        optional = len(options) < len(get_args(annotation))
        for option in options:
            kinds += [m for m in getattr(option, "__metadata__", ()) if isinstance(m, ValueKind)]
        annotation = options[0]
    ending = " or null" if optional else ""
    if kinds:
        return f"{kinds[0].wanted}{ending}"
    if section_of(annotation) is not None:
        return f"section{ending}"
    if get_origin(getattr(annotation, "__origin__", annotation)) is tuple:
        return f"a list of mappings{ending}"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation)) + ending
    if annotation is bool:
        words = [c for option in options[1:] for c in get_args(option)]
        if words:
            return ", ".join(["true", "false", *(f"`{word}`" for word in words)]) + ending
        return f"true or false{ending}"
    return f"mapping{ending}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return "see its keys"
    if any(isinstance(meta, ValueKind) and "size" in meta.wanted for meta in field.metadata):
        return f"`{exact_size(field.default)}`"
    value = dump_yaml({"value": field.default}).partition(":")[2].strip()
    return f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
