"""swaptrain trains PyTorch models that fit neither in GPU memory nor in RAM, from an SSD.

    import swaptrain
    run = swaptrain.train(model=make_model, data=dataset, dir="runs/mine", steps=200, memory="8GiB")
    run.metrics, run.export("out/"), run.generate("Once")

`help(swaptrain.train)` says what it takes; docs/python.md has examples. Nothing heavy is imported
before a function is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swaptrain.errors import (
    BudgetError,
    CaptureError,
    ConfigError,
    DamagedStoreError,
    NotFiniteError,
    Problem,
    RunError,
    StoppedBySignal,
    SwaptrainError,
)

if TYPE_CHECKING:
    from swaptrain.api.run import Run
    from swaptrain.api.train import open_run_dir as open
    from swaptrain.api.train import plan, train

__all__ = ["BudgetError", "CaptureError", "ConfigError", "DamagedStoreError", "NotFiniteError"]
__all__ += ["Problem", "Run", "RunError", "StoppedBySignal", "SwaptrainError", "open", "plan"]
__all__ += ["train"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("Run", "open", "plan", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swaptrain.api import run, train

    found = {"Run": run.Run, "open": train.open_run_dir, "plan": train.plan, "train": train.train}
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
