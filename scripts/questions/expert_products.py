"""What it costs and saves to keep fewer compiled products of experts: two processes in turns.

    python scripts/questions/expert_products.py [--rounds N]

Forward and backward of the two products of a layer of 64 experts (2048 by 1536 and 768 by 2048,
bfloat16) with 2,048 rows, which a random router shares out anew each time. One process keeps as
many compiled products as oneDNN and ideep do by themselves, the other as
`swaptrain.memory.onednn.limit_primitive_caches` says. Prints processor seconds of a pass and what
the heap has given out at the end.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch

from swaptrain.memory.malloc import heap_bytes
from swaptrain.memory.onednn import limit_primitive_caches

EXPERTS, ROWS, WIDTH, INNER = 64, 2048, 2048, 768
PASSES, WARMUP = 24, 12
"""The caches fill in the passes of the warm-up."""


def one_pass(gate_up: torch.Tensor, down: torch.Tensor, seed: int) -> float:
    """Return the processor seconds of a forward and a backward under one routing."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(EXPERTS, generator=generator) ** 2
    chosen = torch.multinomial(shares, ROWS, replacement=True, generator=generator)
    ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    begun = time.process_time()
    both = torch._grouped_mm(rows, gate_up, offs=ends)
    out = torch._grouped_mm(both[:, :INNER] * both[:, INNER:], down, offs=ends)
    out.backward(torch.ones_like(out))
    gate_up.grad = down.grad = None
    return time.process_time() - begun


def measure(how: str) -> None:
    """Print what one process takes."""
    if how == "limited":
        limit_primitive_caches()
    gate_up = (torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.02).bfloat16().requires_grad_()
    down = (torch.randn(EXPERTS, INNER, WIDTH) * 0.02).bfloat16().requires_grad_()
    seconds = [one_pass(gate_up, down, seed) for seed in range(PASSES)][WARMUP:]
    heap = heap_bytes()
    held = "unknown" if heap is None else f"{heap.allocated_bytes / 2**20:,.0f} MiB"
    print(
        f"{how:8} {statistics.median(seconds):6.3f} s of processor a pass, heap {held}", flush=True
    )


def main() -> int:
    """Measure both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--how", choices=("default", "limited"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.how is not None:
        measure(arguments.how)
        return 0
    for _ in range(arguments.rounds):
        for how in ("default", "limited"):
            subprocess.run([sys.executable, __file__, "--how", how], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
