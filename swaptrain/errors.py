"""The named errors of swaptrain and the exit code that each one ends the command with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "BudgetError",
    "CaptureError",
    "ConfigError",
    "DamagedStoreError",
    "NotFiniteError",
    "Problem",
    "RunError",
    "StoppedBySignal",
    "SwaptrainError",
    "Where",
]


class SwaptrainError(Exception):
    """Base of every error that is shown to the user as one message, without a traceback."""

    exit_code = 1
    is_echo = False
    """Whether another rank of the run says the same: then this process is silent."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config."""

    key: str
    """With dots, such as memory.host; empty where a check is over several keys."""
    message: str
    place: str = ""
    """Where the key was written: `line 4`, `command line`, `argument`."""


class ConfigError(SwaptrainError):
    """The config or the input is wrong; nothing was touched."""

    exit_code = 2

    def __init__(self, *said: object, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(*said)
        self.problems = problems
        """Of a config, each by itself; empty where the message is about something else."""


class CaptureError(ConfigError):
    """The model cannot be captured as one graph; the message names the module and the operation."""


class BudgetError(ConfigError):
    """A budget cannot work; the message says which key to set to what."""

    def __init__(self, *said: object, key: str = "memory.host", enough: str | None = None) -> None:
        super().__init__(*said)
        self.key = key
        """The key that is too small, or too large."""
        self.enough = enough
        """A value of it with which the run would be planned; None: it is not known."""


class RunError(SwaptrainError):
    """The run failed and can be resumed: disk full, I/O error, a loss that is not finite."""

    exit_code = 1

    def __init__(self, *said: object, path: Path | None = None, errno: int | None = None) -> None:
        super().__init__(*said)
        self.path = path
        """The file that could not be read or written."""
        self.errno = errno
        """What the operating system said of it."""


class NotFiniteError(RunError):
    """A loss or a gradient is not finite: the run would meet it again."""

    def __init__(self, *said: object, step: int = 0) -> None:
        super().__init__(*said)
        self.step = step
        """The step, from 1, of which nothing was kept."""


@dataclass(frozen=True)
class Where:
    """What a file of the store is a part of, as far as its reader knows."""

    segment: int | None = None
    array: str | None = None
    chunk: int | None = None


class DamagedStoreError(SwaptrainError):
    """The store holds something that does not verify."""

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        segment: int | None = None,
        array: str | None = None,
        chunk: int | None = None,
        path: Path | None = None,
    ) -> None:
        self.what = what
        self.segment, self.array, self.chunk, self.path = segment, array, chunk, path
        where = ", ".join(
            f"{name} {value}"
            for name, value in (
                ("segment", segment),
                ("array", array),
                ("chunk", chunk),
                ("file", path),
            )
            if value is not None
        )
        super().__init__(f"{what} ({where})" if where else what)

    def within(self, where: Where) -> DamagedStoreError:
        """Return the same error, which says where as far as it did not."""
        own = {
            name: outer if getattr(self, name) is None else getattr(self, name)
            for name, outer in asdict(where).items()
        }
        return DamagedStoreError(self.what, **own, path=self.path)


class StoppedBySignal(SwaptrainError):
    """The run was stopped by a signal after the instruction in progress; it can be resumed."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
