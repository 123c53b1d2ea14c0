"""The share of time in which a GPU runs a kernel, as its driver counts it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import suppress
from typing import Self

__all__ = ["GpuBusy"]

COMMAND = (
    "nvidia-smi",
    "--id=" + (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0],
    "--query-gpu=utilization.gpu",
    "--format=csv,noheader,nounits",
    "--loop-ms=200",
)
"""nvidia-smi(1): per cent of the last sample period, of 1/6 to 1 second, in which a kernel ran."""


class GpuBusy:
    """Listens to the driver in a `with` block. Raises FileNotFoundError without nvidia-smi."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._driver = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        with self._driver:
            self._driver.terminate()
            self._thread.join()

    def fraction(self, begin_s: float, end_s: float) -> float | None:
        """Return the mean between two times (`time.time()`); None where nothing was heard."""
        heard = [busy for at, busy in self._samples if begin_s <= at <= end_s]
        return sum(heard) / len(heard) if heard else None

    def _listen(self) -> None:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            with suppress(ValueError):  # "[N/A]": of a part of a GPU the driver does not say it
                self._samples.append((time.time(), float(line) / 100))
