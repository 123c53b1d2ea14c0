"""What torch.compile would gain: one Llama layer forward and backward, compiled or not, in turns.

python scripts/questions/compile_gain.py [ROUNDS]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

SIZES = ((1024, 2816, 16), (2048, 5632, 32))
"""Hidden size, intermediate size, heads: of the models that docs/results.md measures."""
TOKENS = 512
REPEATS = 10


def seconds(layer: Callable[..., Any], module: nn.Module, x: torch.Tensor, where: Any) -> float:
    """Return the median time of a forward and its backward."""
    taken = []
    for _ in range(REPEATS):
        value = x.clone().requires_grad_()
        begun = time.perf_counter()
        result = layer(value, position_embeddings=where)
        result = result[0] if isinstance(result, tuple) else result
        result.backward(x)
        taken.append(time.perf_counter() - begun)
        module.zero_grad()
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS} tokens, bfloat16"
    )
    for hidden, intermediate, heads in SIZES:
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            attn_implementation="sdpa",
        )
        layer = LlamaDecoderLayer(config, 0).bfloat16()
        x = torch.randn(1, TOKENS, hidden).bfloat16()
        where = LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
        compiled = torch.compile(layer)
        begun = time.perf_counter()
        for way in (compiled, layer):
            seconds(way, layer, x, where)
        first_s = time.perf_counter() - begun
        pairs = [
            (seconds(layer, layer, x, where), seconds(compiled, layer, x, where))
            for _ in range(rounds)
        ]
        ratios = sorted(eager / fast for eager, fast in pairs)
        print(
            f"hidden {hidden}: {statistics.median(p[0] for p in pairs) * 1e3:.1f} ms, compiled "
            f"{statistics.median(p[1] for p in pairs) * 1e3:.1f} ms; gain "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
            f"the first calls took {first_s:.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
