"""Print what the check of the commit protocol finds.

python -m tests.protocol            the small runs, and each rule left out
python -m tests.protocol --large    the larger ones as well: minutes
"""

from __future__ import annotations

import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from tests.protocol.checker import Report, check
from tests.protocol.needs import NEEDED_BY, without
from tests.protocol.scenarios import LARGE, SMALL


def main() -> int:
    """Print both tables; return 1 if a state is lost, or none is without a rule."""
    console = Console(width=100)
    table = _table("run", "states", "ways to end", "disks", "recoveries", "lost", "again", "s")
    total, begun = Report("all"), time.monotonic()
    for scenario in [*SMALL, *(LARGE if "--large" in sys.argv else [])]:
        started = time.monotonic()
        report = check(scenario)
        _add(table, report, time.monotonic() - started)
        total.states += report.states
        total.crashes += report.crashes
        total.disks += report.disks
        total.recoveries += report.recoveries
        total.lost += report.lost
        total.repeated = max(total.repeated, report.repeated)
    _add(table, total, time.monotonic() - begun)
    console.print(table)
    table, useless = _table("without this rule", "recoveries", "lost"), 0
    for rule, scenario in NEEDED_BY.items():
        report = check(scenario, without(rule), limit=4000)
        whole = "" if report.whole else " and more"
        table.add_row(rule.value, f"{report.recoveries}{whole}", str(report.lost_count))
        useless += not report.lost_count
    console.print(table)
    return 1 if total.lost_count or useless else 0


def _table(name: str, *numbers: str) -> Table:
    table = Table(name, box=box.SIMPLE_HEAD)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _add(table: Table, report: Report, seconds: float) -> None:
    numbers = [report.states, report.crashes, report.disks, report.recoveries, report.lost_count]
    shown = (f"{number:,}" for number in (*numbers, report.repeated))
    table.add_row(report.scenario, *shown, f"{seconds:.1f}")


if __name__ == "__main__":
    sys.exit(main())
