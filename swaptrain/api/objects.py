"""What a script has as objects, put where a config names it: models, data, functions."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swaptrain.api.written_data import WrittenData, documents_of, is_text_rows, rows_of
from swaptrain.errors import ConfigError
from swaptrain.given import PREFIX
from swaptrain.units import MIB, format_size, how_many
from swaptrain.verbs.evaluate import source_of

__all__ = ["BatchesOfStep", "HandedOver", "use_collate", "use_data", "use_model"]

_MOST_INSTANCE_BYTES = 512 * MIB
"""Of the weights of a module that exists: it stays in memory, and is copied to begin the run."""


@dataclass
class HandedOver:
    """Keys of a config, and the functions that they name in `swaptrain.given`."""

    keys: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    batches: BatchesOfStep | None = None
    """That have to be told how many micro-batches a step has."""
    files: list[WrittenData] = field(default_factory=list)
    """Texts and rows that have to be written before a run can read them."""

    def name(self, key: str, function: Callable[..., Any], place: str) -> None:
        """Set a key to a function: by the name that a process can import, else by its place."""
        own = _own_name(function)
        if own is None:
            self.functions[place] = function
        self.keys[key] = own or f"{PREFIX}{place}"


def use_model(given: HandedOver, model: Any) -> None:
    """Take a factory, a directory, a config of transformers, or a small module.

    Raises ConfigError for a module that is too large to be taken over, and for anything else.
    """
    import torch

    if model is None:
        return
    if isinstance(model, str | Path):
        given.keys["model.hf"] = str(model)
    elif isinstance(model, Mapping):
        given.keys["model.hf"] = dict(model)
    elif hasattr(model, "to_diff_dict") and hasattr(model, "model_type"):
        given.keys["model.hf"] = {"model_type": model.model_type, **model.to_diff_dict()}
    elif isinstance(model, torch.nn.Module):
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        name = type(model).__name__
        if nbytes > _MOST_INSTANCE_BYTES or any(p.is_meta for p in model.parameters()):
            raise ConfigError(
                f"model: this {name} holds {format_size(nbytes)} in memory already: give a "
                f"function that makes it, model=lambda: {name}(...), which is called without memory"
            )
        _check_hooks(model)
        given.name("model.python", lambda: _copied(model), "model")
    elif callable(model):
        given.name("model.python", model, "model")
    else:
        raise ConfigError(
            f"model: found {type(model).__name__}; give a function that returns a module, a "
            "directory, or a config of transformers"
        )


def use_data(
    given: HandedOver,
    data: Any,
    section: str,
    folder: Path,
    *,
    tokenizer: str | None,
    collates: bool = False,
) -> None:
    """Take data for `data` or `eval`: files, rows, texts, a dataset, or a function.

    Rows and texts become `given.files` in `folder`; texts are rows where there is a `tokenizer`,
    else documents of bytes. `collates`: a function gets the items as they are. Raises ConfigError.
    """
    if data is None:
        return
    argument = "data" if section == "data" else "eval"
    if isinstance(data, str | Path):
        given.keys[f"{section}.{source_of([str(data)], argument)}"] = [str(data)]
    elif is_text_rows(data) and not collates:
        is_text = tokenizer in (None, "bytes") and isinstance(data[0], str)
        made = (documents_of if is_text else rows_of)(data, section, folder)
        given.files.append(made)
        given.keys[f"{section}.{'text' if is_text else 'chat'}"] = [made.pattern]
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = data if collates else _Items(data, argument)
        given.name(f"{section}.python", lambda: items, section)
    elif callable(data):
        wanted = [
            p
            for p in inspect.signature(data).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if not wanted:
            given.name(f"{section}.python", data, section)
        elif len(wanted) == 2 and section == "data":
            batches = given.batches = BatchesOfStep(data)
            given.keys |= {"data.shuffle": False, "data.micro_batch": batches.items}
            given.name("data.python", lambda: batches, "data")
        else:
            raise ConfigError(
                f"{argument}: a function takes nothing and returns a dataset"
                + (", or takes (step, micro_batch) and returns a batch" * (section == "data"))
                + f"; this one takes {', '.join(p.name for p in wanted)}"
            )
    else:
        raise ConfigError(
            f"{argument}: found {type(data).__name__}; give a file, rows, texts, a dataset with "
            "__len__ and __getitem__, or a function"
        )


def use_collate(given: HandedOver, collate: Callable[[list[Any]], Any] | None) -> None:
    """Take the function that makes a micro-batch of items."""
    if collate is not None:
        given.name("data.collate", collate, "collate")


def _own_name(function: Callable[..., Any]) -> str | None:
    """Return `module:name` where another process would find the very same object there."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "<" in name or "." in name:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is function else None


