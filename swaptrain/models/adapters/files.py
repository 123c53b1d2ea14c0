"""The adapter that a run goes on with: the safetensors that PEFT saved, by the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.errors import ConfigError
from swaptrain.models.stored.checkpoint import Checkpoint

__all__ = ["AdapterFiles"]

_WEIGHTS = "adapter_model.safetensors"


class AdapterFiles:
    """Tensors of an adapter's directory. Raises ConfigError unless they are the module's, all."""

    def __init__(self, directory: Path, module: nn.Module, names: Mapping[str, str]) -> None:
        """`names` are those of the module by those in the file (`lora.saved_names`)."""
        if not (directory / _WEIGHTS).is_file():
            raise ConfigError(
                f"lora.from: {directory} has no {_WEIGHTS}: what is pickled (adapter_model.bin) is "
                "never read, save it with safetensors"
            )
        self._checkpoint = Checkpoint(directory, [directory / _WEIGHTS], key="lora.from")
        self.origin: dict[str, Any] = self._checkpoint.origin
        self.names = {own: saved for saved, own in names.items()}
        """Names in the file by those of the module; of several of a tied tensor one."""
        self._saved = names
        places = module.state_dict(keep_vars=True)
        self._likes = {
            name: torch.empty_strided(
                places[name].shape, places[name].stride(), dtype=places[name].dtype, device="meta"
            )
            for name in self.names
        }
        self._check(directory)

    def value(self, name: str) -> torch.Tensor:
        """Return a tensor by the module's name, a new real one laid out as it is there."""
        like = self._likes[name]
        with _disable_current_modes(), torch.no_grad():
            result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            return result.copy_(self._checkpoint.read(self.names[name]))

    def load_buffers(self, module: nn.Module) -> None:
        """Let the module's buffers that the adapter has take its values."""
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self.names:
                    buffer.copy_(self.value(name))

    def largest_value_bytes(self) -> int:
        """Return how many bytes `value` needs at most beyond its result."""
        stored = self._checkpoint.tensors.values()
        return max((tensor.nbytes for tensor in stored), default=0)

    def _check(self, directory: Path) -> None:
        stored = self._checkpoint.tensors
        missing = [name for name in self.names.values() if name not in stored]
        unused = stored.keys() - self._saved.keys()
        for what, found in (("lacks", missing), ("has no place for", sorted(unused))):
            if found:
                raise ConfigError(
                    f"lora.from: {directory / _WEIGHTS} and its config do not fit this model: it "
                    f"{what.replace('has no place for', 'holds')} {found[0]}"
                    f"{f' and {len(found) - 1} more' if len(found) > 1 else ''}"
                    f"{', for which there is no place' if what != 'lacks' else ''}"
                )
        for name, saved in self.names.items():
            if self._likes[name].is_floating_point() and not stored[saved].is_floating:
                raise ConfigError(
                    f"lora.from: {saved} of {directory} is stored in {stored[saved].dtype}: save "
                    "the adapter in a floating dtype"
                )
            if stored[saved].shape != tuple(self._likes[name].shape):
                raise ConfigError(
                    f"lora.from: {saved} has the shape {stored[saved].shape} in {directory}, and "
                    f"{tuple(self._likes[name].shape)} in the model: is it another base's?"
                )
