"""Digests that tell whether a captured model is the one that a store was made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import xxhash

from swaptrain.capture.guards.trial import held_tensors
from swaptrain.capture.trace import bodies, resolve_attribute

if TYPE_CHECKING:
    from swaptrain.capture.uncut import Uncut

__all__ = ["content_digest", "cut_fingerprint"]


def cut_fingerprint(uncut: Uncut, cuts: list[int]) -> str:
    """Digest the operations, their arguments, every layout, and the cut."""
    return xxhash.xxh3_128_hexdigest("\n".join([f"cuts {cuts}", *_lines(uncut)]).encode())


def content_digest(uncut: Uncut) -> str:
    """Digest the operations, their arguments, every layout, and the values of all constants.

    Those that hooks of parameters hold are among them.

    Two captures with the same digest train the same, whatever numbers their constructors drew.
    """
    digest = xxhash.xxh3_128("\n".join(_lines(uncut)).encode())
    for binding in uncut.origins.values():
        if binding.kind == "constant":
            digest.update(binding.name.encode())
            digest.update(_bytes(resolve_attribute(uncut.captured, binding.name)))
    for tensor in held_tensors(uncut.hooks):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor of any layout, in row-major order."""
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    found: memoryview = dense.flatten().view(torch.uint8).numpy().data
    return found


def _lines(uncut: Uncut) -> Iterator[str]:
    for p in uncut.parameters.values():
        form = "" if p.quantized is None else f" {p.quantized}"
        yield f"{p.tensor} {p.master} {p.trainable}{form}"
    for node in uncut.captured.graph.nodes:
        layouts = [
            f"{t.dtype}{tuple(t.shape)}{t.stride()}"
            for t in (uncut.trace.facts[node].tensors if node in uncut.trace.facts else ())
        ]
        yield f"{node.op} {node.target} {node.args} {node.kwargs} {layouts}"
        yield from (f"body {body.code}" for body, _ in bodies(node))
