"""The rows of scripts/proof/architectures.py: kept in a file, and shown in docs/models.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill

import torch
import transformers

__all__ = ["COLUMNS", "Results", "versions", "write_page"]

COLUMNS = ("class", "trains", "begins", "float32", "bfloat16", "export", "re-import")
COLUMNS += ("packs", "refused")
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def versions() -> dict[str, str]:
    """Return what the last bits depend on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Results:
    """Rows by the name of an architecture."""

    versions: dict[str, str]
    rows: dict[str, dict[str, str]]

    @staticmethod
    def read(path: Path) -> Results:
        """Return the results of an earlier run."""
        return Results(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write the results so that `read` finds them."""
        path.write_text(json.dumps(asdict(self), indent=1))

    def check(self, now: dict[str, str]) -> None:
        """Refuse to mix rows of several versions or processors."""
        if self.versions != now:
            raise SystemExit(f"the rows are those of {self.versions}: run all, without --only")

    def summary(self) -> str:
        """Return how many there are of each kind."""
        trains = sum(row["trains"] == "yes" for row in self.rows.values())
        bits = sum(row["float32"] == "bits" for row in self.rows.values())
        made_with = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{len(self.rows)} architectures: {trains} train, {bits} of them in float32 with the "
            f"bits of plain PyTorch ({made_with})."
        )


def write_page(results: Results, page: Path) -> None:
    """Put the rows between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no {BEGIN} and {END}")
    page.write_text("\n".join([before + BEGIN, "", *_lines(results), "", END + after]))


def _lines(results: Results) -> list[str]:
    """Return the summary, the table, and what the refusals say."""
    shown = COLUMNS[:-1]
    lines = [
        results.summary(),
        "",
        _cells(["architecture", *shown]),
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, row in results.rows.items():
        lines.append(_cells([name, f"`{row['class']}`", *(row[c] for c in shown[1:])]))
    refused = {name: row["refused"] for name, row in results.rows.items() if row["refused"] != "-"}
    if refused:
        lines += ["", "What the refusals say:", ""]
        lines += [_wrapped(f"- **{name}**: `{message}`") for name, message in refused.items()]
    return lines


def _wrapped(text: str) -> str:
    return fill(text, 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
