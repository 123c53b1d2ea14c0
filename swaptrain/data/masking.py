"""Masked-language items of text: which tokens are hidden, and what the model sees instead.

The recipe is BERT's (Devlin et al., 2018): of the chosen tokens 80 % become the mask token, 10 % a
random one, and 10 % stay. Draws are of torch's generator, which `Batches` seeds by seed, epoch and
item: a resume hides the same tokens, another epoch others, and held-out data always the same ones.
"""

# T sequence length

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swaptrain.data.batches import Dataset
from swaptrain.data.tokenizer import Tokenizer
from swaptrain.errors import ConfigError

__all__ = ["MaskTokens", "MaskedTokens", "mask_tokens"]

_NO_LABEL = -100
"""What a cross entropy passes over."""
_MASKED, _RANDOM = 0.8, 0.9
"""Below the first a chosen token is masked, below the second it is random."""
_ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    "additional_special_tokens",
)


@dataclass(frozen=True)
class MaskTokens:
    """The ids of a tokenizer that masking treats apart."""

    mask: int
    special: frozenset[int]
    """Never hidden, and never put in the place of another: ends, pads, the mask itself."""
    vocabulary: int


class MaskedTokens:
    """The items of packed text, with a part of their tokens hidden and the labels of these alone.

    Of each item the same part of its tokens that are not special, and one at the least.
    """

    def __init__(self, source: Dataset, part: float, tokens: MaskTokens) -> None:
        self._source, self._part, self._mask_token = source, part, tokens.mask
        special = tokens.special
        self._special = torch.tensor(sorted(special))
        self._ordinary = torch.tensor([i for i in range(tokens.vocabulary) if i not in special])

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._source)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Return input_ids with tokens hidden, and labels that are -100 but there; int64 [T]."""
        ids: Tensor = self._source[index]["input_ids"]  # [T]
        eligible = torch.nonzero(~torch.isin(ids, self._special)).flatten()
        count = min(len(eligible), max(1, round(self._part * len(eligible))))
        chosen = eligible[torch.randperm(len(eligible))[:count]]
        labels = torch.full_like(ids, _NO_LABEL)
        labels[chosen] = ids[chosen]
        kind = torch.rand(count)
        others = self._ordinary[torch.randint(len(self._ordinary), (count,))]
        seen = torch.where(kind < _RANDOM, others, ids[chosen])
        seen = torch.where(kind < _MASKED, torch.tensor(self._mask_token), seen)
        hidden = ids.clone()
        hidden[chosen] = seen
        return {"input_ids": hidden, "labels": labels}


def mask_tokens(tokenizer: Tokenizer) -> MaskTokens:
    """Return what masking needs of a tokenizer; raises ConfigError where it has no mask token."""
    directory = Path(tokenizer.name)
    if tokenizer.name == "bytes":
        raise ConfigError(
            "data.mask: data.tokenizer is bytes, which has no mask token: set it to the directory "
            "of a Hugging Face tokenizer that has one"
        )
    ids, special, mask = _special_tokens(directory)
    if mask is None or mask not in ids:
        raise ConfigError(
            f"data.mask: the tokenizer in {directory} has no mask token: take one that names "
            "mask_token in its tokenizer_config.json and has it in its vocabulary, such as BERT's"
        )
    return MaskTokens(ids[mask], frozenset({*special, ids[mask]}), tokenizer.vocabulary)


def _special_tokens(directory: Path) -> tuple[dict[str, int], set[int], str | None]:
    """Return the ids of a tokenizer's tokens, those of the special ones, and the mask token."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(directory / "tokenizer.json"))
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    mask: str | None = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            continue
        try:
            tree = json.loads((directory / name).read_bytes())
            named = {role: tree[role] for role in _ROLES if tree.get(role)}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"data.tokenizer: {directory / name}: {error}") from error
        for role, entry in named.items():
            texts = [_text(one) for one in (entry if isinstance(entry, list) else [entry])]
            special |= {ids[text] for text in texts if text in ids}
            mask = texts[0] if role == "mask_token" else mask
    return ids, special, mask


def _text(entry: Any) -> str:
    """Return the text of a token, which is written as one or as an object."""
    return str(entry.get("content")) if isinstance(entry, dict) else str(entry)
