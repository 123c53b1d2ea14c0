"""The snippets of docs/python.md run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.stored.test_pretrained import saved
from tests.models.test_resize import tokenizer
from tests.whole.test_exactness import LLAMA

PAGE = Path(__file__).parents[2] / "docs" / "python.md"

pytestmark = pytest.mark.trains


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run(code: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(code)
    root = str(PAGE.parents[1])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.proof
def test_the_network_learns_and_is_watched(tmp_path: Path) -> None:
    """The first example, and that of callbacks behind it, in one script."""
    pytest.importorskip("sklearn", reason="the example's digits are scikit-learn's")
    network, watched = (s for s in snippets() if "Net" in s)
    network = network.replace("steps=60", "steps=20").replace("eval_every=20", "eval_every=10")
    out = run(network + watched.replace("steps=60", "steps=2"), tmp_path)
    assert float(out.splitlines()[-1]) > 0.5
    assert (tmp_path / "runs" / "watched" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.proof
def test_adapters_are_trained_on_a_directory(tmp_path: Path) -> None:
    """On a small model with a tokenizer of words."""
    pytest.importorskip("peft", reason="adapters are PEFT's")
    base = saved({**LLAMA, "vocab_size": 64, "max_position_embeddings": 64}, tmp_path / "base")
    words = tokenizer(tmp_path / "words", 64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((words / name).read_bytes())
    (code,) = (s for s in snippets() if "lora=" in s)
    words_of_it = {"path/to/model": str(base), "What is 2 + 2?": "w1 w2", "What is 3 + 3?": "w1 w3"}
    for text, other in (words_of_it | {" 4.": " w5 w6", " 6.": " w7 w8"}).items():
        code = code.replace(text, other)
    run(f"import swaptrain\n{code}", tmp_path / "there")
    assert (tmp_path / "there" / "adapter" / "adapter_model.safetensors").exists()
