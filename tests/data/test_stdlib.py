"""The text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import os

import pytest

from swaptrain.data.corpus import find_files
from swaptrain.errors import ConfigError


def test_stdlib_stands_for_the_directory_of_the_standard_library() -> None:
    """The glob finds the very files that this Python imports, also in a virtual environment."""
    paths = {file.path for file in find_files(["{stdlib}/*.py"], key="data.text")}
    assert os.path.abspath(os.__file__) in paths
    assert len(paths) > 50
    alone = find_files(["{stdlib}/os.py"], key="data.text")
    assert [file.path for file in alone] == [os.path.abspath(os.__file__)]


def test_stdlib_is_nothing_special_elsewhere() -> None:
    """Only a leading one is replaced, and the refusal shows what the user wrote."""
    with pytest.raises(ConfigError, match=r"data.text: no file matches 'x/\{stdlib\}/os.py'"):
        find_files(["x/{stdlib}/os.py"], key="data.text")
    with pytest.raises(ConfigError, match=r"no file matches '\{stdlib\}/nothing.py'"):
        find_files(["{stdlib}/nothing.py"], key="data.text")
