"""Make the pictures of README from a run: the live line of a terminal, and the page of `report`.

Trains `configs/quickstart.yaml` in a folder that is deleted afterwards, or in that of `--run`, with
a trace, and with its output on a terminal of 110 columns. Needs `pip install 'swaptrain[report]'`
and Chromium.

    python scripts/pictures.py --to docs/pictures
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 110, 40
LINES = 6
"""Last lines of the output that the picture has."""
MOST_BYTES = 200_000


def terminal_output(command: Sequence[str]) -> str:
    """Run a command on a terminal of its own; return all that it wrote there."""
    ours, theirs = pty.openpty()
    size = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=size, cwd=ROOT) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the terminal is closed at the end of the process
                break
            if not piece:
                break
            found += piece
    os.close(ours)
    if process.returncode:
        raise SystemExit(found.decode(errors="replace")[-2_000:])
    return found.decode(errors="replace")


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows in the middle of a step: the last such moment."""
    lines = [""]
    row = 0
    best: list[str] = []
    position = 0
    while position < len(output):
        sign = output[position]
        position += 1
        if sign == "\x1b" and output[position : position + 1] == "[":
            end = position + 1
            while end < len(output) and not output[end].isalpha():
                end += 1
            code, count = output[end : end + 1], output[position + 1 : end]
            if code == "A":
                row = max(0, row - int(count or 1))
            elif code == "K":
                lines[row] = ""
            elif code == "m":
                lines[row] += output[position - 1 : end + 1]
            position = end + 1
        elif sign == "\r":
            pass
        elif sign == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        else:
            lines[row] += sign
            if _is_live(lines[row]) and _step(lines[row]) == 1 + _step(lines[row - 1]):
                best = lines[max(0, row - LINES + 1) : row + 1].copy()
    return best or lines[-LINES:]


def _is_live(line: str) -> bool:
    """Whether a line is the one of a step that is under way, in the middle of its backward."""
    return "backward" in line and "━" in line and " s" in line and "segment 5/" in line


def _step(line: str) -> int:
    """Return the step that a line is about, 0 where it is about none."""
    found = re.search(r"step ([0-9]+)/", line)
    return int(found[1]) if found else 0


def picture_of_lines(lines: Sequence[str], to: Path) -> None:
    """Write lines with their colours as SVG."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    with nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line))
        text = console.export_svg(title="python -m swaptrain --config configs/quickstart.yaml")
    to.write_text(text)


def picture_of_page(page: Path, to: Path) -> None:
    """Write the first screens of a page as PNG, in few colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = ["--window-size=1240,2080", f"--screenshot={to.absolute()}"]
    command = [browser, *flags, *size, page.absolute().as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    with Image.open(to) as picture:
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(to, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures", metavar="FOLDER")
    parser.add_argument(
        "--run", type=Path, help="train here instead, and go on with the run that is there"
    )
    parser.add_argument("--steps", type=int, default=160, help="to train (default 160)")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder) / "quickstart"
        swaptrain = [sys.executable, "-m", "swaptrain"]
        config = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
        keys = [f"run.dir={run}", f"train.steps={options.steps}", "run.trace=3"]
        lines = screen(terminal_output([*swaptrain, *config, *keys]))
        shown = [line.replace(str(run), "runs/quickstart") for line in lines]
        picture_of_lines(shown, options.to / "terminal.svg")
        page = Path(folder) / "report.html"
        subprocess.run([*swaptrain, "report", str(run), "--to", page], check=True)
        picture_of_page(page, options.to / "report.png")
    for picture in sorted(options.to.iterdir()):
        if picture.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{picture} has {picture.stat().st_size:,} bytes")
        print(picture)


if __name__ == "__main__":
    main()
