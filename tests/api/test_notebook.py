"""In a notebook a run is one line that is written anew, executed as `jupyter nbconvert` does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.trains]

CELLS = (
    """
import torch, swaptrain
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.a(x), y)

data = [{"x": torch.randn(8), "y": torch.tensor(i % 4)} for i in range(32)]
""",
    'given = {"dir": "run", "steps": 9, "micro_batch": 4, "memory": "64MiB"}\n'
    "run = swaptrain.train(model=Net, data=data, **given)",
    "run",
)


def test_a_notebook_shows_one_line(tmp_path: Path) -> None:
    """Of all steps the last; what is said before is text."""
    pytest.importorskip("nbconvert", reason="needs pip install nbconvert ipykernel")
    pytest.importorskip("ipykernel", reason="needs pip install nbconvert ipykernel")
    cells = [
        {"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "id": f"c{number}",
         "execution_count": None}
        for number, text in enumerate(CELLS)
    ]  # fmt: skip
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "in.ipynb").write_text(json.dumps(book))
    command = ["nbconvert", "--to", "notebook", "--execute", "in.ipynb", "--output", "out.ipynb"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, trained, shown = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    (line,) = [o["data"]["text/plain"] for o in trained["outputs"] if "data" in o]
    assert "".join(line).startswith("step 9/9 | loss ")
    (result,) = shown["outputs"]
    assert "step 9>" in "".join(result["data"]["text/plain"])
