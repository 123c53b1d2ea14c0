"""The `optimizer` section: its schedule, its groups, and arguments of a class of torch."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, model_validator

from swaptrain.config.kinds import (
    Count,
    Fraction,
    Number,
    OptimizerName,
    Patterns,
    Positive,
    PositiveNumber,
)
from swaptrain.config.section import Section

__all__ = ["OptimizerConfig", "OptimizerGroup", "ScheduleConfig"]


class ScheduleConfig(Section):
    """How the learning rate moves over the steps; the formulas are below the table."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The shape after the warmup. wsd: warmup, stable, decay."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    warmup_ratio: Fraction | None = None
    """Instead of `warmup_steps`: the part of `decay_steps` that they are, rounded up."""
    decay_steps: Positive | None = None
    """The step at which the decay ends, warmup included. null: `train.steps` of the first start,
    which is recorded: a later `train.steps` does not change it. A start of which every step has the
    rate 0 is refused; where some have, it says which."""
    min_lr_ratio: Fraction = 0.0
    """The factor at the end of the decay and after it."""
    decay_fraction: Fraction = 0.2
    """wsd only: the part of `decay_steps` that the decay takes."""
    from_zero: bool = False
    """true: the first step counts as 0 in the formulas, as in transformers' schedules: a warmup
    begins with the rate 0."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError("give one of warmup_steps and warmup_ratio")
        return self


class OptimizerGroup(Section):
    """Parameters by their names, and how they are updated."""

    model_config = ConfigDict(extra="allow")

    match: Patterns
    """Globs of names; `*` stands for anything, dots included."""
    name: OptimizerName | None = None
    lr: PositiveNumber | None = None
    weight_decay: Number | None = None
    """Of all parameters of the group, whatever their dimensions."""
    state: Literal["float32", "bfloat16", "8bit"] | None = None

    @model_validator(mode="after")
    def _check(self) -> OptimizerGroup:
        for key in self.arguments:
            if key in OptimizerConfig.model_fields:
                raise ValueError(f"{key} is said of all parameters: set optimizer.{key}")
            if key == "learning_rate":
                raise ValueError("unknown key learning_rate; did you mean lr?")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The further keys: arguments of the optimizer's class, as YAML gave them."""
        return dict(self.__pydantic_extra__ or {})


Groups = Annotated[
    tuple[OptimizerGroup, ...],
    BeforeValidator(lambda found: tuple(found) if isinstance(found, list) else found),
]


class OptimizerConfig(Section):
    """Any optimizer of `torch.optim` whose state is per parameter.

    Further keys (`betas`, `eps`, `momentum`, ...) are arguments of that class, and are checked
    against its signature when the run starts.
    """

    model_config = ConfigDict(extra="allow")

    name: OptimizerName = "adamw"
    """The class in `torch.optim`, in lower or its own case: adamw, adam, sgd, adafactor, ..."""
    lr: PositiveNumber = 3e-4
    """The peak learning rate."""
    weight_decay: Number | None = None
    """Applied to parameters of two dimensions and more. null: the default of the class."""
    clip_norm: PositiveNumber | None = None
    """Largest global norm of the gradient; larger ones are scaled down to it. null: no clipping."""
    state: Literal["float32", "bfloat16", "8bit"] = "float32"
    """How its state is stored, of parameters with 4,096 elements or more: 8bit takes 6 bytes a
    parameter of disk instead of 12, bfloat16 (rounded by chance) 8. Other bits: see
    docs/optimizers.md."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate moves over the steps."""

    groups: Groups | None = None
    """Parameters that are updated otherwise, the first group that matches a name: a list of
    {match: [globs], ...} with name, lr, weight_decay (then of all dimensions), state, and
    arguments of the class. What a group leaves out is as here. Rates and decay may change with
    --accept-change. null: none."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        own = {name: name for name in OptimizerConfig.model_fields} | {"learning_rate": "lr"}
        for key in self.arguments:
            # Anything less alike may be an argument of the class, which only torch can tell.
            close = difflib.get_close_matches(key.lower(), own, n=1, cutoff=0.8)
            if close:
                raise ValueError(f"unknown key {key}; did you mean optimizer.{own[close[0]]}?")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The further keys: arguments of the optimizer's class, as YAML gave them."""
        return dict(self.__pydantic_extra__ or {})
