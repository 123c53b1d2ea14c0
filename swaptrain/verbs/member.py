"""One of the processes that torchrun starts for a run: what it agrees on with the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import swaptrain
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, SwaptrainError
from swaptrain.planning.other_ranks import FixedCut, OtherRanks
from swaptrain.planning.prepare import Prepared
from swaptrain.program.row_ranges import RangeSizes
from swaptrain.ranks.agreement import agree, code_digest, echoed, in_all
from swaptrain.ranks.group import Group
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.limits import check_together, config_of_rank
from swaptrain.ranks.own_disk import OwnDisk
from swaptrain.ranks.recovery import recover
from swaptrain.store.format.root import RootRecord

__all__ = ["Member", "connected"]

_BEGUN_ANEW = "begun anew"
"""The mark of ranks that have done what --fresh says."""


class Member:
    """This rank: its own config, and what it finds with the others before anything is written."""

    def __init__(
        self,
        group: Group,
        config: Config,
        launch: Launch,
        *,
        device: str,
        fresh: bool,
        asked: bool,
    ) -> None:
        """`asked`: --fresh was given, whether this start follows it or is a restart after it."""
        self.group, self.config = group, config
        self._asked = asked
        self.fresh = fresh
        """Whether all ranks begin anew: what --fresh says, but for a restart after it."""
        self.beside = OtherRanks(
            ranks=launch.ranks,
            local_count=launch.local_count,
            local_rank=launch.local_rank,
            device=device,
            same_cut=self._same_cut,
        )

    def recovered(self, run_dir: Path, root: RootRecord | None) -> RootRecord | None:
        """Return the root of the step that all ranks go on from; None where the run begins.

        Raises ConfigError where the run was begun by another number of ranks.
        """
        ranks = self.group.ranks
        for rank, found in enumerate(self.group.gather(_ranks(root))):
            if found is not None and found != [rank, ranks.count]:
                text = (
                    f"the directory of rank {rank} is that of rank {found[0]} of {found[1]}, and "
                    f"{ranks.count} were started: start as many as the run was begun with, each on "
                    "its own directory, or divide it anew (the verb reshard)"
                )
                raise echoed(ConfigError(text))
        return recover(self.group, run_dir, root)

    def opened(self) -> None:
        """Say that this rank's run is there: with --fresh no restart of torchrun's deletes it."""
        if self._asked:
            self.group.barrier()
            if not self.group.ranks.rank:
                self.group.keep(_BEGUN_ANEW)

    def all(self, said: bool) -> bool:
        """Whether all ranks say so."""
        return self.group.largest(float(not said)) == 0

    def agree_on_model(self, prepared: Prepared) -> None:
        """Raise ConfigError where the ranks would compute with different models or threads."""
        plan = prepared.plan
        choices: dict[str, object] = {
            "the captured graph": plan.captured.model.fingerprint,
            "its constants": prepared.built.content,
            "the initial weights": _content(prepared.built.initial.origin),
            "the largest chunk": plan.layouts.chunk_bytes,
            "the number of threads (train.threads)": prepared.threads,
            "the kind of device": prepared.device.device.type,
            "what the loss is weighted by": prepared.weighting.config.train.loss_weighting,
        }
        agree(self.group, "models", choices)

    def _same_cut(self, own: FixedCut | None) -> FixedCut | None:
        ranges = None if own is None else [own.ranges.experts, own.ranges.rows]
        said = self.group.gather(None if own is None else [list(own.cuts), own.chunk, ranges])[0]
        assert said is not None, "rank 0 chooses"
        return FixedCut(tuple(said[0]), said[1], RangeSizes(*said[2]))


@contextmanager
def connected(
    config: Config, launch: Launch, *, fresh: bool, accept_change: bool, from_step: int | None
) -> Iterator[Member]:
    """Connect this process to the other ranks of a run.

    Raises ConfigError, in all of them, where they were started with different things, and for what
    several ranks, or one of them, cannot do. What ends this one is said to the others.
    """
    group = Group(launch, config.distributed.timeout)
    begun, disk = config.run.dir.exists(), OwnDisk(config, launch)
    try:
        tree = config.to_tree()
        del tree["run"], tree["distributed"]
        agree(group, "configs", tree)
        versions = {
            "the version of swaptrain": swaptrain.__version__,
            "its code": code_digest(),
            "the version of torch": torch.__version__,
            "--fresh": fresh,
            "--accept-change": accept_change,
            "--from-step": from_step,
        }
        agree(group, "code", versions)
        own = in_all(group, lambda: _own_config(config, launch, from_step))
        device = own.device
        own = own.model_copy(update={"device": config.device})
        anew = fresh and not _has_begun_anew(group, launch)
        in_all(group, disk.make)
        yield Member(group, own, launch, device=device, fresh=anew, asked=fresh)
        group.barrier()
    except SwaptrainError as error:
        group.say_last(str(error), refuses=isinstance(error, ConfigError))
        if isinstance(error, ConfigError) and not group.has_heard and group.is_said(str(error)):
            error.is_echo = True
        disk.withdraw()
        if not begun:
            with suppress(OSError):  # of a run that was refused the last rank leaves an empty one
                config.run.dir.rmdir()
        raise
    except BaseException as error:
        group.say_last(f"{type(error).__name__}: {error}")
        raise
    finally:
        group.close()


def _own_config(config: Config, launch: Launch, from_step: int | None) -> Config:
    """Return the config that this rank works with; raises ConfigError for what it cannot do."""
    check_together(config, launch, from_step=from_step)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return config_of_rank(config, launch, gpus=gpus)


def _has_begun_anew(group: Group, launch: Launch) -> bool:
    """Whether the same torchrun has started these ranks before, and they have begun the run anew.

    A store may be younger than the first start. Where nobody knows, a restart deletes nothing.
    """
    rows = group.gather([launch.restarts, group.starts])
    if any(starts <= restarts for restarts, starts in rows):
        return True
    return bool(group.gather(group.is_kept(_BEGUN_ANEW))[0])


def _content(origin: Mapping[str, Any] | None) -> str:
    """Return what a checkpoint is, wherever it lies on the machine of a rank."""
    return str({key: value for key, value in (origin or {}).items() if key != "directory"})


def _ranks(root: RootRecord | None) -> list[int] | None:
    return None if root is None else [root.rank, root.ranks]
