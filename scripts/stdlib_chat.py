"""Write conversations about Python's standard library: its functions, and what they say they do.

A row is one module: a question about each of some of its functions, and the first paragraph of its
docstring as the answer. Some thousands of turns of real text that every machine has.

    python scripts/stdlib_chat.py                   # writes runs/stdlib_chat.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TURNS = 3
"""Questions of one conversation."""


def main() -> None:
    """Write the rows and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/stdlib_chat.jsonl"))
    to: Path = parser.parse_args().to
    to.parent.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    rows = [row for file in sorted(library.glob("*.py")) for row in conversations(file)]
    to.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows):,} conversations in {to}")


def conversations(file: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the conversations about one module."""
    answers = list(answered(ast.parse(file.read_bytes()), file.stem))
    for begin in range(0, len(answers), TURNS):
        turns = []
        for name, answer in answers[begin : begin + TURNS]:
            turns.append({"role": "user", "content": f"What does {name} do?"})
            turns.append({"role": "assistant", "content": answer})
        yield turns


def answered(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each documented function of a module, and its first paragraph."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and not node.name.startswith("_"):
            yield f"{module}.{node.name}", " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    main()
