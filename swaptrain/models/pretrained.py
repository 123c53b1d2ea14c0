"""Initial weights that a checkpoint gives, found by transformers' rules or the module's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.errors import ConfigError
from swaptrain.models.adapters import refuse_adapter_tensors
from swaptrain.models.checkpoint import Checkpoint
from swaptrain.models.factory import described
from swaptrain.models.own_names import OwnNames, listed
from swaptrain.program.row_ranges import RowRange
from swaptrain.units import how_many

__all__ = ["Block", "Pretrained"]

_BLOCK = 1 << 20
"""Elements that are compared at a time."""
_OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints hold and models compute; transformers passes them over too."""


Block = tuple[slice | tuple[int, slice] | EllipsisType, torch.Tensor]
"""Which rows, of all of them, or of one expert of a stack, and their value."""


@dataclass(frozen=True)
class _Form:
    """How tensors of the model are made of tensors of the checkpoint: of one, or of several."""

    target: str
    """The first tensor of the model that is made."""
    converter: Any
    """transformers' WeightConverter; None: the checkpoint's tensor is the model's."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Of each tensor of the checkpoint the name, and the converter's pattern that found it."""


class Pretrained:
    """The weights that a checkpoint has of a model, by the model's names.

    Of a model of transformers they are bit for bit those of `from_pretrained(directory,
    dtype=torch.float32)`: stored names and forms of older versions are converted by transformers'
    own rules. What only the checkpoint has is left out, and a head that it has not keeps the
    constructor's values. Of any other module `own_names` finds them, each as it is stored.

    Raises ConfigError where a weight of the model's body is missing, or a shape is another.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Checkpoint, own_names: OwnNames | None = None
    ) -> None:
        self.module = module
        self._checkpoint = checkpoint
        self.origin = checkpoint.origin
        self._places: dict[str, torch.Tensor] = self.module.state_dict(keep_vars=True)
        # As the constructor gave them: the module's take another dtype to be computed with.
        self._parameters = {
            name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }
        self._dtypes = {name: place.dtype for name, place in self._places.items()}
        self._aliases = _aliases(self.module)
        self._forms: dict[str, _Form] = {}
        self._shapes: dict[str, torch.Size] = {}
        self.remarks: list[str] = []
        """What a user should know of what the checkpoint has and has not."""
        self.only_stored: list[str] = []
        """What the checkpoint has and the model has no place for, by the checkpoint's names.

        Not what it has twice: one of the two is the model's."""
        if own_names is None:
            self._check_unused(self._find_forms())
        else:
            self._take_forms(own_names)
        self._check_found()
        self.missing = [
            name
            for name in self._places
            if not any(alias in self._forms for alias in self._aliases.get(name, [name]))
        ]
        """What the checkpoint has not, by the model's names."""
        if own_names is None:
            self._check_missing()

    def load(self) -> None:
        """Let the module's buffers take the stored values, before it is captured.

        Raises ConfigError where two names of one tied weight hold different values.
        """
        self._check_tied()
        with torch.no_grad():
            for name in self._forms.keys() - self._parameters.keys():
                stored, place = self._stored(name), self._places[name]
                if self.module.get_buffer(name) is not place and stored.any():
                    raise ConfigError(
                        f"model.resize_to_tokenizer: it makes the buffer {name} anew, and that of "
                        "the checkpoint is not zero: resize the checkpoint with transformers first"
                    )
                place.copy_(stored)

    @property
    def stored_names(self) -> dict[str, str]:
        """The checkpoint's names of what it has as the model does, by the model's names.

        Of a tied weight by each of these.
        """
        own = {n: f.sources[0][0] for n, f in self._forms.items() if f.converter is None}
        others = {
            alias: source for name, source in own.items() for alias in self._aliases.get(name, [])
        }
        return others | own

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a parameter, by any of its names."""
        return any(alias in self._forms for alias in self._aliases[name])

    def _stored_name(self, name: str) -> str:
        return next(alias for alias in self._aliases[name] if alias in self._forms)

    def values(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return what gives the value of each parameter that the checkpoint has."""
        names = (name for name, _ in self.module.named_parameters())
        return {name: partial(self.value, name) for name in names if self.has(name)}

    def value(self, name: str, own: RowRange | None = None) -> torch.Tensor:
        """Return the value of a parameter that it `has`, a new real tensor; of `own` experts alone.

        Raises ConfigError where the checkpoint cannot be read, or has changed since it was opened.
        """
        like = self._parameters[name]
        with _disable_current_modes():
            if own is not None:
                result = torch.empty((own.count, *like.shape[1:]), dtype=like.dtype)
            else:
                result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.fill(name, result, own)
        return result

    def fill(self, name: str, target: torch.Tensor, own: RowRange | None = None) -> None:
        """Copy the value of a parameter to a tensor of its shape, block by block.

        Bits of `value`, rounded to the target's dtype. Raises as `value` does.
        """
        with _disable_current_modes(), torch.no_grad():
            for rows, block in self.blocks(name, own):
                target[rows] = block

    def blocks(self, name: str, own: RowRange | None = None) -> Iterator[Block]:
        """Yield the value of a parameter a few rows at a time, as they are stored.

        Of `own` experts alone, whose first one is row 0. What is put together of several tensors
        comes so where these are stacked experts, else all at once. Raises as `value` does.
        """
        stored, shape = self._stored_name(name), self._parameters[name].shape
        form, by_expert = self._forms[stored], self._by_expert(stored)
        first, end = (own.first, own.end) if own is not None else (0, shape[0] if shape else 0)
        with _disable_current_modes(), torch.no_grad():
            if form.converter is None and shape:
                source = form.sources[0][0]
                for begin, last in self._checkpoint.row_blocks(source, first, end):
                    block = self._checkpoint.read_rows(source, begin, last)
                    yield slice(begin - first, last - first), block
            elif by_expert is not None:
                for expert in range(first, end):
                    above = 0
                    for source in by_expert[expert]:
                        for begin, last in self._checkpoint.row_blocks(source):
                            block = self._checkpoint.read_rows(source, begin, last)
                            yield (expert - first, slice(above + begin, above + last)), block
                        above += self._checkpoint.tensors[source].shape[0]
            else:
                whole = self._stored(stored)
                yield ..., whole if own is None else whole[first:end]

    def block_bytes(self, name: str, own: RowRange | None = None) -> int:
        """Return how many bytes it takes to make a block: as stored, copies, a float32 one."""
        stored = self._stored_name(name)
        form = self._forms[stored]
        by_expert = self._by_expert(stored)
        if by_expert is None and (form.converter is not None or not self._parameters[name].dim()):
            return self._form_bytes(form)
        sources = [form.sources[0][0]] if by_expert is None else by_expert[own.first if own else 0]
        return max(self._checkpoint.block_bytes(source) for source in sources)

    def _by_expert(self, stored: str) -> list[list[str]] | None:
        """Return by expert the sources of a stack that is put together of experts; else None."""
        form, place = self._forms[stored], self._places[stored]
        if form.converter is None or place.dim() != 3:
            return None
        found = _sources_by_expert(form.converter, form.sources, place.shape[0])
        for names in found or ():
            shapes = [self._checkpoint.tensors[name].shape for name in names]
            if any(shape[1:] != place.shape[2:] for shape in shapes):
                return None
            if sum(shape[0] for shape in shapes) != place.shape[1]:
                return None
        return found

    def _form_bytes(self, form: _Form) -> int:
        parts = [self._checkpoint.tensors[source] for source, _ in form.sources]
        in_files = sum(part.nbytes for part in parts)
        if form.converter is None:
            return in_files
        # What was read, in the model's dtype, and what it is put together to.
        return in_files + 2 * sum(4 * part.numel for part in parts)

    def _take_forms(self, own_names: OwnNames) -> None:
        found, remarks = own_names.find(self._places, self._checkpoint)
        self.remarks += remarks
        for name, source in found.items():
            self._forms[name] = _Form(name, None, [(source, source)])
            self._shapes[name] = torch.Size(self._checkpoint.tensors[source].shape)

    def _find_forms(self) -> list[str]:
        """Find what each tensor of the checkpoint is for; return the names of those that are not.

        As transformers does when it loads them (`convert_and_load_state_dict_in_model`).
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(self.module)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, places = self.module.base_model_prefix, self._places
        forms: dict[str, _Form] = {}
        unused = []
        for source in sorted(self._checkpoint.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(source, renamings, converters, prefix, places)
            if target not in places and source in places:
                target, pattern = source, None
            converter = by_pattern.get(pattern)
            if target not in places:
                self.only_stored.append(source)
            if target not in places or (converter is None and target in forms):
                unused.append(source)
                continue
            form = forms.setdefault(target, _Form(target, converter))
            form.sources.append((source, pattern or source))
        for form in forms.values():
            made = self._made(form, self._meta)
            for name in made.keys() & places.keys():
                self._forms[name] = form
                self._shapes[name] = made[name].shape
        return unused

    def _made(self, form: _Form, read: Callable[[str], torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the model that a form makes of what `read` gives."""
        if form.converter is None:
            return {form.target: read(form.sources[0][0])}
        converter = deepcopy(form.converter)
        for source, pattern in form.sources:
            converter.add_tensor(form.target, source, pattern, read(source))
        try:
            made = converter.convert(form.target, model=self.module, config=self.module.config)
        except Exception as error:  # transformers' operations on tensors of any shape
            raise ConfigError(
                f"model.hf: {form.target} cannot be made of {listed(s for s, _ in form.sources)} "
                f"of {self._checkpoint.directory}: {described(error)}"
            ) from error
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def _meta(self, source: str) -> torch.Tensor:
        return torch.empty(self._checkpoint.tensors[source].shape, device="meta")

    def _stored(self, name: str) -> torch.Tensor:
        """Return the checkpoint's value of a tensor of the model."""
        form = self._forms[name]
        if form.converter is None:  # takes the model's dtype while it is copied
            return self._checkpoint.read(form.sources[0][0])
        dtype = self._dtypes[name]
        return self._made(form, lambda source: self._checkpoint.read(source).to(dtype))[name]

    def _check_found(self) -> None:
        """Refuse shapes and kinds of numbers that are not the model's."""
        for name, form in self._forms.items():
            place, directory = self._places[name], self._checkpoint.directory
            if place.shape != self._shapes[name]:
                raise ConfigError(
                    f"model.hf: {name} has the shape {tuple(self._shapes[name])} in {directory} "
                    f"and {tuple(place.shape)} in the model that its config.json describes"
                )
            for source, _ in form.sources:
                stored = self._checkpoint.tensors[source]
                if place.is_floating_point() and not stored.is_floating:
                    raise ConfigError(
                        f"{self._checkpoint.key}: {source} of {directory} is stored in "
                        f"{stored.dtype}: swaptrain trains weights of 16 bits and more; convert "
                        "the checkpoint first"
                    )

    def _check_missing(self) -> None:
        """Refuse a checkpoint that lacks weights of the model's body; say what else it lacks."""
        module: Any = self.module
        directory = self._checkpoint.directory
        ignored = module._keys_to_ignore_on_load_missing or ()
        missing = [
            name
            for name in self.missing
            if not any(re.search(pattern, name) for pattern in ignored)
        ]
        prefix = module.base_model_prefix
        body = f"{prefix}." if prefix and hasattr(module, prefix) else ""
        lost = [
            name
            for name in missing
            if name.startswith(body) and name in self._parameters and ".pooler." not in name
        ]
        if lost:
            raise ConfigError(
                f"model.hf: {directory} lacks {len(lost)} of the "
                f"{how_many(len(self._places), 'tensor')} of {type(module).__name__}: "
                f"{listed(lost)}; it is another model's, or not whole. If it is meant to "
                "begin so, load it with transformers and save it again (save_pretrained)"
            )
        if missing:
            self.remarks.append(
                f"{directory} has no {listed(missing)}: they begin as the constructor makes them"
            )

    def _check_unused(self, unused: list[str]) -> None:
        """Say what the checkpoint has and the model does not, but what transformers ignores."""
        refuse_adapter_tensors(self._checkpoint.directory, unused)
        module: Any = self.module
        ignored = [*(module._keys_to_ignore_on_load_unexpected or ()), *_OUTDATED]
        unused = [u for u in unused if not any(re.search(pattern, u) for pattern in ignored)]
        if unused:
            self.remarks.append(
                f"{self._checkpoint.directory} holds what {type(self.module).__name__} has no "
                f"place for, or twice: {listed(unused)}"
            )

    def _check_tied(self) -> None:
        """Refuse two stored values of what the config says is one weight."""
        for aliases in {id(names): names for names in self._aliases.values()}.values():
            first, *others = [alias for alias in aliases if alias in self._forms] or [""]
            for other in others:
                if not _same(self._stored(first), self._stored(other)):
                    by, cure = "the model", "take one of them out of it"
                    if self._checkpoint.key == "model.hf":
                        by, cure = "its config.json", "set tie_word_embeddings to false there"
                    raise ConfigError(
                        f"{self._checkpoint.key}: {self._checkpoint.directory} holds different "
                        f"values of {first} and {other}, which {by} ties to one: {cure}"
                    )


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of a shape hold the same numbers, NaN among them; by blocks."""
    left, right = left.flatten(), right.flatten()
    for begin in range(0, len(left), _BLOCK):
        a, b = left[begin : begin + _BLOCK], right[begin : begin + _BLOCK]
        if not ((a == b) | (a.isnan() & b.isnan())).all():
            return False
    return True


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter, itself among them, by each of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


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
