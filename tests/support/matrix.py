"""Which cases of a matrix run when: a few by default, each pair in the proof, the whole by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["every", "matrix", "pairs", "proof_but"]


def proof_but(cases: Iterable[Any], *default: Any, whole: Iterable[Any] = ()) -> list[Any]:
    """Return the cases of one `parametrize`; only those in `default` run outside the proof.

    Those in `whole` run by hand alone.
    """
    listed, by_hand = list(cases), list(whole)
    assert all(case in listed for case in (*default, *by_hand))
    marks = {True: pytest.mark.whole, False: pytest.mark.proof}
    return [case if case in default else _with(case, marks[case in by_hand]) for case in listed]


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of one `parametrize`, of which every `nth` runs outside the proof."""
    return [case if not n % nth else _with(case, pytest.mark.proof) for n, case in enumerate(cases)]


def matrix(*factors: Iterable[Any], by_pairs: bool = True) -> list[Any]:
    """Return every combination of the factors' values, as cases of one `parametrize`.

    By default each value runs once. The proof adds cases until each pair of values of two factors
    has run; what is left is marked `whole`. So two factors run wholly in the proof. Without
    `by_pairs` the proof adds none: what is not run by default is `whole`.
    """
    listed = [tuple(factor) for factor in factors]
    by_default, proof = _diagonal(listed), pairs(*listed) if by_pairs else set[Any]()
    cases = []
    for values in product(*listed):
        marks: tuple[pytest.MarkDecorator, ...] = ()
        if values not in by_default:
            marks = (pytest.mark.proof if values in proof else pytest.mark.whole,)
        cases.append(pytest.param(*values, marks=marks))
    return cases


def pairs(*factors: Iterable[Any]) -> set[tuple[Any, ...]]:
    """Return combinations that hold each pair of values of two factors; the diagonal is in it."""
    listed = [tuple(factor) for factor in factors]
    candidates, chosen = list(product(*listed)), _diagonal(listed)
    left = set().union(*map(_pairs_of, candidates)).difference(*map(_pairs_of, chosen))
    while left:
        best = max(candidates, key=lambda values: len(left & _pairs_of(values)))
        chosen.add(best)
        left -= _pairs_of(best)
    return chosen


def _with(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)


def _diagonal(factors: Sequence[Sequence[Any]]) -> set[tuple[Any, ...]]:
    """Return as many combinations as the longest factor has values; each value is in one."""
    longest = max(map(len, factors))
    return {tuple(values[n % len(values)] for values in factors) for n in range(longest)}


def _pairs_of(values: tuple[Any, ...]) -> set[Any]:
    return set(combinations(enumerate(values), 2))
