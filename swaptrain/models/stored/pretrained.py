"""Initial weights that a checkpoint gives, found by transformers' rules or the module's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.errors import ConfigError
from swaptrain.models.adapters.refused import refuse_adapter_tensors
from swaptrain.models.stored.checkpoint import Checkpoint
from swaptrain.models.stored.forms import StoredForm, StoredForms, find_forms
from swaptrain.models.stored.own_names import OwnNames, listed
from swaptrain.program.row_ranges import RowRange
from swaptrain.units import how_many

__all__ = ["Block", "Pretrained"]

_BLOCK = 1 << 20
"""Elements that are compared at a time."""
_OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints hold and models compute; transformers passes them over too."""


Block = tuple[slice | tuple[int, slice] | EllipsisType, torch.Tensor]
"""Which rows, of all of them, or of one expert of a stack, and their value."""


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
        self.remarks: list[str] = []
        """What a user should know of what the checkpoint has and has not."""
        if own_names is None:
            found = find_forms(self.module, checkpoint, self._places)
            self._check_unused(found.unused)
        else:
            found = self._by_own_names(own_names)
        self._forms, self._shapes = found.forms, found.shapes
        self.only_stored = found.only_stored
        """What the checkpoint has and the model has no place for, by the checkpoint's names.

        Not what it has twice: one of the two is the model's."""
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
        own = self.names_once
        others = {
            alias: source for name, source in own.items() for alias in self._aliases.get(name, [])
        }
        return others | own

    @property
    def names_once(self) -> dict[str, str]:
        """The same, of a tied weight by the name alone under which the checkpoint has it."""
        return {n: f.source for n, f in self._forms.items() if f.converter is None}

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
                source = form.source
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
            return form.made_bytes(self._checkpoint.tensors)
        sources = [form.source] if by_expert is None else by_expert[own.first if own else 0]
        return max(self._checkpoint.block_bytes(source) for source in sources)

    def _by_own_names(self, own_names: OwnNames) -> StoredForms:
        names, remarks = own_names.find(self._places, self._checkpoint)
        self.remarks += remarks
        found = StoredForms()
        for name, source in names.items():
            found.forms[name] = StoredForm(name, None, [(source, source)])
            found.shapes[name] = torch.Size(self._checkpoint.tensors[source].shape)
        return found

    def _by_expert(self, stored: str) -> list[list[str]] | None:
        return self._forms[stored].by_expert(self._places[stored], self._checkpoint.tensors)

    def _stored(self, name: str) -> torch.Tensor:
        """Return the checkpoint's value of a tensor of the model."""
        form = self._forms[name]
        if form.converter is None:  # takes the model's dtype while it is copied
            return self._checkpoint.read(form.source)
        dtype = self._dtypes[name]

        def read(source: str) -> torch.Tensor:
            return self._checkpoint.read(source).to(dtype)

        return form.made(self.module, self._checkpoint, read)[name]

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
