"""The cases that are left out of a matrix are those that its rules say."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.support.matrix import every, matrix, pairs, proof_but

FACTORS = (("a", "b", "c"), (1, 2), ("x", "y", "z", "w"), (True, False))


def marks(cases: list[object]) -> dict[tuple[object, ...], list[str]]:
    return {case.values: [mark.name for mark in case.marks] for case in cases}  # type: ignore[attr-defined]


def test_the_default_holds_each_value_and_the_proof_each_pair() -> None:
    """And nothing is left out of the whole."""
    found = marks(matrix(*FACTORS))
    assert len(found) == 3 * 2 * 4 * 2
    default = [values for values, names in found.items() if not names]
    proof = [values for values, names in found.items() if names != ["whole"]]
    assert len(default) == 4 and len(proof) < 20
    for position, factor in enumerate(FACTORS):
        assert {values[position] for values in default} == set(factor)
    for (i, left), (j, right) in combinations(enumerate(FACTORS), 2):
        assert {(v[i], v[j]) for v in proof} == {(a, b) for a in left for b in right}
    assert set(proof) == pairs(*FACTORS)


def test_two_factors_run_wholly_in_the_proof() -> None:
    found = marks(matrix(*FACTORS[:2]))
    assert sorted(found.values()) == [[], [], [], ["proof"], ["proof"], ["proof"]]


def test_what_is_not_named_waits_for_the_proof() -> None:
    one, two = proof_but(["one", "two"], "two")
    assert two == "two" and one.marks[0].name == "proof"
    with pytest.raises(AssertionError):
        proof_but(["one"], "three")
    some = every(2, [("a", 1), ("b", 2), ("c", 3)])
    assert some[0] == ("a", 1) and some[2] == ("c", 3)
    assert some[1].values == ("b", 2) and some[1].marks[0].name == "proof"
