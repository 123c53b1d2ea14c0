"""Versions of what swaptrain needs, and which of its extras are installed."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from swaptrain.config.schema import Config
from swaptrain.verbs.checkup.result import CheckResult, checked, noted, wrong

__all__ = ["Requirements", "check_packages", "judge", "requirements"]

_PROJECT = Path(__file__).parents[3] / "pyproject.toml"
_LEFT_OUT = "dev"
Requirements = dict[str, list[Requirement]]
"""By extra, with those that are always needed under an empty name."""


def check_packages(config: Config | None) -> Iterator[CheckResult]:
    """Yield what is found of Python, of packages, and of extras that a config may need."""
    wanted, python = requirements()
    version = platform.python_version()
    if SpecifierSet(python).contains(version, prereleases=True):
        yield checked("versions", "python", version)
    else:
        yield wrong("versions", "python", f"{version}, {python} is asked for", "install that one")
    if not wanted:
        advice = "install it: pip install swaptrain"
        yield noted("versions", "packages", "no metadata of swaptrain is installed", advice)
    versions = installed([one.name for group in wanted.values() for one in group])
    for requirement in wanted.pop("", []):
        yield judge(requirement, versions.get(requirement.name))
    needed = _needed(config)
    for extra, group in wanted.items():
        yield _extra(extra, group, versions, is_needed=extra in needed)


def requirements() -> tuple[Requirements, str]:
    """Return what swaptrain asks for, and of Python.

    By the project file beside the package, since the metadata of an editable installation are those
    of its day; else by the metadata. Nothing and an empty text where there is neither.
    """
    lines, python = _of_project() or _of_metadata()
    groups: Requirements = {}
    for requirement in map(Requirement, lines):
        extra = _extra_of(requirement)
        if extra != _LEFT_OUT:
            groups.setdefault(extra, []).append(requirement)
    return groups, python


def _of_project() -> tuple[list[str], str] | None:
    try:
        project = tomllib.loads(_PROJECT.read_text())["project"]
    except (OSError, ValueError, KeyError):
        return None
    if project.get("name") != "swaptrain":
        return None
    lines = [*project["dependencies"]]
    for extra, group in project["optional-dependencies"].items():
        lines += [f"{line}; extra == '{extra}'" for line in group]
    return lines, project["requires-python"]


def _of_metadata() -> tuple[list[str], str]:
    try:
        found = metadata.metadata("swaptrain")
    except metadata.PackageNotFoundError:
        return [], ""
    return found.get_all("Requires-Dist") or [], found["Requires-Python"] or ""


def installed(names: list[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def judge(requirement: Requirement, version: str | None) -> CheckResult:
    """Judge the version of a package that is always needed."""
    name, asked = requirement.name, str(requirement.specifier)
    command = f"pip install '{name}{asked}'"
    if version is None:
        return wrong("versions", name, f"not installed, {asked} is asked for", command)
    if not requirement.specifier.contains(version, prereleases=True):
        return wrong("versions", name, f"{version}, {asked} is asked for", command)
    return checked("versions", name, version)


def _extra(
    extra: str, group: list[Requirement], versions: Mapping[str, str], *, is_needed: bool
) -> CheckResult:
    command = f"pip install 'swaptrain[{extra}]'"
    said = []
    for requirement in group:
        version = versions.get(requirement.name)
        if version is None:
            said.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            said.append(f"{requirement.name} {version}, {requirement.specifier} is asked for")
    if not said:
        own = ", ".join(f"{one.name} {versions[one.name]}" for one in group)
        return checked("extras", extra, own)
    if is_needed:
        return wrong("extras", extra, f"{', '.join(said)}, and the config needs it", command)
    return noted("extras", extra, ", ".join(said), command)


def _needed(config: Config | None) -> set[str]:
    """Return the extras that a config cannot do without."""
    if config is None:
        return set()
    return {*config.train.report_to, *(["lora"] if config.lora is not None else [])}


def _extra_of(requirement: Requirement) -> str:
    """Return the extra that a requirement belongs to; empty for one that is always needed."""
    if requirement.marker is None:
        return ""
    _, found, text = str(requirement.marker).partition("extra == ")
    return text.strip().strip("\"'") if found else ""
