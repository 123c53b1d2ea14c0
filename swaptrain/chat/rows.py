"""What a row is, found by its columns: a conversation, a prompt and its completion, text, ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swaptrain.chat.refusal import RowError
from swaptrain.strict_json import parse_json
from swaptrain.units import how_many

__all__ = ["Conversation", "Document", "Message", "Prompted", "Ready", "Row", "parse_row"]

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SPEAKERS = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Who speaks in rows with `from` and `value`."""
_COLUMNS = (
    "messages; conversations; input_ids and labels; prompt and completion; instruction, input and "
    "output; or text"
)


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them; those before `prompt` are never trained."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    is_completion: bool = False
    """Whether the row says itself what its completion is: the messages from `prompt` on."""


@dataclass(frozen=True)
class Prompted:
    """Text that is followed by the text that is trained; no template is asked."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text, all of it trained."""

    text: str


@dataclass(frozen=True)
class Ready:
    """Token ids, and labels of which -100 is not trained."""

    ids: list[int]
    labels: list[int]


Row = Conversation | Prompted | Document | Ready


def parse_row(content: bytes) -> Row:
    """Return a row of JSON; raises RowError."""
    if b"\0" in content:
        raise RowError(f"it holds a NUL, at its byte {content.index(0)}: it is damaged")
    try:
        row = parse_json(content)
    except UnicodeDecodeError as error:
        raise RowError(f"it is not UTF-8, at its byte {error.start}") from error
    except ValueError as error:
        raise RowError(f"it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RowError(f"it is {_kind(row)}, not an object with columns")
    return _recognised({name: value for name, value in row.items() if value is not None})


def _recognised(row: Mapping[str, Any]) -> Row:
    if "messages" in row:
        return Conversation(_messages(row["messages"], "messages"), _tools(row))
    if "conversations" in row:
        return Conversation(_spoken(row["conversations"], row.get("system")), _tools(row))
    if "input_ids" in row:
        return _ready(row["input_ids"], row.get("labels", row["input_ids"]))
    if "prompt" in row and "completion" in row:
        return _prompted(row)
    if "instruction" in row and "output" in row:
        return _instruction(row)
    if "text" in row:
        return Document(_text(row["text"], "text"))
    if "prompt" in row and "chosen" in row:
        raise RowError(
            "it holds preferences (chosen, rejected), and training here is on one answer"
        )
    raise RowError(f"its columns are {', '.join(row) or 'none'}; it needs {_COLUMNS}")


def _prompted(row: Mapping[str, Any]) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Prompted(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        messages = before + _messages(completion, "completion")
        return Conversation(messages, _tools(row), len(before), is_completion=True)
    raise RowError("its prompt and completion are neither two texts nor two lists of messages")


def _instruction(row: Mapping[str, Any]) -> Row:
    asked = _text(row["instruction"], "instruction")
    more = row.get("input", "")
    if more:
        asked += "\n\n" + _text(more, "input")
    messages = [{"role": "user", "content": asked}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    messages.append({"role": "assistant", "content": _text(row["output"], "output")})
    return Conversation(messages, None, len(messages) - 1, is_completion=True)


def _messages(found: Any, column: str) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise RowError(f"its {column} is {_kind(found)}, not a list of messages")
    return [_message(message, number) for number, message in enumerate(found, 1)]


def _message(message: Any, number: int) -> Message:
    """Return a message with text or parts of text; raises RowError."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(f"its message {number} has no role")
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise RowError(f"its message {number} has the role {role!r}; known: {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = [part.get("type") if isinstance(part, dict) else None for part in content]
        if any(part != "text" for part in parts):
            raise RowError(f"its message {number} has parts that are no text: {parts}")
    elif content is None:
        if not any(message.get(name) for name in ("tool_calls", "reasoning_content", "thinking")):
            raise RowError(f"its message {number} ({role}) has no content")
    elif not isinstance(content, str):
        raise RowError(f"its message {number} has {_kind(content)} as its content")
    if message.get("weight") not in (None, 0, 1):
        raise RowError(
            f"its message {number} has the weight {message['weight']!r}: known are 0, which is not "
            "trained, and 1"
        )
    kept = {name: value for name, value in message.items() if value is not None}
    return kept if content is not None else {**kept, "content": ""}


def _spoken(found: Any, system: Any) -> list[Message]:
    """Return the messages of `conversations: [{from, value}]`, or of messages under that name."""
    if not isinstance(found, list) or not found:
        raise RowError(f"its conversations is {_kind(found)}, not a list of turns")
    if isinstance(found[0], dict) and "role" in found[0]:
        return _messages(found, "conversations")
    messages: list[Message] = []
    for number, turn in enumerate(found, 1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise RowError(f"its turn {number} has no from and value")
        role = _SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            known = ", ".join(_SPEAKERS)
            raise RowError(f"its turn {number} is from {turn['from']!r}; known: {known}")
        text = _text(turn["value"], f"turn {number}")
        messages.append(_message({"role": role, "content": text} | _weight(turn), number))
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(system, "system")})
    return messages


def _weight(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight": turn["weight"]} if turn.get("weight") is not None else {}


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # as some files have them, so that all rows are of one kind
        try:
            tools = parse_json(tools.encode())
        except ValueError as error:
            raise RowError(f"its tools are not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("its tools are not a list of objects")
    return tools


def _ready(ids: Any, labels: Any) -> Ready:
    for name, numbers in (("input_ids", ids), ("labels", labels)):
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            raise RowError(f"its {name} are not a list of whole numbers")
    if len(ids) != len(labels):
        raise RowError(f"it has {len(ids)} input_ids and {how_many(len(labels), 'label')}")
    for place, (number, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (number, -100):
            raise RowError(
                f"its label {place} is {label}, neither the id {number} of its token nor -100: "
                "give such data by data.python"
            )
    return Ready(ids, labels)


def _text(found: Any, column: str) -> str:
    if not isinstance(found, str):
        raise RowError(f"its {column} is {_kind(found)}, not text")
    return found


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), "a number")
