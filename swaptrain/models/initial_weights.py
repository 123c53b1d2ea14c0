"""Initial weights of a model: from a checkpoint, an adapter's file, or else its constructor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swaptrain.capture.init.construct import Construction
from swaptrain.models.adapter_files import AdapterFiles
from swaptrain.models.pretrained import Pretrained

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

        As `Construction.value` for what is in no file. Raises ConfigError where a file cannot be
        read, or has changed since it was opened.
        """
        if self._adapter is not None and name in self._adapter.names:
            return self._adapter.value(name)
        base = self._stored(name)
        if base is not None and self._pretrained is not None:
            return self._pretrained.value(base)
        return self.construction.value(name)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the initial value of a parameter to a tensor, which may have another dtype.

        What a checkpoint stores as it is goes there block by block.
        """
        base = self._stored(name)
        with torch.no_grad():
            if base is not None and self._pretrained is not None:
                self._pretrained.fill(base, target)
            else:
                target.copy_(self.value(name))

    def fill_bytes(self, name: str) -> int:
        """Return how many bytes `fill` needs beside the target."""
        base = self._stored(name)
        if base is not None and self._pretrained is not None:
            return self._pretrained.fill_bytes(base)
        return self.value_bytes(name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` needs: the result, pages of files, copies."""
        size_bytes = self.construction.nbytes(name)
        if self._adapter is not None and name in self._adapter.names:
            return size_bytes + self._adapter.largest_value_bytes()
        base = self._stored(name)
        if base is not None and self._pretrained is not None:
            return size_bytes + self._pretrained.value_bytes(base)
        return size_bytes + self.construction.value_bytes(name)

    def _stored(self, name: str) -> str | None:
        """Return the name of what a checkpoint has of a parameter; None where it has not."""
        if self._pretrained is None or (self._adapter is not None and name in self._adapter.names):
            return None
        base = self.construction.base_names.get(name)
        return base if base is not None and self._pretrained.has(base) else None

    def forget(self) -> None:
        """Free what the values are made from, and let go of the files."""
        self.construction.forget()
        if self._pretrained is not None:
            self._pretrained.close()
        if self._adapter is not None:
            self._adapter.close()
