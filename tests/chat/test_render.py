"""A conversation to answer is rendered within limits, in a process that ends."""

from __future__ import annotations

from typing import Any

import pytest

from swaptrain.chat import ChatTemplate, RowError, render_prompts
from tests.chat.templates import CHATML, CONVERSATION

pytestmark = pytest.mark.trains  # starts processes
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_the_text_is_that_of_the_template() -> None:
    """Of several conversations, in order; each ends where the assistant begins."""
    template = ChatTemplate(CHATML, {})
    conversations: list[Any] = [CONVERSATION, CONVERSATION[:1]]
    expected = [template.render(one, None, prompt=True) for one in conversations]
    assert render_prompts(template, conversations) == expected


@pytest.mark.parametrize(
    ("source", "most_row_s", "message"),
    [
        pytest.param(LOOPS, 1.0, "more than 1 s: does the chat template end", id="loops"),
        pytest.param("{{ 'x' * 20000000000 }}", 9.0, "more than 4 GiB", id="allocates"),
        pytest.param(LOOPS, 1000.0, "was ended: the chat template", id="is not to be interrupted"),
        pytest.param("{{ raise_exception('no') }}", 9.0, "the chat template refuses", id="refuses"),
    ],
)
def test_a_template_is_stopped(source: str, most_row_s: float, message: str) -> None:
    """By a signal, or with its process."""
    with pytest.raises(RowError, match=message) as caught:
        render_prompts(
            ChatTemplate(source, {}), [CONVERSATION], most_row_s=most_row_s, most_all_s=3
        )
    assert "\n" not in str(caught.value)
