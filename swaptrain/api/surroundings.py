"""What a run sets for its process, and that a script gets back as it was."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swaptrain.errors import ConfigError, RunError
from swaptrain.machine.torch_settings import set_up_torch

__all__ = ["restored"]

_WARNING = 30
"""transformers' own verbosity, where it was not imported before."""


_ONE_AT_A_TIME = threading.RLock()
"""What a run sets is the process's: held by the thread that trains, evaluates or exports."""


@contextmanager
def restored() -> Iterator[None]:
    """Give back threads, environment, import path, random states and libraries' modes.

    The allocator's settings stay, which change when memory is returned to the system and nothing
    else. Signal handlers are given back by the run itself. Raises RunError where another thread is
    inside, ConfigError inside a mode of torch that would change what a run computes.
    """
    _check_modes()
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise RunError(
            "another thread of this process trains, evaluates or exports with swaptrain: wait for "
            "it, or use another process"
        )
    try:
        with _restored():
            yield
    finally:
        _ONE_AT_A_TIME.release()


def _check_modes() -> None:
    if "torch" not in sys.modules:  # it takes settings of the environment when it is imported
        return
    import torch

    modes = {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        f"torch.device({str(torch.get_default_device())!r}) as the default device": (
            torch.get_default_device().type != "cpu"
        ),
        f"torch.set_default_dtype({torch.get_default_dtype()})": (
            torch.get_default_dtype() != torch.float32
        ),
    }
    if found := [name for name, is_on in modes.items() if is_on]:
        raise ConfigError(
            f"{' and '.join(found)} would change what a run computes: call swaptrain outside of it"
        )


@contextmanager
def _restored() -> Iterator[None]:
    environment, path = dict(os.environ), list(sys.path)
    libraries = _library_modes()
    set_up_torch()
    import torch

    from swaptrain.generators import noted_generators

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    modes: Any = torch.utils.deterministic  # torch gives its attribute no type
    filled = modes.fill_uninitialized_memory
    restore_generators = noted_generators()
    differentiates, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        _restore_environment(environment)
        sys.path[:] = path
        _restore_libraries(libraries, environment)
        torch.set_grad_enabled(differentiates)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        modes.fill_uninitialized_memory = filled
        restore_generators()
        gc.collect()


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _library_modes() -> tuple[bool | None, int | None]:
    """Return whether the hub is offline and how much transformers says; None: not imported."""
    hub, said = _hub(), _logging()
    offline = None if hub is None else bool(hub.HF_HUB_OFFLINE)
    return offline, None if said is None else int(said.get_verbosity())


def _restore_libraries(
    before: tuple[bool | None, int | None], environment: Mapping[str, str]
) -> None:
    """Give back what a run sets in libraries, also in those that it has imported first."""
    offline, verbosity = before
    if (hub := _hub()) is not None:
        asked = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        hub.HF_HUB_OFFLINE = asked if offline is None else offline
    if (said := _logging()) is not None:
        said.set_verbosity(_WARNING if verbosity is None else verbosity)


def _hub() -> Any:
    return sys.modules.get("huggingface_hub.constants")


def _logging() -> Any:
    return sys.modules.get("transformers.utils.logging")
