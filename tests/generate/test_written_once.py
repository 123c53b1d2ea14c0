"""A text that begins again is not written twice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swaptrain.generate.written_once import WrittenOnce

Attempts = list[list[str]]


def written(attempts: Attempts) -> tuple[str, int]:
    """Return what is written of the attempts, and how often a text is said to be another."""
    parts: list[str] = []
    notes: list[str] = []
    once = WrittenOnce(parts.append, notes.append)
    for attempt in attempts:
        once.begin()
        for part in attempt:
            once(part)
    return "".join(parts), len(notes)


@given(st.text("ab", min_size=1), st.lists(st.lists(st.integers(0, 9)), max_size=4))
def test_the_same_text_is_written_once(text: str, cuts: list[list[int]]) -> None:
    """However often it begins again, and in whatever parts it comes."""
    attempts: Attempts = []
    for found in [*cuts, []]:
        places = [0, *sorted(min(cut, len(text)) for cut in found)]
        places += [len(text)] if found == [] else []
        attempts.append([text[a:b] for a, b in pairwise(places)])
    assert written(attempts) == (text, 0)


def test_another_text_begins_on_a_new_line() -> None:
    """Also where it is a shorter one, and it is said each time."""
    assert written([["so it "], ["so ", "was it\n"]]) == ("so it \nso was it\n", 1)
    assert written([["so it "], ["so\n"], ["no\n"]]) == ("so it \nso\nno\n", 2)
