"""The same architecture with fewer layers: a transformers config whose counts are lowered."""

from __future__ import annotations

import copy
import re
from typing import Any

__all__ = ["most_layers", "with_fewer_layers"]

_COUNTS = re.compile(r"^(n|num)_(\w+_)?layers?$|^(\w+_)?layers$|^(\w+_)?depth$|^n_layer$")
"""Names of attributes that count layers: num_hidden_layers, n_layer, encoder_layers, depth."""
_PARTS = "_config"
"""How the names of a config's own configs end: text_config, vision_config."""


def most_layers(config: Any) -> int:
    """Return the largest count of layers that a config has; 0 where it names none."""
    return max((count for part in _parts(config) for count in _counts(part).values()), default=0)


def with_fewer_layers(config: Any, layers: int) -> Any:
    """Return a copy of a config whose stacks have at most `layers` layers each.

    A list that says something of each layer is cut to the same length.
    """
    lowered = copy.deepcopy(config)
    for part in _parts(lowered):
        for name, count in _counts(part).items():
            if count <= layers:
                continue
            for key, value in vars(part).items():
                if isinstance(value, (list, tuple)) and len(value) == count:
                    setattr(part, key, value[:layers])
            setattr(part, name, layers)
    return lowered


def _parts(config: Any) -> list[Any]:
    inner = [
        value
        for name, value in vars(config).items()
        if name.endswith(_PARTS) and hasattr(value, "to_dict")
    ]
    return [config, *(part for value in inner for part in _parts(value))]


def _counts(part: Any) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(part).items()
        if _COUNTS.match(name) and type(value) is int and value > 0
    }
