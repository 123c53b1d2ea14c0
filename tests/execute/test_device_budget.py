"""A device budget that cannot work is refused with the number that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from swaptrain.errors import BudgetError
from swaptrain.execute.device_budget import check_device_budget
from swaptrain.execute.prepare import Prepared
from swaptrain.units import parse_size
from tests.support.runs import config_of


def test_the_number_in_the_refusal_is_accepted(tmp_path: Path) -> None:
    """One byte is refused; the size that the message names is not."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "32KiB"},
    }
    plan = Prepared(config_of(tmp_path / "run", tree), None, lambda _: None).plan
    program = plan.builder.step()
    with pytest.raises(BudgetError, match="set memory") as refusal:
        check_device_budget(1, plan.captured, plan.layouts, program)
    named = str(refusal.value).split("set memory.device to ")[1].split(",")[0]
    check_device_budget(parse_size(named), plan.captured, plan.layouts, program)
