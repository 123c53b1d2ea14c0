"""Which rule updates which parameter: the `optimizer` section, and its groups by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import nn

from swaptrain.compute.optimizer_classes import optimizer_class
from swaptrain.compute.update import Rules, UpdateRule
from swaptrain.config.optimizer import OptimizerConfig, OptimizerGroup
from swaptrain.errors import ConfigError
from swaptrain.models.freeze import nearest
from swaptrain.program.row_ranges import range_of

__all__ = ["update_rules"]


def update_rules(optimizer: OptimizerConfig, seed: int, module: nn.Module | None = None) -> Rules:
    """Return the rules that an `optimizer` section asks for; raises ConfigError.

    A parameter is updated as the first group that matches one of its names says, else as the
    section does. Of a tied parameter only the `module` knows all names, and with it a pattern that
    matches no trained parameter is a ConfigError.
    """
    names = defaultdict[str, list[str]](list)
    if module is not None:
        first = {id(p): name for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[first[id(parameter)]].append(name)
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        _check_groups(optimizer, [names[own] for own in sorted(trained)])
    scratch: dict[torch.device, torch.Tensor] = {}
    own = UpdateRule(
        name=optimizer.name,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        arguments=optimizer.arguments,
        state=optimizer.state,
        seed=seed,
        scratch=scratch,
    )
    rules = []
    for number, group in enumerate(optimizer.groups or ()):
        try:
            rules.append((group, _rule_of(group, optimizer, seed, scratch)))
        except ConfigError as error:
            said = f"optimizer.groups.{number}"
            lines = str(error).split("\n")
            named = (re.sub(r"^optimizer(?=[.:])", said, line) for line in lines)
            raise ConfigError("\n".join(named)) from error

    @cache
    def rule(name: str) -> UpdateRule:
        own_range = None if name in names else range_of(name)
        whole = name if own_range is None else own_range.whole
        every = names.get(whole, [whole])
        return next((rule for group, rule in rules if _matches(group, every)), own)

    return rule


def _check_groups(optimizer: OptimizerConfig, parameters: Sequence[Sequence[str]]) -> None:
    """Refuse patterns that match none of the parameters, which have one name or several."""
    left, names = list(parameters), [name for own in parameters for name in own]
    for number, group in enumerate(optimizer.groups or ()):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"optimizer.groups.{number}.match: {pattern!r} matches no parameter that is "
                    f"trained; {nearest(pattern, names)}"
                )
        if not any(_matches(group, own) for own in left):
            raise ConfigError(
                f"optimizer.groups.{number}.match: all that it matches belongs to groups before "
                "it, and the first that matches a parameter counts: put it before them, or leave "
                "it out"
            )
        left = [own for own in left if not _matches(group, own)]


def _matches(group: OptimizerGroup, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in group.match)


def _rule_of(
    group: OptimizerGroup,
    base: OptimizerConfig,
    seed: int,
    scratch: dict[torch.device, torch.Tensor],
) -> UpdateRule:
    """Return the rule of a group.

    What it does not say is the section's: rate and state always, decay and arguments where both
    are of one class.
    """
    same = group.name is None or optimizer_class(group.name) is optimizer_class(base.name)
    decay = group.weight_decay
    if decay is None and same:
        decay = base.weight_decay
    return UpdateRule(
        name=group.name or base.name,
        lr=base.lr if group.lr is None else group.lr,
        weight_decay=decay,
        arguments={**(base.arguments if same else {}), **group.arguments},
        state=group.state or base.state,
        seed=seed,
        decays_all=group.weight_decay is not None,
        scratch=scratch,
    )
