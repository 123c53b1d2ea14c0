"""A model's tensors as its directory on the hub has them: names, forms, and what is not trained.

Tensors that came from a checkpoint go back under the names that it has. What a class builds of
several stored tensors, such as the experts of a layer, is taken apart by transformers' own rules,
as `save_pretrained` does it (transformers' `revert_weight_conversion`), one group at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.classes import Job
from swaptrain.models.factory import described
from swaptrain.models.quantization import to_numpy
from swaptrain.models.stored.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from swaptrain.models.stored.pretrained import Pretrained
from swaptrain.models.transformers_model import hugging_face_factory
from swaptrain.store.read.safetensors import StreamedTensor, cast_piece

__all__ = ["HubNames", "is_other_base", "whole_tensor"]

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PLAIN = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class _Group:
    """Tensors of the model of which a converter makes tensors of a checkpoint."""

    name: str
    converter: Any
    members: list[tuple[StreamedTensor, str]] = field(default_factory=list)
    """And the converter's pattern that found each."""


class HubNames:
    """What the hub calls the tensors of a run's model.

    `architecture`: the class of transformers; `origin`: what is recorded of the checkpoint that the
    run began from, None where it was none. Where it `is_untied`, no two names of the model are one
    weight's any more. Nothing of the model is held. Raises ConfigError where it cannot be made, or
    the checkpoint is not what it was.
    """

    untied: tuple[str, ...] = ()
    """Parts of the config that have to say that no weights are tied; \"\" is the whole of it."""

    def __init__(
        self,
        config: Config,
        architecture: str,
        origin: Mapping[str, Any] | None,
        *,
        is_untied: bool = False,
    ) -> None:
        import transformers

        cls = getattr(transformers, architecture)
        model = config.model.model_copy(update={"resize_to_tokenizer": False})  # as on the hub
        config = config.model_copy(update={"model": model})
        factory = hugging_face_factory(config, Job("causal"), chosen=cls)
        with torch.device("meta"):
            self._module: Any = factory.make()
        self._checkpoint = _checkpoint(config, origin)
        self._stored: Mapping[str, str] = {}
        self._only_stored: Sequence[str] = ()
        if self._checkpoint is not None:
            pretrained = Pretrained(self._module, self._checkpoint)
            self._stored = pretrained.names_once if is_untied else pretrained.stored_names
            self._only_stored = pretrained.only_stored
            if self._only_stored and self._checkpoint.origin["files"] != (origin or {})["files"]:
                raise _changed(
                    self._checkpoint.directory,
                    f"and {self._only_stored[0]}, which is not trained, would be carried over",
                )
        self._renamings, self._converters = _reversed_rules(self._module)
        if is_untied:
            self.untied = _untied_parts(self._module)

    @property
    def dtype(self) -> str | None:
        """Of most numbers of the checkpoint; None where there is none."""
        sizes: dict[str, int] = {}
        for stored in self._checkpoint.tensors.values() if self._checkpoint else ():
            if stored.dtype in _DTYPES:
                sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.numel
        found = max(sizes, key=lambda name: sizes[name], default=None)
        return None if found is None else _DTYPES[found]

    def grown_vocabulary(self, tensors: Sequence[StreamedTensor]) -> int | None:
        """Return how many rows the embeddings have where `model.resize_to_tokenizer` added some."""
        table = self._module.get_input_embeddings().weight
        name = next((n for n, p in self._module.named_parameters() if p is table), None)
        rows = next((tensor.shape[0] for tensor in tensors if tensor.name == name), len(table))
        return None if rows == len(table) else rows

    def as_on_hub(self, tensors: Sequence[StreamedTensor], dtype: str) -> list[StreamedTensor]:
        """Return the tensors under their names there, and those that only the checkpoint has.

        The latter in `dtype`, where they are floating point numbers. Raises ConfigError.
        """
        found: list[StreamedTensor] = []
        groups: dict[str, _Group] = {}
        for tensor in tensors:
            stored = self._stored.get(tensor.name)
            if stored is not None:
                found.append(replace(tensor, name=stored))
                continue
            name, pattern = self._convert(tensor.name)
            if pattern is None:
                found.append(replace(tensor, name=self._rename(tensor.name)))
                continue
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            group = groups.setdefault(name, _Group(name, converter))
            group.members.append((tensor, pattern))
        for group in groups.values():
            found += self._taken_apart(group)
        names = {tensor.name for tensor in found}
        if len(names) != len(found):
            raise ConfigError(
                "two tensors of the model have one name on the hub: write them by the names of the "
                "run, with --to FILE.safetensors"
            )
        assert self._checkpoint is not None or not self._only_stored
        return found + [
            _carried(self._checkpoint, name, dtype)
            for name in self._only_stored
            if self._checkpoint is not None and name not in names
        ]

    def _convert(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import apply_converters

        found, pattern = apply_converters(name, self._converters)
        return str(found), pattern

    def _rename(self, name: str) -> str:
        from transformers.core_model_loading import apply_renamings

        return str(apply_renamings(name, self._renamings))

    def _taken_apart(self, group: _Group) -> list[StreamedTensor]:
        """Return what a converter makes of a group; it is read when the first of them is asked."""
        shapes = self._converted(group, lambda tensor: torch.empty(tensor.shape, device="meta"))
        made: dict[str, Tensor] = {}

        def take(name: str) -> Tensor:
            if not made:
                made.update(self._converted(group, whole_tensor))
            return made.pop(name)

        dtype = group.members[0][0].dtype
        size = group.members[0][0].nbytes // max(1, _numel(group.members[0][0].shape))
        return [
            StreamedTensor(name, dtype, tuple(like.shape), like.numel() * size, _Once(take, name))
            for name, like in shapes.items()
        ]

    def _converted(
        self, group: _Group, read: Callable[[StreamedTensor], Tensor]
    ) -> dict[str, Tensor]:
        converter = deepcopy(group.converter)
        for tensor, pattern in group.members:
            converter.add_tensor(group.name, tensor.name, pattern, read(tensor))
        try:
            made = converter.convert(group.name, model=self._module, config=self._module.config)
        except Exception as error:  # transformers' operations on tensors of any shape
            names = ", ".join(tensor.name for tensor, _ in group.members)
            raise ConfigError(
                f"{names} cannot be taken apart as on the hub: {described(error)}; write them by "
                "the names of the run, with --to FILE.safetensors"
            ) from error
        single = {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }
        return {self._rename(name): value for name, value in single.items()}


@dataclass(frozen=True)
class _Once:
    """The elements of a tensor that is there when it is asked for, and then let go."""

    take: Callable[[str], Tensor]
    name: str

    def __iter__(self) -> Iterator[NDArray[Any]]:
        yield to_numpy(self.take(self.name))


def _reversed_rules(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters that lead from a model's names to the hub's.

    As `revert_weight_conversion` finds them for a model that was not loaded.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(module, add_legacy=False)
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    back = [rule.reverse_transform() for rule in rules[::-1]]
    renamings = [rule for rule in back if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in back if isinstance(rule, WeightConverter)]


def _untied_parts(module: Any) -> tuple[str, ...]:
    """Return which parts of a model's config tie its weights.

    Raises ConfigError where another config would not give the same model with its weights apart.
    """
    kind = type(module.config)
    config = kind.from_dict(module.config.to_dict())  # without what was only set, which is no key
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    tying = [name for name, one in parts.items() if getattr(one, "tie_word_embeddings", False)]
    tree = config.to_dict()
    for name in tying:
        (tree[name] if name else tree)["tie_word_embeddings"] = False
    read = kind.from_dict(deepcopy(tree))
    try:
        computes = inspect.getsource(inspect.unwrap(type(module).forward))
    except OSError:  # an installation without sources: then it is not known
        computes = "tie_word_embeddings"
    # Of some classes the same key also says how outputs are scaled.
    if read.to_dict() != tree or "tie_word_embeddings" in computes:
        raise _always_tied(type(module).__name__, "its head and its table of embeddings")
    with torch.device("meta"):
        apart = type(module)._from_config(read)
    first: dict[int, str] = {}
    for name, parameter in apart.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise _always_tied(type(module).__name__, f"{other} and {name}")
    return tuple(tying)


def _always_tied(name: str, which: str) -> ConfigError:
    return ConfigError(
        f"--merged: the adapters change one of several names of a weight, and {name} ties {which} "
        "whatever its config says: write the tensors with --to FILE.safetensors, or the adapter "
        "with --adapter DIR"
    )


def is_other_base(config: Config, origin: Mapping[str, Any] | None) -> bool:
    """Whether other weights lie now where those lay that a run began from, by their headers."""
    directory = _base_directory(config, origin)
    if directory is None or origin is None or not directory.is_dir():
        return False
    try:
        found = open_checkpoint(directory)
    except ConfigError:  # parts of it are gone, or it has another form
        return True
    return found is None or _headers(found.origin) != _headers(origin)


def _base_directory(config: Config, origin: Mapping[str, Any] | None) -> Path | None:
    """Return where the weights lie that a run began from; None: its base was drawn."""
    if config.model.hf is None or isinstance(config.model.hf, Mapping) or origin is None:
        return None
    adapter = origin.get("adapter") or {}
    # Only the adapter was read, whatever lies beside the base's config now.
    return None if origin["directory"] == adapter.get("directory") else Path(config.model.hf)


def _checkpoint(config: Config, origin: Mapping[str, Any] | None) -> Checkpoint | None:
    """Return the checkpoint that the run began from; raises ConfigError where it is another one.

    It may have been moved or copied: names and headers are what counts for names and shapes.
    """
    directory = _base_directory(config, origin)
    if directory is None or origin is None:
        return None
    found = open_checkpoint(directory)
    if found is None or _headers(found.origin) != _headers(origin):
        raise _changed(directory, "and the names of its tensors are those of the export")
    return found


def _headers(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(file["name"], file["header"]) for file in origin["files"]]


def _changed(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"model.hf: the weights in {directory} are not those that the run began from, {why}: "
        "restore them, or write the run's own tensors with --to FILE.safetensors"
    )


def _carried(checkpoint: Checkpoint, name: str, dtype: str) -> StreamedTensor:
    """Return a tensor that only the checkpoint has."""
    stored: StoredTensor = checkpoint.tensors[name]
    if stored.dtype not in _DTYPES | _PLAIN:
        raise ConfigError(
            f"model.hf: {name} of {checkpoint.directory} is {stored.dtype}, and cannot be carried "
            "over: write the run's tensors with --to FILE.safetensors"
        )
    floating = stored.dtype in _DTYPES
    target = dtype if floating else _PLAIN[stored.dtype]

    def pieces() -> Iterator[NDArray[Any]]:
        if not stored.shape:
            yield cast_piece(to_numpy(checkpoint.read(name)), target, name)
        for first, last in checkpoint.row_blocks(name):
            rows = to_numpy(checkpoint.read_rows(name, first, last))
            yield cast_piece(rows, target, name)

    item_bytes = _ITEM_BYTES.get(target) or np.dtype(target).itemsize
    return StreamedTensor(name, target, stored.shape, stored.numel * item_bytes, pieces())


def whole_tensor(tensor: StreamedTensor) -> Tensor:
    """Return all elements of a tensor, in its shape."""
    flat = np.concatenate([piece.reshape(-1) for piece in tensor.pieces])
    if tensor.dtype == "bfloat16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(tensor.shape)
    return torch.from_numpy(flat).reshape(tensor.shape)


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape)) if shape else 1
