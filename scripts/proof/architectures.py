"""Trains a tiny model of each architecture, and compares it with plain PyTorch.

    python scripts/proof/architectures.py --to FOLDER [--only NAME ...] [--jobs 2]
    python scripts/proof/architectures.py --to FOLDER --table

Each architecture has a process of its own (architecture_try.py). FOLDER, on a real disk, gets the
rows in architectures.json and a log of each process; the runs are deleted. --table writes the rows
into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from architecture_configs import ARCHITECTURES
from architecture_table import COLUMNS, Results, versions, write_page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300
"""Longest time that one architecture may take."""


def main() -> None:
    """Try the architectures that are asked for, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="a folder on a real disk")
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--table", action="store_true", help="write the rows into docs/models.md")
    chosen = parser.parse_args()
    chosen.to.mkdir(parents=True, exist_ok=True)
    path = chosen.to / "architectures.json"
    if chosen.table:
        write_page(Results.read(path), ROOT / "docs" / "models.md")
        return
    results = Results(versions(), {})
    if chosen.only and path.exists():
        results = Results.read(path)
        results.check(versions())
    begun = time.perf_counter()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for name, row in pool.map(lambda n: (n, tried(n, chosen.to)), chosen.only or ARCHITECTURES):
            results.rows[name] = row
            results.write(path)
            print(name, *(row[column] for column in COLUMNS), sep=" | ", flush=True)
    print(f"{results.summary()} {time.perf_counter() - begun:.0f} s.")


def tried(name: str, folder: Path) -> dict[str, str]:
    """Try one architecture in a process of its own; return its row."""
    scratch = folder / name.replace(" ", "-")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [sys.executable, str(HERE / "architecture_try.py"), name, str(scratch)]
    row = dict.fromkeys(COLUMNS, "-") | {"class": ARCHITECTURES[name].head, "trains": "no"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        (folder / f"{scratch.name}.log").write_text(done.stdout + done.stderr)
        found = [line for line in done.stdout.splitlines() if line.startswith('{"class"')]
        row |= json.loads(found[-1]) if found else {"refused": _last_line(done.stderr)}
    except subprocess.TimeoutExpired:
        row["refused"] = f"took more than {LIMIT_S} s"
    shutil.rmtree(scratch, ignore_errors=True)
    return row


def _last_line(stderr: str) -> str:
    """Return what a process that failed said last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"the script failed: {lines[-1] if lines else 'without a word'}"


if __name__ == "__main__":
    main()
