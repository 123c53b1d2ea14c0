"""The role of an array: read from its name in one function, and nowhere else in the package.

What an object is of, no name says at all: its key has a field for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import swaptrain
from swaptrain.program.instructions import Kind, ObjectKey, Of
from swaptrain.program.roles import Role, role_of

PACKAGE = Path(swaptrain.__file__).parent
OWNER = PACKAGE / "program" / "roles.py"
LABELS = PACKAGE / "program" / "instructions.py"
STEMS = "|".join(role.value for role in Role if role.value)
QUESTION = re.compile(rf"""(startswith\(\(?|==\s*|\bin\s*[({{\[])f?["'](?:{STEMS})_?["']""")
PREFIX = re.compile(r"""["'](?:before|parameter)\.""")


@pytest.mark.parametrize(
    ("array", "role"),
    [
        ("weights", Role.WEIGHTS),
        ("weights_float32", Role.WEIGHTS),
        ("frozen", Role.FROZEN),
        ("frozen_bfloat16", Role.FROZEN),
        ("buffers_int64", Role.BUFFERS),
        ("remainder", Role.REMAINDER),
        ("exp_avg", Role.OPTIMIZER),
        ("momentum_buffer", Role.OPTIMIZER),
    ],
)
def test_a_name_says_the_role(array: str, role: Role) -> None:
    assert role_of(array) is role
    assert role_of(role.array("float32")) is role


def test_nobody_else_asks_a_name() -> None:
    """So that a new role is added in one place."""
    files = [path for path in PACKAGE.rglob("*.py") if path != OWNER]
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if QUESTION.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ['name.startswith("weights")', 'x.startswith(("frozen", y))', 'a == "remainder"'],
)
def test_such_a_question_is_found(line: str) -> None:
    assert QUESTION.search(line)


def test_a_label_says_what_an_object_is_of() -> None:
    """Two objects of one name have different labels, and so different files."""
    labels = {ObjectKey(Kind.GRADIENT, "w", 1, 0, of=of).label for of in Of}
    assert labels == {"w", "before.w", "parameter.w"}  # evaluations have a folder of their own
    assert str(ObjectKey(Kind.VALUE, "b", 3, 1, of=Of.BUFFERS_BEFORE)) == "value/003/before.b[1]"


def test_nobody_else_makes_or_takes_apart_a_label() -> None:
    """The field `of` is asked instead, so that no name can be mistaken for another."""
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path != LABELS
        for line in path.read_text(encoding="utf-8").splitlines()
        if PREFIX.search(line)
    ]
    assert found == []
    assert PREFIX.search(LABELS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        'if key.name.startswith("before."):',
        'layouts[f"before.{array.name}.{k}"] = array',
        "name = key.name.removeprefix('parameter.')",
        'return f"parameter.{name}"',
    ],
)
def test_such_a_prefix_is_found(line: str) -> None:
    assert PREFIX.search(line)
