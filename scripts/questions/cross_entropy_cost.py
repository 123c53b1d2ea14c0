"""Seconds and memory of a language model's last layer and its loss, in several ways, in turns.

python scripts/questions/cross_entropy_cost.py [--words N] [--tokens N] [--ignored PART]

Plain: PyTorch's linear, a cast to float32, cross_entropy. By rows: what swaptrain puts in the place
of the last two. Rows that count: with train.skip_ignored, which has other bits where some do not.
The others: torch's linear_cross_entropy, which has other bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swaptrain.capture.head.cross_entropy import cross_entropy
from swaptrain.capture.head.trained_rows import trained_rows
from swaptrain.memory.malloc import retain, tune
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.units import MIB

HIDDEN, ROUNDS = 1024, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ignored", type=float, default=0.0, help="part of the targets")
    parser.add_argument(
        "--tuned", action="store_true", help="let malloc keep its memory, as while a run computes"
    )
    options = parser.parse_args()
    if options.tuned:
        tune()
        retain()
    torch.manual_seed(0)
    weight = (torch.randn(options.words, HIDDEN) * 0.02).bfloat16().requires_grad_()
    x = torch.randn(options.tokens, HIDDEN).bfloat16()
    targets = torch.randint(options.words, (options.tokens,))
    targets[torch.rand(options.tokens) < options.ignored] = -100
    shape = (options.tokens, options.words)

    def by_rows(value: Tensor) -> Tensor:
        logits = F.linear(value, weight)
        return cross_entropy(logits, targets, 1, -100, shape=shape, dtype=torch.float32)

    def rows_that_count(value: Tensor) -> Tensor:
        rows = trained_rows(targets, -100)
        logits, own = F.linear(value.index_select(0, rows), weight), targets.index_select(0, rows)
        return cross_entropy(logits, own, 1, -100, shape=(None, options.words), dtype=torch.float32)

    def torchs(**chosen: object) -> Callable[[Tensor], Tensor]:
        choice = torch.nn.LinearCrossEntropyOptions(**chosen)
        return lambda v: F.linear_cross_entropy(v, weight, targets, options=choice)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda v: F.cross_entropy(F.linear(v, weight).float(), targets),
        "by rows": by_rows,
        "rows that count": rows_that_count,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13
        ways["linear_cross_entropy"] = lambda v: F.linear_cross_entropy(v, weight, targets)
        ways["chunked, accurate"] = torchs(batch_chunk_size=128, acc_policy="accurate")
        ways["chunked, compact"] = torchs(batch_chunk_size=256, acc_policy="compact")
        ways["chunked, automatic"] = torchs()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    added, losses, same = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0), {}
    first: tuple[Tensor, Tensor] | None = None
    for round_ in range(ROUNDS):
        for name, loss_of in ways.items():
            value = x.clone().requires_grad_()
            before = resident_bytes()
            reset_peak()
            begun = time.perf_counter()
            loss = loss_of(value)
            loss.backward()  # type: ignore[no-untyped-call]
            if round_:
                taken[name].append(time.perf_counter() - begun)
            added[name] = max(added[name], peak_resident_bytes() - before)
            assert value.grad is not None and weight.grad is not None
            losses[name], found = loss.item(), (value.grad, weight.grad)
            first = first or found
            same[name] = all(map(torch.equal, first, found))
            weight.grad = None
    for name, seconds in taken.items():
        print(
            f"{name:22} {statistics.median(seconds):.3f} s, {added[name] / MIB:.0f} MiB more, "
            f"loss {losses[name]:.4f}, gradients {'as' if same[name] else 'not as'} plain"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
