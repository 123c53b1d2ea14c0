"""One check of the machine: what was found, what it means, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CheckResult", "Verdict", "checked", "noted", "wrong"]


class Verdict(StrEnum):
    """Whether a user has to do something."""

    OK = "ok"
    NOTE = "note"
    """Something is slower or less safe than it could be."""
    PROBLEM = "problem"
    """A run would be refused, or fail."""


@dataclass(frozen=True)
class CheckResult:
    """What was found of one thing."""

    area: str
    """`disk`, `memory`, `processor`, ..."""
    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def checked(area: str, name: str, found: str) -> CheckResult:
    """Return a result that is as it should be."""
    return CheckResult(area, name, Verdict.OK, found)


def noted(area: str, name: str, found: str, advice: str) -> CheckResult:
    """Return a result that is worth a word."""
    return CheckResult(area, name, Verdict.NOTE, found, advice)


def wrong(area: str, name: str, found: str, advice: str) -> CheckResult:
    """Return a result that would stop a run."""
    return CheckResult(area, name, Verdict.PROBLEM, found, advice)
