"""What tensors of a checkpoint are to a model: its own, or parts that transformers' rules join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swaptrain.errors import ConfigError
from swaptrain.models.factory import described
from swaptrain.models.stored.checkpoint import Checkpoint, StoredTensor
from swaptrain.models.stored.own_names import listed

__all__ = ["StoredForm", "StoredForms", "find_forms"]


@dataclass(frozen=True)
class StoredForm:
    """How tensors of the model are made of tensors of the checkpoint: of one, or of several."""

    target: str
    """The first tensor of the model that is made."""
    converter: Any
    """transformers' WeightConverter; None: the checkpoint's tensor is the model's."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Of each tensor of the checkpoint the name, and the converter's pattern that found it."""

    @property
    def source(self) -> str:
        """Return the name of the checkpoint's first tensor."""
        return self.sources[0][0]

    def made(
        self, module: nn.Module, checkpoint: Checkpoint, read: Callable[[str], torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the model that come of what `read` gives.

        Raises ConfigError where transformers cannot make them.
        """
        if self.converter is None:
            return {self.target: read(self.source)}
        converter = deepcopy(self.converter)
        for source, pattern in self.sources:
            converter.add_tensor(self.target, source, pattern, read(source))
        try:
            made = converter.convert(self.target, model=module, config=module.config)
        except Exception as error:  # transformers' operations on tensors of any shape
            raise ConfigError(
                f"model.hf: {self.target} cannot be made of {listed(s for s, _ in self.sources)} "
                f"of {checkpoint.directory}: {described(error)}"
            ) from error
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def by_expert(
        self, place: torch.Tensor, tensors: Mapping[str, StoredTensor]
    ) -> list[list[str]] | None:
        """Return by expert the sources of a stack that is put together of experts; else None."""
        if self.converter is None or place.dim() != 3:
            return None
        found = _sources_by_expert(self.converter, self.sources, place.shape[0])
        for names in found or ():
            shapes = [tensors[name].shape for name in names]
            if any(shape[1:] != place.shape[2:] for shape in shapes):
                return None
            if sum(shape[0] for shape in shapes) != place.shape[1]:
                return None
        return found

    def made_bytes(self, tensors: Mapping[str, StoredTensor]) -> int:
        """Return how many bytes it takes to make the model's tensors all at once."""
        parts = [tensors[source] for source, _ in self.sources]
        in_files = sum(part.nbytes for part in parts)
        if self.converter is None:
            return in_files
        # What was read, in the model's dtype, and what it is put together to.
        return in_files + 2 * sum(4 * part.numel for part in parts)


@dataclass
class StoredForms:
    """What a checkpoint's tensors are for."""

    forms: dict[str, StoredForm] = field(default_factory=dict)
    """By the names of the tensors of the model."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of the tensors that the forms make, by the same names."""
    unused: list[str] = field(default_factory=list)
    """The checkpoint's names of what the model has no place for, or has from another tensor."""
    only_stored: list[str] = field(default_factory=list)
    """The checkpoint's names of what the model has no place for."""


def find_forms(module: nn.Module, checkpoint: Checkpoint, places: Mapping[str, Any]) -> StoredForms:
    """Find what each tensor of a checkpoint is for in a model of transformers.

    As transformers does when it loads them (`convert_and_load_state_dict_in_model`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(module)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = module.base_model_prefix
    forms: dict[str, StoredForm] = {}
    found = StoredForms()
    for source in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, prefix, places)
        if target not in places and source in places:
            target, pattern = source, None
        converter = by_pattern.get(pattern)
        if target not in places:
            found.only_stored.append(source)
        if target not in places or (converter is None and target in forms):
            found.unused.append(source)
            continue
        form = forms.setdefault(target, StoredForm(target, converter))
        form.sources.append((source, pattern or source))

    def empty(source: str) -> torch.Tensor:
        return torch.empty(checkpoint.tensors[source].shape, device="meta")

    for form in forms.values():
        made = form.made(module, checkpoint, empty)
        for name in made.keys() & places.keys():
            found.forms[name] = form
            found.shapes[name] = made[name].shape
    return found


def _sources_by_expert(
    converter: Any, sources: Sequence[tuple[str, str]], experts: int
) -> list[list[str]] | None:
    """Return for each expert of a stack the tensors that lie below each other in its matrix.

    `converter` is transformers' WeightConverter, `sources` the checkpoint's names and the patterns
    that found them, in order. None where it does not stack experts, or does more than that.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    stacks, *others = converter.operations
    if type(stacks) is not MergeModulelist or stacks.dim != 0 or len(others) > 1:
        return None
    if any(type(each) is not Concatenate or each.dim != 1 for each in others):
        return None
    by_pattern = [
        [source for source, pattern in sources if pattern == own]
        for own in converter.source_patterns
    ]
    if any(len(found) != experts for found in by_pattern):
        return None
    return [list(each) for each in zip(*by_pattern, strict=True)]
