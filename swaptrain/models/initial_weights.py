"""Initial weights of a model: from a checkpoint, an adapter's file, or else its constructor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swaptrain.capture.init.construct import Construction
from swaptrain.models.adapters.files import AdapterFiles
from swaptrain.models.stored.pretrained import Block, Pretrained
from swaptrain.program.row_ranges import RowRange, range_of

__all__ = ["InitialWeights"]


class InitialWeights:
    """Gives each initial weight of a model that is constructed, on demand."""

    def __init__(
        self,
        construction: Construction,
        pretrained: Pretrained | None = None,
        adapter: AdapterFiles | None = None,
    ) -> None:
        self.construction, self.module = construction, construction.module
        self._pretrained, self._adapter = pretrained, adapter
        named = self.module.named_parameters(remove_duplicate=False)
        self._parameters = frozenset(name for name, _ in named)
        self._drawn: tuple[str, torch.Tensor] | None = None
        """The stack of experts whose range was asked for last: the next range is of it, mostly."""

    @property
    def missing(self) -> Sequence[str]:
        """What the checkpoint has not, by the names of the model as it was constructed."""
        return () if self._pretrained is None else self._pretrained.missing

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Where they come from; None: from the constructor and the seed."""
        base = None if self._pretrained is None else self._pretrained.origin
        if self._adapter is None:
            return base
        return {**(base or self._adapter.origin), "adapter": self._adapter.origin}

    def value(self, name: str) -> torch.Tensor:
        """Return the initial value of a parameter, a new real tensor.

        As `Construction.value` for what is in no file. The name may be that of a range of experts.
        Raises ConfigError where a file cannot be read, or has changed since it was opened.
        """
        whole, own = self._place(name)
        if self._drawn is not None and (own is None or self._drawn[0] != whole):
            self._drawn = None  # before another one is made: `value_bytes` counts one
        if self._pretrained is not None and (base := self._stored(whole)) is not None:
            return self._pretrained.value(base, own)
        if own is None:
            return self._made(whole)
        if self._drawn is None:
            self._drawn = whole, self._made(whole)
        return self._drawn[1][own.first : own.end].clone()

    def _made(self, whole: str) -> torch.Tensor:
        if self._adapter is not None and whole in self._adapter.names:
            return self._adapter.value(whole)
        return self.construction.value(whole)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the initial value of a parameter to a tensor, which may have another dtype.

        What a checkpoint stores goes there block by block.
        """
        with torch.no_grad():
            for rows, block in self.blocks(name):
                target[rows] = block

    def blocks(self, name: str) -> Iterator[Block]:
        """Yield the initial value of a parameter by rows of its first dimension.

        All of them at once, where no checkpoint has them.
        """
        whole, own = self._place(name)
        base = self._stored(whole)
        if base is not None and self._pretrained is not None:
            yield from self._pretrained.blocks(base, own)
        else:
            yield ..., self.value(name)

    def block_bytes(self, name: str) -> int:
        """Return how many bytes it takes to make one of the `blocks`."""
        whole, own = self._place(name)
        base = self._stored(whole)
        if base is not None and self._pretrained is not None:
            return self._pretrained.block_bytes(base, own)
        return self.value_bytes(name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` needs: the result and copies."""
        whole, own = self._place(name)
        whole_bytes = size_bytes = self.construction.nbytes(whole)
        if own is not None:
            size_bytes = whole_bytes * own.count // self.module.get_parameter(whole).shape[0]
        if self._adapter is not None and whole in self._adapter.names:
            return size_bytes + self._adapter.largest_value_bytes()
        base = self._stored(whole)
        if base is not None and self._pretrained is not None:
            return size_bytes + self._pretrained.block_bytes(base, own)
        made_bytes = self.construction.value_bytes(whole)
        return size_bytes + made_bytes + (0 if own is None else whole_bytes)

    def _place(self, name: str) -> tuple[str, RowRange | None]:
        """Return the parameter that a name is of, and the experts of it."""
        own = self._range(name)
        return (name, None) if own is None else (own.whole, own)

    def _range(self, name: str) -> RowRange | None:
        """Return the range of experts that a name is of; None: a parameter has it."""
        if name in self._parameters:
            return None
        found = range_of(name)
        return found if found is not None and found.whole in self._parameters else None

    def _stored(self, name: str) -> str | None:
        """Return the name of what a checkpoint has of a parameter; None where it has not."""
        if self._pretrained is None or (self._adapter is not None and name in self._adapter.names):
            return None
        base = self.construction.base_names.get(name)
        return base if base is not None and self._pretrained.has(base) else None

    def forget(self) -> None:
        """Free what the values are made from."""
        self._drawn = None
        self.construction.forget()