def _check_hooks(module: Any) -> None:
    """Raise ConfigError for hooks of parameters, which a copy would not have."""
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise ConfigError(
            f"model: {', '.join(hooked[:4])} has hooks, of which a copy of the module has none: "
            "remove them"
        )


def _copied(module: Any) -> Any:
    """Return a copy of a module; parameters keep their attributes, which deepcopy leaves out."""
    copied = copy.deepcopy(module)
    twins = zip(module.parameters(), copied.parameters(), strict=True)
    for own, twin in twins:
        twin.__dict__.update(own.__dict__)
    return copied


class _Items:
    """A dataset whose items may hold numbers, lists and arrays: they become tensors."""

    def __init__(self, data: Any, argument: str) -> None:
        self.data, self._argument = data, argument
        if hasattr(data, "set_epoch"):
            self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        import torch

        item = self.data[index]
        if not isinstance(item, Mapping):
            return item
        texts = [str(key) for key, value in item.items() if isinstance(value, str)]
        if texts:
            raise ConfigError(
                f"{self._argument}: item {index} has text in {', '.join(texts)}: leave that out, "
                "or give collate"
            )
        return {
            key: value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            for key, value in item.items()
        }


class BatchesOfStep:
    """Batches of a function of step (from 1) and micro-batch (from 0), item by item."""

    def __init__(self, function: Callable[[int, int], Mapping[str, Any]]) -> None:
        self.function = function
        self.steps = self.micro_batches = 1
        """Of the run, and of a step."""
        self.is_endless = True
        self._at: tuple[int, int] = (0, 0)
        self._batch: Mapping[str, Any] = {}
        self.items = self._size(self._made(1, 0))
        """Of a micro-batch."""

    def __len__(self) -> int:
        return self.steps * self.micro_batches * self.items

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, item = divmod(index, self.items)
        step, micro_batch = divmod(number, self.micro_batches)
        batch = self._made(step + 1, micro_batch)
        if (found := self._size(batch)) != self.items:
            raise ValueError(
                f"the batch of step {step + 1}, micro-batch {micro_batch}, has "
                f"{how_many(found, 'item')}, and the first one {self.items}: all have equally many"
            )
        return {key: value[item] for key, value in batch.items()}

    def _made(self, step: int, micro_batch: int) -> Mapping[str, Any]:
        if self._at != (step, micro_batch):
            self._batch = self._tensors(self.function(step, micro_batch))
            self._at = step, micro_batch
        return self._batch

    def _tensors(self, batch: Any) -> Mapping[str, Any]:
        import torch

        if not isinstance(batch, Mapping) or not batch:
            raise ConfigError(
                f"data: the function returned {type(batch).__name__}; a batch is a dict of tensors"
            )
        try:
            return {key: torch.as_tensor(value) for key, value in batch.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"data: a batch of the function is no tensors: {error}") from error

    def _size(self, batch: Mapping[str, Any]) -> int:
        sizes = {key: len(value) if value.ndim else None for key, value in batch.items()}
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ConfigError(
                f"data: the first dimensions of a batch are {sizes}: each is that of its items"
            )
        return len(next(iter(batch.values())))
