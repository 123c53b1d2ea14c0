"""Which characters of a rendered conversation the assistant wrote: exactly, or not at all.

A template says it by `{% generation %}`. Where it does not, a turn is what the whole text has
beyond the text of the messages before it, which ends with the prompt of the assistant. Templates
that render a turn in another way when others follow it are asked with a stand-in as its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from swaptrain.chat.refusal import RowError
from swaptrain.chat.rows import Conversation
from swaptrain.chat.template import Characters, ChatTemplate

__all__ = ["TrainOn", "is_altered", "trained_turns"]

TrainOn = Literal["assistant", "completion", "all"]

_STAND_IN = "\ue000stand-in\ue001"
"""No content has it, and no template changes it: letters of the private use area."""


def trained_turns(
    template: ChatTemplate,
    conversation: Conversation,
    train_on: TrainOn,
    *,
    last_only: bool,
    special: Sequence[str],
) -> tuple[str, list[Characters]]:
    """Return the text of a conversation and the characters of it that are trained.

    `last_only`: of the turns only the last one. `special`: the texts of special tokens; a turn ends
    with its last one where only white space follows. Raises RowError where it cannot be told
    exactly.
    """
    messages, tools = conversation.messages, conversation.tools
    if tools is not None and "tools" not in template.source:
        raise RowError("it has tools, and the chat template does not take them")
    if train_on == "all":
        if any(message.get("weight", 1) == 0 for message in messages):
            raise RowError("a message of it has weight 0, and data.train_on is all")
        text = template.render(messages, tools)
        return text, [(0, len(text))] if text else []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [i for i in turns if i >= conversation.prompt]
    if last_only or (train_on == "completion" and not conversation.is_completion):
        wanted = wanted[-1:]
    wanted = [i for i in wanted if messages[i].get("weight", 1)]
    if not template.marks_turns:
        text = template.render(messages, tools)
        spans = [_turn(template, conversation, text, i) for i in wanted]
        return text, [_without_trailing_space(text, span, special) for span in spans]
    text, marked = template.render_marked(messages, tools)
    if wanted == turns or not marked:
        return text, marked
    if len(marked) != len(turns):
        raise RowError(
            f"the chat template marks {len(marked)} parts by generation, and it has {len(turns)} "
            "turns of the assistant: which one is which cannot be told"
        )
    return text, [marked[turns.index(i)] for i in wanted]


def is_altered(conversation: Conversation, text: str) -> bool:
    """Whether the text lacks what a message says: a role that a template passes over, thoughts."""
    contents = [message["content"] for message in conversation.messages]
    return any(isinstance(said, str) and said.strip() not in text for said in contents)


def _turn(template: ChatTemplate, conversation: Conversation, text: str, i: int) -> Characters:
    """Return what message i contributes to the text of all; raises RowError."""
    messages, tools = conversation.messages, conversation.tools
    before = template.render(messages[:i], tools, prompt=True)
    if not text.startswith(before):
        raise RowError(
            f"what the chat template writes before its message {i + 1} is another text when that "
            "message follows: its turn cannot be told"
        )
    begin, end = len(before), len(text)
    if i + 1 < len(messages):
        until = template.render(messages[: i + 1], tools)
        end = len(until) if text.startswith(until) else _end(template, conversation, text, i)
    if end < begin:
        raise RowError(f"the chat template leaves out its message {i + 1}")
    content = messages[i]["content"]
    written = content.strip() if isinstance(content, str) else ""
    place = text.find(written, begin)
    if written and 0 <= place < end < place + len(written):
        raise RowError(f"the end of its message {i + 1} cannot be told from what follows")
    return begin, end


def _end(template: ChatTemplate, conversation: Conversation, text: str, i: int) -> int:
    """Return where message i ends in the text of all.

    A stand-in as its content shows where that begins and ends. What follows there, the end of the
    turn, is what it has in common with the same message as the last one.
    """
    messages, tools = conversation.messages, conversation.tools
    stand_in: list[Any] = [dict(message) for message in messages]
    stand_in[i]["content"] = _STAND_IN
    whole = template.render(stand_in, tools)
    last = template.render(stand_in[: i + 1], tools)
    if whole.count(_STAND_IN) != 1 or last.count(_STAND_IN) != 1:
        raise RowError(f"the chat template writes its message {i + 1} not once: it cannot be told")
    rest, alone = whole.partition(_STAND_IN)[2], last.partition(_STAND_IN)[2]
    if not text.endswith(rest):
        raise RowError(f"what follows its message {i + 1} depends on that message")
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(rest, alone, strict=False))
    )
    shared = rest[:same]
    # What comes next may begin alike ("<|user|>" and "<|endoftext|>"): a turn ends with a line or
    # with a closed token, never inside one.
    cut = max(shared.rfind(mark) for mark in (">", "]", "\n")) + 1
    return len(text) - len(rest) + cut


def _without_trailing_space(text: str, span: Characters, special: Sequence[str]) -> Characters:
    """Let a turn end with its last special token where only white space follows that."""
    begin, end = span
    closed = len(text[begin:end].rstrip()) + begin
    if closed < end and any(text[begin:closed].endswith(token) for token in special):
        return begin, closed
    return span
