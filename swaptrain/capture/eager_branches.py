"""Makes a model take, while it is exported, the branches that it takes when it runs eagerly."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from swaptrain.errors import CaptureError

__all__ = [
    "broadcast_masks",
    "eager_branches",
    "explicit_masks",
    "inlined_checkpoints",
    "refused_functions",
]


@contextlib.contextmanager
def eager_branches(batch_keys: Collection[str]) -> Iterator[None]:
    """Answer "not compiling, not exporting" to the model's own questions.

    transformers chooses other kernels while exporting: an explicit mask instead of a causal
    attention, other implementations of experts. Their last bits differ from the eager model's, and
    the mask costs memory. Where the batch brings no positions, no sequences are packed, which
    transformers finds out by looking at values that an export does not have.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (torch.compiler, "is_exporting", _false),
        (torch.compiler, "is_compiling", _false),
    ]
    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None and "position_ids" not in batch_keys:
        replacements.append((masking, "find_packed_sequence_indices", _nothing_packed))
    experts: Any = sys.modules.get("transformers.integrations.moe")
    if hasattr(experts, "_can_use_grouped_mm"):
        can_use = _with_a_fake_kernel(experts._can_use_grouped_mm)
        replacements.append((experts, "_can_use_grouped_mm", can_use))
    with contextlib.ExitStack() as stack:
        for owner, name, function in replacements:
            if hasattr(owner, name):
                stack.enter_context(_replaced([(owner, name)], function))
        yield


@contextlib.contextmanager
def explicit_masks() -> Iterator[None]:
    """Have transformers make its attention masks without asking whether the batch is padded.

    Where values of a batch can be asked for, the answer would hold for every micro-batch.
    """
    masking = sys.modules.get("transformers.masking_utils")
    owners = [(masking, "is_tracing")] if hasattr(masking, "is_tracing") else []
    with _replaced(owners, _true):
        yield


@contextlib.contextmanager
def broadcast_masks() -> Iterator[None]:
    """Have transformers make every attention mask by broadcasting indices, never by vmap.

    Its masks are functions of indices. Both ways give the same booleans, and a graph can hold one.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    names = ("_vmap_expansion_sdpa", "_non_vmap_expansion_sdpa")
    if masking is None or not all(hasattr(masking, name) for name in names):
        yield
        return
    expand = masking._non_vmap_expansion_sdpa

    def broadcast(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        def masked(*indices: Any) -> Any:
            sizes = [len(index) for index in indices]
            return mask_function(*expand(*indices)).expand(sizes)

        return masked

    with _replaced([(masking, names[0])], broadcast):
        yield


@contextlib.contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Replace torch's activation checkpointing by a plain call while exporting.

    Reentrant checkpointing is captured as a region without gradients, which loses them silently.
    swaptrain recomputes by segment anyway.
    """
    original = torch.utils.checkpoint.checkpoint
    bindings = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]
    with _replaced(bindings, _plain_call):
        yield


@contextlib.contextmanager
def refused_functions() -> Iterator[None]:
    """Refuse custom autograd functions while exporting: a graph has no place for their backward.

    Export inlines their forward, and autograd would differentiate that instead: other last bits at
    best, another gradient (straight-through estimators, gradient reversal) without a word at worst.
    """
    original = torch.autograd.Function.apply

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return original.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
        raise CaptureError(
            f"the model uses the custom autograd function {cls.__module__}.{cls.__qualname__}, and "
            "a captured graph would lose its backward: write its forward with torch operations "
            "that autograd differentiates as you mean it"
        )

    with _replaced([(torch.autograd.Function, "apply")], classmethod(apply)):
        yield


@contextlib.contextmanager
def _replaced(bindings: list[tuple[Any, str]], function: Any) -> Iterator[None]:
    originals = [vars(owner)[name] for owner, name in bindings]
    for owner, name in bindings:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), original in zip(bindings, originals, strict=True):
            setattr(owner, name, original)


_CHECKPOINT_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
)  # fmt: skip


def _plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for option in _CHECKPOINT_OPTIONS:
        kwargs.pop(option, None)
    return function(*args, **kwargs)


def _false() -> bool:
    return False


def _true(*_: object) -> bool:
    return True


def _with_a_fake_kernel(can_use: Callable[..., bool]) -> Callable[..., bool]:
    """Say that torch's grouped product is of no use in float32: fake tensors have none.

    The product that transformers puts in its place gives the same bits on most processors, and all
    else of the model keeps its eager branches.
    """

    def answer(product: torch.Tensor, weight: torch.Tensor, *more: Any, **named: Any) -> bool:
        return weight.dtype == torch.bfloat16 and can_use(product, weight, *more, **named)

    return answer


def _nothing_packed(position_ids: object) -> None:
    """Say that no sequences are packed, whatever the positions are."""
