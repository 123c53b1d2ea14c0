"""Which parameters compute in a lower precision than their masters."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from swaptrain.capture.guards.hooks import put_hooks

__all__ = ["kept_in_float32", "lower_parameters"]


def kept_in_float32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that the model keeps in float32 in every run.

    transformers' convention: a module lists in `_keep_in_fp32_modules` and
    `_keep_in_fp32_modules_strict` parts of dotted names. Batch norms keep theirs too: buffers keep
    their dtype, and torch refuses bfloat16 weights beside float32 running statistics on a CPU.
    """
    kept = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            kept |= {name for name, _ in module.named_parameters(prefix=prefix, recurse=False)}
        listed = {
            part
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for part in getattr(module, attribute, None) or ()
        }
        if not listed:
            continue
        for name, _ in module.named_parameters(prefix=prefix):
            inner = name.removeprefix(f"{prefix}.") if prefix else name
            if any(f".{part}." in f".{inner}." for part in listed):
                kept.add(name)
    return frozenset(kept)


def lower_parameters(module: nn.Module, fake_mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace fake float32 parameters by fakes of `dtype`, except those kept in float32.

    Tied parameters stay tied; flags and parameter attributes are kept; buffers keep their dtype.
    Strides are kept too, but for those with holes: as with `Tensor.to`, the copy has none.
    """
    kept = kept_in_float32(module)
    lowered: dict[int, nn.Parameter] = {}
    with fake_mode:
        for name, parameter in module.named_parameters():
            if parameter.dtype is torch.float32 and name not in kept:
                fake = torch.empty_like(parameter, dtype=dtype)
                lowered[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                put_hooks(parameter, lowered[id(parameter)])
    for submodule in module.modules():
        for name, entry in list(submodule._parameters.items()):
            if entry is not None and id(entry) in lowered:
                submodule._parameters[name] = lowered[id(entry)]
