"""Which tokens of a conversation are trained, against masks made by hand."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from swaptrain.chat.encode import EncodeSettings, RowEncoder
from swaptrain.chat.refusal import RowError
from tests.chat.conftest import MakeTokenizer
from tests.chat.templates import CHATML, CONVERSATION, MARKED, TEMPLATES


def trained(directory: Path, row: Any, **settings: Any) -> list[str]:
    """Return the pieces of a row's text that are trained."""
    encoder = RowEncoder(EncodeSettings(directory, **settings))
    found = encoder.encode(json.dumps(row).encode())
    tokens = zip(found.ids.tolist(), found.trained.tolist(), strict=True)
    groups = groupby(tokens, key=lambda token: token[1])
    return [encoder.tokenizer.decode([i for i, _ in group]) for on, group in groups if on]


def text_of(directory: Path, row: Any) -> str:
    """Return a row's text as the model reads it."""
    encoder = RowEncoder(EncodeSettings(directory))
    return encoder.tokenizer.decode(encoder.encode(json.dumps(row).encode()).ids.tolist())


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_turns_of_the_assistant_are_trained(name: str, make_tokenizer: MakeTokenizer) -> None:
    """Each turn with the token that ends it; nothing of the user, the headers, the prompts."""
    known = TEMPLATES[name]
    directory = make_tokenizer(known.source, eos_token=known.eos, bos_token=known.bos)
    row = {"messages": CONVERSATION}
    assert trained(directory, row) == list(known.trained)
    assert trained(directory, row, mask_history=True) == [known.trained[-1]]
    assert trained(directory, row, train_on="completion") == [known.trained[-1]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_what_transformers_renders(name: str, make_tokenizer: MakeTokenizer) -> None:
    """The ids are those of apply_chat_template."""
    from transformers import AutoTokenizer

    known = TEMPLATES[name]
    directory = make_tokenizer(known.source, eos_token=known.eos, bos_token=known.bos)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = RowEncoder(EncodeSettings(directory))
    ids = encoder.encode(json.dumps({"messages": CONVERSATION}).encode()).ids.tolist()
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        CONVERSATION, return_dict=False
    )
    assert ids == expected


def test_all_tokens_but_the_first_are_trained_on_request(make_tokenizer: MakeTokenizer) -> None:
    """No prediction is asked for what nothing precedes."""
    directory = make_tokenizer(CHATML)
    row = {"messages": CONVERSATION}
    assert trained(directory, row, train_on="all") == [
        text_of(directory, row).removeprefix("<|im_start|>")
    ]


def test_a_turn_of_weight_zero_is_not_trained(make_tokenizer: MakeTokenizer) -> None:
    """As in files for fine-tuning elsewhere."""
    messages = [dict(message) for message in CONVERSATION]
    messages[1]["weight"] = 0  # type: ignore[assignment]  # values of other kinds
    for template in (CHATML, MARKED):
        directory = make_tokenizer(template)
        assert trained(directory, {"messages": messages}) == ["Seven,\nI think.<|im_end|>"]


def test_a_conversation_that_the_assistant_begins(make_tokenizer: MakeTokenizer) -> None:
    """What comes before its first words is not its own; where that cannot be asked, it says so."""
    begun = [{"role": "assistant", "content": "Hello."}, *CONVERSATION]
    system = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    found = trained(make_tokenizer(system + CHATML), {"messages": begun})
    assert found[0] == "Hello.<|im_end|>"
    asks = "{% if messages[0].role != 'system' %}{{ 'Be kind.' }}{% endif %}"
    with pytest.raises(RowError, match="the chat template refuses it: UndefinedError"):
        trained(make_tokenizer(asks + CHATML), {"messages": begun})


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "a"}, {"train_on": "assistant"}, "it is text, of which nothing says"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, {"train_on": "all"}, "its labels say what"),
        ({"input_ids": [1, 2]}, {"train_on": "completion"}, "its labels say what is trained"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            {"train_on": "all"},
            r"has weight 0, and data\.train_on is all",
        ),
        (
            {"messages": CONVERSATION, "tools": [{"type": "function"}]},
            {},
            "it has tools, and the chat template does not take them",
        ),
    ],
)
def test_what_a_row_and_the_config_say_against_each_other_is_refused(
    row: Any, settings: dict[str, Any], message: str, make_tokenizer: MakeTokenizer
) -> None:
    """Neither is followed in silence."""
    with pytest.raises(RowError, match=message):
        trained(make_tokenizer(CHATML), row, **settings)


