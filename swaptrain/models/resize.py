"""More rows for the tokens that only the tokenizer has, as transformers adds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from swaptrain.chat import ChatTokenizer
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.factory import described

__all__ = ["grow", "grown_size"]


def grown_size(config: Config, hf_config: Any) -> int | None:
    """Return the size that the vocabulary has to grow to; None where it stays as it is.

    It never shrinks: ids that no tokenizer gives are padding of the table. Raises ConfigError.
    """
    if not config.model.resize_to_tokenizer:
        return None
    present = getattr(hf_config.get_text_config(), "vocab_size", None)
    if not isinstance(present, int):
        raise ConfigError(
            f"model.resize_to_tokenizer: a {hf_config.model_type} has no vocab_size: remove the key"
        )
    needed = ChatTokenizer(Path(config.data.tokenizer)).vocabulary
    return needed if needed > present else None


def grow(module: nn.Module, size: int) -> None:
    """Grow embeddings and head as `resize_token_embeddings` does: new rows near the old ones' mean.

    Raises ConfigError where the architecture cannot.
    """
    try:
        module.resize_token_embeddings(size)  # type: ignore[operator]  # a model of transformers
    except Exception as error:  # whatever the architecture's own rules raise
        raise ConfigError(f"model.resize_to_tokenizer: {described(error)}") from error
