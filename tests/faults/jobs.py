"""The small jobs whose every disk operation fails once."""

from __future__ import annotations

from typing import Any

__all__ = ["MODES"]

_GPT: dict[str, Any] = {
    "model": {
        "python": "tests.support.models:gpt",  # tied weights, dropout, values read far away
        "kwargs": {"layers": 1, "dropout": 0.1, "width": 8},
    },
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 2},
    "memory": {"segment": "9KiB"},
    "train": {"steps": 2},
}
_WIDE: dict[str, Any] = {
    **_GPT,
    # Of parameters that are large enough, the moments are codes.
    "model": {**_GPT["model"], "kwargs": {"layers": 1, "dropout": 0.1, "width": 32}},
    "memory": {"segment": "32KiB"},
}
_PARTS: dict[str, Any] = {
    **_WIDE,
    "memory": {"segment": "100KiB"},
    "store": {"chunk": "8KiB"},
}
MODES: dict[str, dict[str, Any]] = {
    "fused": _GPT,
    "clipped": {**_GPT, "optimizer": {"clip_norm": 0.3}},
    "trees": {**_GPT, "store": {"commit": {"every": 2}}, "train": {"steps": 3}},
    "parts": _PARTS,
    "parts-8bit": {**_PARTS, "optimizer": {"state": "8bit"}},
    "8bit-clipped": {**_WIDE, "optimizer": {"state": "8bit", "clip_norm": 0.3}},
    "bfloat16-state": {**_WIDE, "optimizer": {"state": "bfloat16"}},
    "no-master": {
        **_WIDE,
        "model": {**_WIDE["model"], "dtype": "bfloat16", "master": "none"},
        "optimizer": {"state": "8bit"},
    },
    "muon": {
        **_GPT,
        "optimizer": {
            "name": "muon",
            "groups": [
                {"match": ["*bias", "*norm*", "*.mlp.0.*", "embedding*"], "name": "adamw"},
                {"match": ["position", "scale"], "name": "adamw"},
            ],
        },
    },
    "float16": {**_GPT, "model": {**_GPT["model"], "dtype": "float16"}},
}