def test_a_message_that_a_template_passes_over_is_seen(make_tokenizer: MakeTokenizer) -> None:
    """It is as the template has it, and it is counted and said."""
    system = {"role": "system", "content": "Be kind."}
    directory = make_tokenizer(TEMPLATES["zephyr"].source)
    for messages, altered in ((CONVERSATION, False), ([system, *CONVERSATION], True)):
        row = json.dumps({"messages": messages}).encode()
        assert RowEncoder(EncodeSettings(directory)).encode(row).altered is altered


def test_empty_turns_and_tools(make_tokenizer: MakeTokenizer) -> None:
    """An empty answer is its end; what a tool says is not trained, a call of it is."""
    directory = make_tokenizer(CHATML)
    empty = [CONVERSATION[0], {"role": "assistant", "content": ""}]
    assert trained(directory, {"messages": empty}) == ["<|im_end|>"]
    calling = (
        "{% if tools %}{{ 'tools: ' + (tools | tojson) + '\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    row = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4."},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    directory = make_tokenizer(calling)
    assert trained(directory, row) == [json.dumps([call]) + "<|im_end|>", "It is 4.<|im_end|>"]
    assert text_of(directory, row).startswith('tools: [{"type": "function"')


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "is another text when that message follows",
            id="counts its messages",
        ),
        pytest.param(
            "{% for m in messages %}{{ '#' + m.content }}{% endfor %}"
            "{% for m in messages %}{{ m.content | length }}{% endfor %}",
            "is another text when that message follows",
            id="writes after all of them",
        ),
        pytest.param("{{ messages[99].content }}", "refuses it: UndefinedError", id="raises"),
        pytest.param("{{ raise_exception('no tools here') }}", "no tools here", id="says why"),
        pytest.param("{% for m in %}", "refuses it: TemplateSyntaxError", id="no template"),
        pytest.param(
            "{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses it: SecurityError", id="out"
        ),
    ],
)
def test_what_cannot_be_told_exactly_is_refused(
    template: str, message: str, make_tokenizer: MakeTokenizer
) -> None:
    """Never a mask that is about right."""
    with pytest.raises(RowError, match=message):
        trained(make_tokenizer(template), {"messages": CONVERSATION})


def test_a_token_of_two_turns_is_refused(tmp_path: Path) -> None:
    """A token that is partly the user's has no side; white space before a turn has none either."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"a": 0, "b": 1, "ab": 2, " ": 3, " b": 4, "</s>": 5}
    backend = Tokenizer(models.BPE(vocab=words, merges=[("a", "b"), (" ", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert trained(tmp_path, {"prompt": "a ", "completion": "b"}) == [" b</s>"]
    with pytest.raises(RowError, match="its token 'ab' is partly of a turn"):
        trained(tmp_path, {"prompt": "a", "completion": "b"})


def test_rows_without_a_template(make_tokenizer: MakeTokenizer) -> None:
    """A prompt and its completion, text, and ids need none; conversations say what is missing."""
    directory = make_tokenizer(None)
    assert trained(directory, {"prompt": "2+2=", "completion": "4"}) == ["4</s>"]
    assert trained(directory, {"text": "abc"}) == ["bc</s>"]
    assert trained(directory, {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}) == [
        RowEncoder(EncodeSettings(directory)).tokenizer.decode([3])
    ]
    with pytest.raises(RowError, match=r"has no chat template: set data\.chat_template"):
        trained(directory, {"messages": CONVERSATION})
    given = trained(directory, {"messages": CONVERSATION}, template=CHATML)
    assert given == ["Four. <|im_end|>", "Seven,\nI think.<|im_end|>"]


def test_half_a_character_is_refused(make_tokenizer: MakeTokenizer) -> None:
    """JSON can spell what UTF-8 cannot."""
    with pytest.raises(RowError, match=r"it holds '\\ud800', half of a pair"):
        trained(make_tokenizer(None), {"text": "a\ud800"})


def test_an_instruction_is_a_question_of_the_user(make_tokenizer: MakeTokenizer) -> None:
    """Its input follows it, and its output is the completion."""
    directory = make_tokenizer(CHATML)
    row = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    assert trained(directory, row) == ["4<|im_end|>"]
    assert "<|im_start|>user\nAdd.\n\n2, 2<|im_end|>" in text_of(directory, row)
