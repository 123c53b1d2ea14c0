"""The road of a GPU on a device that refuses what a GPU refuses: tensors of two devices at once.

Its numbers lie in ordinary memory and come of the CPU's kernels, so all bits have to be the CPU's.
The models here have no operation that torch computes in another way for such a device (SiLU, LSTM).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.backend_registration

from tests.whole.test_exactness import GPT2, LLAMA

pytestmark = pytest.mark.trains

TEXT = {"python": "tests.support.datasets:text"}
SMALL: dict[str, Any] = {"memory": {"segment": "16KiB"}, "data": TEXT}
DROPOUT = {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
GELU_LLAMA = {**LLAMA, "hidden_act": "gelu"}
EXPERTS = {**GELU_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
CONVOLUTIONAL = "tests.support.models:convolutional"
WIDE = {"python": "tests.support.models:wide_mlp"}
VECTORS = {"python": "tests.support.datasets:vectors"}
PARTS: dict[str, Any] = {"store": {"chunk": "8KiB"}, "memory": {"segment": "200KiB"}}
CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"model": {"hf": GPT2}, "train": {"steps": 2, "recompute": True}},
    "saved": {"model": {"hf": DROPOUT}, "train": {"steps": 2, "recompute": False}},
    "parts, clipped": {
        "model": {"hf": GELU_LLAMA, "dtype": "bfloat16"}, **PARTS, "optimizer": {"clip_norm": 0.1}
    },
    "experts": {"model": {"hf": EXPERTS}, "store": {"commit": {"every": 2}}},
    "whole parameters": {"model": {"hf": GPT2}, "optimizer": {"name": "adafactor"}},
    "buffers, evaluated": {
        "model": {"python": CONVOLUTIONAL},
        "data": {"python": "tests.support.datasets:image_labels"},
        "eval": {"python": "tests.support.datasets:image_labels", "every": 2, "batches": 2},
    },
    "coded": {
        "model": {**WIDE, "dtype": "bfloat16"}, "data": VECTORS, "optimizer": {"state": "8bit"},
        "memory": {"segment": "24KiB"},
    },
    "coded, no master": {
        "model": {**WIDE, "dtype": "bfloat16", "master": "none"}, "data": VECTORS,
        "optimizer": {"state": "8bit", "clip_norm": 0.1}, **PARTS,
    },
    "coded in bfloat16": {
        "model": {**WIDE, "dtype": "float16"}, "data": VECTORS, "optimizer": {"state": "bfloat16"},
    },
    "unplaced": {"model": {"hf": GPT2}, "train": {"steps": 1}},
}  # fmt: skip

WAITING = {"whole parameters": ["aten._local_scalar_dense.default"]}
"""Adafactor takes its factors as numbers."""


SOME = ("saved", "parts, clipped", "buffers, evaluated", "unplaced")


@pytest.mark.proof
@pytest.mark.parametrize(
    "names", [SOME, pytest.param(tuple(CASES), marks=pytest.mark.whole)], ids=["some", "all"]
)
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no device that is written in Python",
)
def test_every_tensor_is_brought_to_where_it_is_computed_with(names: tuple[str, ...]) -> None:
    """Else an operation fails, as the one does whose code was not placed on the device.

    And no instruction waits for a number of the device, but where torch's own code asks for one.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.other_device"],
        input=json.dumps({name: {**SMALL, **CASES[name]} for name in names}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    answers = json.loads(done.stdout)
    assert "expected all tensors to be on the same device" in answers.pop("unplaced")[0]
    assert {name: answer for name, (answer, _) in answers.items()} == dict.fromkeys(
        answers, "same bits"
    )
    waiting = {name: waits for name, (_, waits) in answers.items() if waits}
    assert waiting == {name: waits for name, waits in WAITING.items() if name in names}
    assert len(answers) == len(names) - 1
