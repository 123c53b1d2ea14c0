"""oneDNN keeps few compiled products where the model's router chooses their shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

COMPILED = """
import os, sys
import torch
from swaptrain.memory.onednn import limit_primitive_caches
if sys.argv[1] == "limited":
    limit_primitive_caches()
weight = torch.ones(8, 8, 3)
for _ in range(2):
    print("pass", flush=True)
    for rows in range(1, 161):
        torch.nn.functional.conv1d(torch.ones(rows, 8, 4), weight)
print(*(os.environ.get(name) for name in sys.argv[2:]))
"""
NAMES = ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"]


def compiled(how: str, **set_before: str) -> tuple[int, str]:
    """Return how many convolutions of 160 shapes are compiled a second time, and the settings."""
    environment = {k: v for k, v in os.environ.items() if k not in NAMES}
    output = subprocess.run(
        [sys.executable, "-c", COMPILED, how, *NAMES],
        env={**environment, **set_before, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    second = output.split("pass\n")[2]
    return second.count("cache_miss"), second.splitlines()[-1]


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
def test_with_the_limit_products_of_many_shapes_are_not_kept() -> None:
    """A setting of the user's stays."""
    assert compiled("as it is") == (0, "None None")
    misses, settings = compiled("limited")
    assert misses >= 160 - 64 and settings == "64 64"
    assert compiled("limited", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")[1] == "1024 64"
