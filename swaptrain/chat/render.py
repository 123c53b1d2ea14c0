"""Conversations to answer become text, in a process of its own within the limits of a row."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool

from swaptrain.chat.limits import MOST_BYTES, allow_cpu, begin_limits, row_limit
from swaptrain.chat.refusal import RowError
from swaptrain.chat.rows import Message
from swaptrain.chat.template import ChatTemplate
from swaptrain.processes import NEEDS_GUARD, process_pool
from swaptrain.units import GIB

__all__ = ["render_prompts"]


def render_prompts(
    template: ChatTemplate,
    conversations: Sequence[Sequence[Message]],
    *,
    most_row_s: float = 10.0,
    most_all_s: int = 60,
) -> list[str]:
    """Return the text of each, which ends where the assistant begins; raises RowError."""
    pool = process_pool(1, begin_limits)
    try:
        return pool.submit(_render, template, conversations, most_row_s, most_all_s).result()
    except BrokenProcessPool as error:
        raise RowError(
            f"the process that renders it was ended: the chat template takes more than "
            f"{most_all_s} s or {MOST_BYTES // GIB} GiB. {NEEDS_GUARD}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _render(
    template: ChatTemplate,
    conversations: Sequence[Sequence[Message]],
    most_row_s: float,
    most_all_s: int,
) -> list[str]:
    allow_cpu(most_all_s)
    texts = []
    for messages in conversations:
        with row_limit(most_row_s):
            texts.append(template.render(messages, None, prompt=True))
    return texts
