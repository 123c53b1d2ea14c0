"""A config that is prepared, cut and priced, and the same model with other budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from swaptrain.config.resume_rules import check_resume
from swaptrain.config.schema import Config
from swaptrain.data import token_count
from swaptrain.data.record import RunRecord
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.errors import ConfigError
from swaptrain.machine.speeds import Machine, known_machine
from swaptrain.planning.budgets.disk_budget import (
    DiskNeed,
    disk_needs,
    disk_uses,
    estimated_data_bytes,
    scratch_bytes,
)
from swaptrain.planning.forecast import forecast
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.prepare import Prepared, recorded_config
from swaptrain.planning.step_bytes import boundary_bytes, least_bytes, state_bytes
from swaptrain.planning.step_cost import Price, price
from swaptrain.planning.update_rules import update_rules
from swaptrain.ranks.limits import check_alone
from swaptrain.run.idle_rates import check_rates, steps_done
from swaptrain.run.run_names import check_own
from swaptrain.store.access.containment import check_contained
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import RootRecord, read_root
from swaptrain.store.paths import RunPaths

__all__ = ["Planned", "needs_of", "other_budgets", "planned"]


@dataclass(frozen=True)
class Planned:
    """A run that would begin, or go on, with its price."""

    config: Config
    prepared: Prepared
    root: RootRecord | None
    """Record of the run that exists; None where one would begin."""
    made: Plan
    unchosen: Plan
    """`made` before it was chosen which segments save, for whoever chooses for another machine."""
    scratch_bytes: int
    """What may be reserved of the disk for what they save."""
    price: Price
    machine: Machine | None
    """What was measured of the run's disk and device; None where nothing was."""
    needs: tuple[DiskNeed, ...]
    idle_steps: str | None
    """What is said of steps whose learning rate is 0; None where there are none."""

    @property
    def tokens(self) -> int:
        """Tokens of a step; items, where the data have none."""
        data, each = self.config.data, self._micro_batch_tokens
        return data.micro_batches * (data.micro_batch if each is None else each)

    @property
    def counted(self) -> Literal["tokens", "items"]:
        """Which of the two."""
        return "items" if self._micro_batch_tokens is None else "tokens"

    @property
    def _micro_batch_tokens(self) -> int | None:
        batch = self.prepared.planner.batch
        return token_count({key: (value.shape, value.dtype) for key, value in batch.items()})

    @property
    def token_s(self) -> float | None:
        """Seconds a token; None where the machine was never measured."""
        return None if self.price.step_s is None else self.price.step_s / self.tokens

    @property
    def work_s(self) -> float:
        """What the processor does in a step with no I/O beside it: computing, and the tier."""
        return self.price.compute_s + self.made.tier_s * len(self.made.step)

    @property
    def disk_bytes(self) -> int:
        """What it reserves on all disks."""
        return sum(need.total_bytes for need in self.needs)

    def disk_bytes_of(self, plan: Plan, config: Config) -> int:
        """Return what another plan of this run would reserve."""
        data_bytes = sum(need.data_bytes for need in self.needs)
        return sum(need.total_bytes for need in needs_of(plan, config, data_bytes))

    @property
    def steps_left(self) -> int:
        """Steps to come."""
        return max(0, (self.config.train.steps or 0) - steps_done(self.config.run.dir, self.root))

    @property
    def least_bytes(self) -> float:
        """The lower bound of a step's traffic with this pool as the cache."""
        return least_bytes(self.made, self.config)

    @property
    def read_bytes(self) -> int:
        """Of a step: rehearsed, or what the bound leaves beside what is written."""
        if self.price.traffic is not None:
            return self.price.traffic.read_bytes
        return max(0, round(self.least_bytes) - self.write_bytes)

    @property
    def write_bytes(self) -> int:
        """Of a step: rehearsed, or the state and the activations at boundaries."""
        if self.price.traffic is not None:
            return self.price.traffic.write_bytes
        state, commit = state_bytes(self.made), self.config.store.commit
        written = (state.weights + state.rest) // commit.every + state.gradients
        return written + 2 * boundary_bytes(self.made) * (not commit.is_whole)

    @property
    def io_s(self) -> float | None:
        """What the disk needs for a step; None where its speed is not known."""
        if self.machine is None:
            return None
        return self.machine.disk.seconds(self.read_bytes, self.write_bytes)


def planned(config: Config, note: Callable[[str], None] = lambda _: None) -> Planned:
    """Prepare a run as training does, and price its step; nothing is written.

    For a run that exists the recorded cut is taken. Raises ConfigError for what training refuses,
    except for a disk that is too full.
    """
    run_dir = config.run.dir
    check_alone(run_dir, plans=True)
    check_own(run_dir)
    check_contained(run_dir)
    recorded = recorded_config(run_dir)
    root = read_root(run_dir)
    if recorded is not None:
        record = RunRecord(RunPaths(run_dir).train_data, refuse=False)
        config = config.with_steps_of(record.items) if record.items else config
        config = check_resume(recorded, config, accept_change=True)
    idle = check_rates(config, steps_done(run_dir, root))
    prepared = Prepared(config.resolved(), root, note, draw=False)
    return _priced(prepared.config, prepared, root, prepared.plan, idle)


def other_budgets(before: Planned, config: Config) -> Planned:
    """Return the same captured model under a config with other budgets, optimizer or commits.

    Raises ConfigError where they are refused.
    """
    if before.root is not None:
        raise ConfigError(f"{before.config.run.dir} holds a run, whose cut is fixed")
    prepared = before.prepared
    planner = Planner(
        config,
        prepared.built,
        update_rules(config.optimizer, config.train.seed, prepared.built.initial.module),
        prepared.device,
        dict(prepared.built.uncut.batch),
        positions=prepared.factory.positions,
        products=prepared.planner.products,
    )
    return _priced(config, prepared, None, planner.plan(), None)


def needs_of(plan: Plan, config: Config, data_bytes: int) -> list[DiskNeed]:
    """Return what a run by a plan reserves on each disk, beside `data_bytes` of tokens."""
    with DirectIO(1) as io:
        backing = DiskBacking(
            config.run.dir,
            plan.layouts,
            io,
            micro_batches=plan.builder.micro_batches,
            deferred=plan.builder.deferred,
        )
        return disk_needs(config, plan, backing, data_bytes=data_bytes)


def _priced(
    config: Config, prepared: Prepared, root: RootRecord | None, made: Plan, idle: str | None
) -> Planned:
    run_dir = config.run.dir
    found = known_machine((config.store.paths or (run_dir,))[0], prepared.device.device)
    data_bytes = estimated_data_bytes(config)
    scratch = scratch_bytes(disk_uses(needs_of(made, config, data_bytes), run_dir))
    timed = found if len(config.store.paths or ()) <= 1 else None  # as a run does it
    chosen = forecast(made, config, prepared.device, timed, disk_bytes=scratch)
    needs = needs_of(chosen.plan, config, data_bytes)
    cost = chosen.price if timed is found else price(chosen.plan, config, found)
    unchosen = replace(made, tier_s=chosen.plan.tier_s)
    return Planned(
        config, prepared, root, chosen.plan, unchosen, scratch, cost, found, tuple(needs), idle
    )
