"""`model.base`: which of the weights that never change are stored as codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from swaptrain.capture.init.construct import Values
from swaptrain.capture.precision import kept_in_float32
from swaptrain.config.model import ModelConfig
from swaptrain.errors import ConfigError
from swaptrain.models.freeze import nearest
from swaptrain.models.quantization import rounded
from swaptrain.program.model import ParameterSpec
from swaptrain.program.quantized import QuantizedAs
from swaptrain.program.tensors import contiguous

__all__ = ["QuantizedBase", "quantizable", "refused_weight", "round_weights"]

_LEAST_ROW = 8
"""Numbers of a row: with int8 one of 4 takes, with its scale, what it takes in 16 bits."""


class QuantizedBase:
    """What `model.base` does to the weights of one module."""

    def __init__(self, config: ModelConfig, *, is_whole: bool) -> None:
        """Where the model is not whole, globs of `model.base_except` may match nothing."""
        self._form, self._globs = config.base, config.base_except or ()
        self._dtype, self._is_whole = getattr(torch, config.dtype), is_whole
        self._names: frozenset[str] = frozenset()
        """By the names of the module without adapters."""
        self._float32: Collection[str] = ()
        """Names of what the model computes with in float32 whatever the dtype."""

    def look_at(self, module: nn.Module) -> None:
        """Find the weights that it may apply to, in a module that has no adapters yet."""
        if self._form is not None:
            self._names = quantizable(
                module, self._globs, form=self._form, all_match=self._is_whole
            )
            self._float32 = kept_in_float32(module)

    def as_seen(self, values: Values) -> Values:
        """Return what gives each weight of a checkpoint as the model will compute with it."""
        form = self._form
        if form is None:
            return values

        def seen(name: str, value: Callable[[], Tensor]) -> Tensor:
            weight = value()
            dtype = weight.dtype if name in self._float32 else self._dtype
            with refused_weight(name):
                return rounded(weight.to(dtype), form).to(weight.dtype)

        return {n: partial(seen, n, v) if n in self._names else v for n, v in values.items()}

    def check_seen(
        self, adapter: Mapping[str, object] | None, missing: Collection[str] | None
    ) -> None:
        """Raise ConfigError where adapters would begin from weights that are not as seen later.

        That are weights which no checkpoint has: all (None), or those that are `missing` in it.
        """
        drawn = self._names if missing is None else self._names.intersection(missing)
        if self._form is not None and adapter and adapter.get("use_dora") and drawn:
            raise ConfigError(
                "lora.use_dora begins from the weights of the base, which model.base changes, and "
                f"the constructor draws {min(drawn)}: begin from a checkpoint that has it "
                "(model.hf), name it in model.base_except, or set model.base to null"
            )

    def quantized(
        self, module: nn.Module, parameters: Mapping[str, ParameterSpec], bases: Mapping[str, str]
    ) -> Mapping[str, ParameterSpec]:
        """Return the parameters of a captured module, those that are stored as codes marked.

        `bases` are the names without adapters, where there were others. Raises ConfigError where
        there are none.
        """
        form = self._form
        if form is None:
            return parameters
        frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
        chosen = {n for n in frozen & parameters.keys() if bases.get(n, n) in self._names}
        if not chosen:
            raise ConfigError(
                f"model.base is {form}, and no weight that it applies to is frozen: train an "
                "adapter (lora), freeze some (train.freeze), or set model.base to null"
            )
        return {n: replace(p, quantized=form) if n in chosen else p for n, p in parameters.items()}


def quantizable(
    module: nn.Module,
    except_: Sequence[str] = (),
    *,
    form: QuantizedAs = "nf4",
    all_match: bool = True,
) -> frozenset[str]:
    """Return the names of a module's weights that may be stored as codes.

    These are matrices, and stacks of them, in row-major order. The output head, embedding tables
    and tied weights are left as they are, as bitsandbytes leaves them, and what matches one of the
    globs `except_`; so is what is added to activations [1, ...], such as a table of positions, and
    with int8 a convolution whose rows are so short that a scale for each makes it no smaller. With
    `all_match` False a glob may match nothing. Raises ConfigError for one that does otherwise.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    every = [name for group in names.values() for name in group]
    for pattern in except_:
        if all_match and not any(fnmatchcase(name, pattern) for name in every):
            raise ConfigError(
                f"model.base_except: {pattern!r} matches no parameter; {nearest(pattern, every)}"
            )
    kept = {id(table.weight) for table in module.modules() if isinstance(table, nn.Embedding)}
    kept.update(map(id, _head(module).parameters(recurse=False)))
    return frozenset(
        name
        for name, parameter in module.named_parameters()
        if id(parameter) not in kept
        and len(names[id(parameter)]) == 1
        and parameter.is_floating_point()
        and parameter.ndim >= 2
        and parameter.shape[0] > 1
        and (form != "int8" or parameter.shape[-1] >= _LEAST_ROW)
        and parameter.numel()
        and parameter.stride() == contiguous(tuple(parameter.shape))
        and not any(fnmatchcase(name, pattern) for pattern in except_)
    )


@contextmanager
def refused_weight(name: str) -> Iterator[None]:
    """Turn the ValueError of a weight that cannot be coded into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"model.base: {name} holds numbers that are not finite: mend the checkpoint, or keep "
            f"the weight as it is (model.base_except: [{name!r}])"
        ) from error


def round_weights(
    module: nn.Module, names: Collection[str], form: QuantizedAs, dtype: torch.dtype
) -> None:
    """Replace weights of a real module by what is left of them once they were coded in `dtype`.

    What the model computes with in float32 whatever the dtype is coded as it is.
    """
    kept = kept_in_float32(module)
    with torch.no_grad():
        for name in names:
            weight = module.get_parameter(name)
            weight.copy_(rounded(weight if name in kept else weight.to(dtype), form))


def _head(module: nn.Module) -> nn.Module:
    """Return what makes the outputs: by transformers' word, or the last module with a matrix."""
    if callable(find := getattr(module, "get_output_embeddings", None)):
        head = find()
        if isinstance(head, nn.Module):
            return head
    last = module
    for part in module.modules():
        if any(parameter.ndim >= 2 for parameter in part.parameters(recurse=False)):
            last = part
    return last
