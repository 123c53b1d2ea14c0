"""docs/hf.md says of each argument what the code does, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from swaptrain.hf.arguments import FREE, MAPPED

PAGE = (Path(__file__).parents[2] / "docs/hf.md").read_text(encoding="utf-8")


def test_the_tables_have_each_argument() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M))
    assert {name: rows.get(name) for name in MAPPED} == MAPPED
    free = {
        name: about
        for names, about in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE, re.M)
        for name in re.findall(r"\w+", names)
    }
    assert {name: free.get(name) for name in FREE} == FREE


@pytest.mark.trains
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(code, "docs/hf.md", "exec"), {})
    assert get_last_checkpoint("out") == str(Path("out/checkpoint-12"))
