"""A tokenizer of single bytes, with special tokens, in a directory as transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<bos>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "[INST]", "[/INST]"),
)

MakeTokenizer = Callable[..., Path]


def write_tokenizer(
    directory: Path, template: str | None, special: Sequence[str] = SPECIAL, **config: Any
) -> Path:
    """Write a tokenizer of which each byte is a token, and each of `special` one more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        content["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> MakeTokenizer:
    """Make the tokenizer with a chat template; further fields go into its config."""
    made = iter(range(100))

    def make(template: str | None, **config: Any) -> Path:
        return write_tokenizer(tmp_path / f"tokenizer-{next(made)}", template, **config)

    return make
