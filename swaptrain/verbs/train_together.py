"""The command that trains, in one of several processes that torchrun has started."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console

from swaptrain.config.schema import Config
from swaptrain.errors import StoppedBySignal, SwaptrainError
from swaptrain.observe.progress import Progress
from swaptrain.ranks.launch import Launch
from swaptrain.verbs.member import connected
from swaptrain.verbs.train import train

__all__ = ["TogetherOptions", "train_together"]


class _Nowhere(io.StringIO):
    """Takes text and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass(frozen=True)
class TogetherOptions:
    """What the command line says beside the config."""

    fresh: bool = False
    accept_change: bool = False
    from_step: int | None = None


def train_together(config: Config, launch: Launch, options: TogetherOptions) -> None:
    """Train as one rank of several; rank 0 shows how it goes, and each its own errors.

    Raises what `train` raises, in all ranks within `distributed.timeout`.
    """
    rank, count = launch.ranks.rank, launch.ranks.count
    console = Console(file=_Nowhere()) if rank else None
    progress = Progress(host_budget_bytes=config.memory.host, console=console)
    try:
        with connected(
            config,
            launch,
            fresh=options.fresh,
            accept_change=options.accept_change,
            from_step=options.from_step,
        ) as member:
            progress.note(f"{count} ranks train together")
            if options.fresh and not member.fresh:
                progress.note(
                    "--fresh: torchrun has started the ranks again, so the run goes on and is not "
                    "deleted once more"
                )
            train(
                config,
                fresh=member.fresh,
                accept_change=options.accept_change,
                progress=progress,
                member=member,
            )
    except SwaptrainError as error:
        # A stop that the ranks have agreed on is said once.
        error.is_echo = rank > 0 and (error.is_echo or isinstance(error, StoppedBySignal))
        if not error.is_echo and not str(error).startswith("rank ") and error.args:
            error.add_note(f"said by rank {rank} of {count}")
        raise
