"""A directory that transformers loads: config, tokenizer, and weights in files of a few GB."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.read.safetensors import StreamedTensor, write_safetensors
from swaptrain.verbs.exports.new_directory import new_directory

__all__ = ["MOST_SHARD_BYTES", "DirectoryFacts", "check_model_directory", "write_model_directory"]

MOST_SHARD_BYTES = 5 * 10**9
"""Of one file of weights, unless a tensor is larger: as the hub has them."""
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "chat_template*"),
)
"""Of the directory that `data.tokenizer` names, where it names one, else of the base's."""
_BESIDE = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("image_processor_config.json", "video_preprocessor_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),  # of sentence-transformers
)
"""What of the base's directory says how its input is made, and what is made of its output; never
code."""


@dataclass(frozen=True)
class DirectoryFacts:
    """What `config.json` and the tokenizer's files are made of."""

    config: Config
    architecture: str | None
    """Class of transformers."""
    vocabulary: int | None = None
    """How many rows the embeddings have grown to; None: as many as the base's config says."""
    untied: Sequence[str] = ()
    """Parts of the config that said of weights that they are tied, and no longer do; "": all."""


def check_model_directory(to: Path, config: Config) -> None:
    """Raise ConfigError where no directory can be written: a function's model has no config."""
    if config.model.hf is None:
        raise ConfigError(
            f"--to {to}: the model is made by {config.model.python}, which no config.json "
            "describes: name a file that ends in .safetensors"
        )
    tokenizer = str(config.data.tokenizer)
    if tokenizer != "bytes" and not Path(tokenizer).is_dir():
        raise ConfigError(
            f"--to {to}: the tokenizer belongs there too, and {tokenizer} (data.tokenizer) is not "
            "there any more: put it back, or name a file that ends in .safetensors"
        )


def write_model_directory(
    to: Path,
    tensors: Sequence[StreamedTensor],
    described: DirectoryFacts,
    shard_bytes: int,
    state: Sequence[StreamedTensor] = (),
) -> int:
    """Write a directory that is there as a whole or not at all; return the bytes of its tensors.

    `state`: what the optimizer holds, for optimizer.safetensors.
    """
    with new_directory(to) as aside:
        total_bytes = _write_weights(aside, tensors, shard_bytes)
        if state:
            total_bytes += write_safetensors(aside / "optimizer.safetensors", state)
        _write_config(aside, described, _dtype(tensors))
    return total_bytes


def _write_weights(directory: Path, tensors: Sequence[StreamedTensor], shard_bytes: int) -> int:
    shards: list[list[StreamedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        return write_safetensors(directory / "model.safetensors", shards[0])
    total_bytes, where = 0, dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total_bytes += write_safetensors(directory / name, shard)
        where.update((tensor.name, name) for tensor in shard)
    size = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    _write_json(directory / "model.safetensors.index.json", index)
    return total_bytes


def _write_config(directory: Path, described: DirectoryFacts, dtype: str | None) -> None:
    source, tokenizer = described.config.model.hf, str(described.config.data.tokenizer)
    if isinstance(source, dict):
        found: dict[str, Any] = dict(source)
    else:
        base = Path(str(source))
        try:
            found = json.loads((base / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.hf: cannot read {base / 'config.json'} of the base: {error}"
            ) from error
        _copy(_BESIDE, base, directory)
        if tokenizer == "bytes":
            _copy(_TOKENIZER, base, directory)
    if tokenizer != "bytes":
        _copy(_TOKENIZER, Path(tokenizer), directory)
    found.pop("torch_dtype", None)
    found |= {"architectures": [described.architecture]} if described.architecture else {}
    found |= {"dtype": dtype} if dtype else {}
    if described.vocabulary is not None:
        text = found.get("text_config")
        (text if isinstance(text, dict) else found)["vocab_size"] = described.vocabulary
    for part in described.untied:
        if part:
            found[part] = {**(found.get(part) or {}), "tie_word_embeddings": False}
        else:
            found["tie_word_embeddings"] = False
    _write_json(directory / "config.json", found)


def _copy(patterns: Sequence[str], source: Path, directory: Path) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file():
                target = directory / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _dtype(tensors: Sequence[StreamedTensor]) -> str | None:
    """Return the floating dtype that most numbers have."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if "float" in tensor.dtype:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    write_aside(path, (json.dumps(tree, indent=2) + "\n").encode())
