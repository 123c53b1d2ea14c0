"""Rows are recognised by their columns; what is none is refused with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swaptrain.chat.refusal import RowError
from swaptrain.chat.rows import Conversation, Document, Prompted, Ready, parse_row

USER = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Hello."}


def parsed(row: Any) -> Any:
    """Return what a row is."""
    return parse_row(json.dumps(row).encode())


def test_conversations_in_both_spellings() -> None:
    """`from` and `value` are roles and contents; a system column comes first."""
    spoken = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    expected = Conversation([USER, ANSWER])
    assert parsed({"messages": [USER, ANSWER]}) == expected
    assert parsed({"conversations": spoken}) == expected
    assert parsed({"conversations": [USER, ANSWER]}) == expected
    system = {"role": "system", "content": "Be kind."}
    assert parsed({"conversations": spoken, "system": "Be kind."}).messages[0] == system


def test_prompts_text_and_ids() -> None:
    """Texts stay texts; lists of messages are one conversation, trained after the prompt."""
    assert parsed({"prompt": "a", "completion": "b"}) == Prompted("a", "b")
    both = parsed({"prompt": [USER], "completion": [ANSWER]})
    assert both == Conversation([USER, ANSWER], None, 1, is_completion=True)
    assert parsed({"instruction": "Hi.", "input": "", "output": "Hello."}) == both
    assert parsed({"text": "a"}) == Document("a")
    assert parsed({"input_ids": [1, 2]}) == Ready([1, 2], [1, 2])


def test_columns_that_are_null_are_not_there() -> None:
    """Tables have all columns in each row."""
    assert parsed({"text": None, "messages": [USER, ANSWER]}) == Conversation([USER, ANSWER])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "it is a list, not an object"),
        ({}, "its columns are none; it needs messages; conversations"),
        ({"question": "a"}, "its columns are question; it needs"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "it holds preferences"),
        ({"messages": []}, "its messages is an empty list"),
        ({"messages": "Hi."}, "its messages is text, not a list"),
        ({"messages": [{"content": "a"}]}, "its message 1 has no role"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "message 2 has the role 'bot'"),
        ({"messages": [{"role": "user"}]}, "its message 1 \\(user\\) has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "has a number as its content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "has parts that are no text: \\['image'\\]",
        ),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "turn 1 is from 'alien'; known"),
        ({"conversations": [{"value": "a"}]}, "its turn 1 has no from and value"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, "message 1 has the weight 0.5: known are 0"),
        ({"conversations": [{"from": "gpt", "value": "a", "weight": "0"}]}, "has the weight '0'"),
        ({"prompt": "a", "completion": [ANSWER]}, "neither two texts nor two lists"),
        ({"input_ids": [1], "labels": [1, 2]}, "it has 1 input_ids and 2 labels"),
        ({"input_ids": [1, True]}, "its input_ids are not a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "its label 1 is 3, neither the id 2"),
        ({"messages": [USER], "tools": "{"}, "its tools are not JSON"),
        ({"text": 3}, "its text is a number, not text"),
    ],
)
def test_what_is_no_row_is_refused(row: Any, message: str) -> None:
    """The message says which part of it."""
    with pytest.raises(RowError, match=message):
        parsed(row)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a\0b"}', "it holds a NUL, at its byte 11"),
        (b'{"text": "\xff"}', "it is not UTF-8, at its byte 10"),
        (b'{"text": "a"', "it is not JSON"),
        (b'{"text": "a"} {"text": "b"}', "it is not JSON"),
        (b'{"text": NaN}', "it is not JSON"),
        (b'{"text": "a", "text": "b"}', "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_damaged_lines_are_refused(content: bytes, message: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(RowError, match=message):
        parse_row(content)
