"""Special tokens that stand in a document as text are text, unless the config says otherwise.

The library's own switch (`encode_special_tokens`) is not enough: it stops the search for special
tokens, but the model may still find them, since they are entries of its vocabulary too (a Unigram
piece `</s>`, a word `[SEP]`). So their entries get names that no text has, under the same ids.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["hidden", "special_names", "unknown_token"]


def special_names(tree: Mapping[str, Any], configs: Collection[Mapping[str, Any]]) -> set[str]:
    """Return the special tokens of a tokenizer.json and of the files beside it.

    Added tokens that nothing declares special are ordinary words, and are none of these.
    """
    names = {token["content"] for token in tree.get("added_tokens") or () if token.get("special")}
    for config in configs:
        for key, value in config.items():
            if key.endswith("_token"):
                names |= _contents([value])
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                names |= _contents(value.values() if isinstance(value, Mapping) else value or ())
            elif key == "added_tokens_decoder" and isinstance(value, Mapping):
                named = [v for v in value.values() if isinstance(v, Mapping) and v.get("special")]
                names |= _contents(named)
    return names


def hidden(
    tree: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a tokenizer.json in which no text gives one of `names`, and their new names.

    All ids stay what they are.
    """
    changed = copy.deepcopy(dict(tree))
    renamed = {name: f"\ufdd0{number}\ufdd1" for number, name in enumerate(sorted(names))}
    for token in changed.get("added_tokens") or ():
        if token["content"] in renamed:
            token["content"] = renamed[token["content"]]
            token["special"] = True
    changed["post_processor"] = None
    model = changed["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(word, word): number for word, number in vocabulary.items()}
    else:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if model.get("merges"):
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, renamed, prefix)]
    return changed, renamed


def unknown_token(tree: Mapping[str, Any]) -> str | None:
    """Return the word that the model gives for what it does not know."""
    model = tree["model"]
    if model.get("unk_id") is not None and isinstance(model["vocab"], list):
        return str(model["vocab"][model["unk_id"]][0])
    found = model.get("unk_token")
    return None if found is None else str(found)


def _contents(values: Any) -> set[str]:
    found = {value.get("content") if isinstance(value, Mapping) else value for value in values}
    return {value for value in found if isinstance(value, str) and value}


def _makes(merge: Any, names: Mapping[str, str], prefix: int) -> bool:
    """Whether a merge reads or gives one of the names."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return any(word in names for word in (left, right, left + right, left + right[prefix:]))
