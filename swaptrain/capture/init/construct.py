"""Constructs a module without its weights in memory, and gives each initial weight on demand."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.capture.guards.shared import check_memory
from swaptrain.capture.init.exchange import swapping_fakes
from swaptrain.capture.init.filebacked import (
    FileBacked,
    ScratchFiles,
    drop_pages,
    is_file_backed,
)
from swaptrain.capture.init.finish import (
    check_parameters,
    fake_parameters,
    real_others,
    unfile_buffers,
)
from swaptrain.capture.init.intercept import Intercept
from swaptrain.capture.init.record import OperationRecorder, RefusedError
from swaptrain.capture.init.replay import Log, Window, copied
from swaptrain.errors import ConfigError

__all__ = ["Addition", "Construction", "Values", "construct"]

Values = Mapping[str, Callable[[], torch.Tensor]]
"""By the name of a parameter: what makes its value."""


@dataclass(frozen=True)
class Addition:
    """What is added to a module once it is constructed: adapters on a base."""

    add: Sequence[Callable[[nn.Module], None]]
    """Each changes the module in place; the seed is given again just before. It may read the
    parameters that the module has, and may put others into their place, but not write to them."""
    values: Callable[[nn.Module], Values] = lambda _: {}
    """Called before it: the values of those parameters that the constructor does not make."""
    draw: bool = True
    """As `draw` of `construct`, for what is added."""


@dataclass(slots=True)
class Construction:
    """A module whose parameters are fake (device cpu) and whose buffers are real."""

    module: nn.Module
    fake_mode: FakeTensorMode
    """The mode of the parameters; the export has to happen in it."""
    recorded: bool
    """False: the fallback was used, eager construction on file-backed memory."""
    refusal: str | None
    """Why the construction could not be recorded."""
    _log: Log | None
    _values: dict[str, Window | torch.Tensor] | None
    base_names: Mapping[str, str] = field(default_factory=dict)
    """Of what was there before an addition: the first of its names then, by its names now."""

    def value(self, name: str) -> torch.Tensor:
        """Return the initial value of the parameter `name`, a new real tensor.

        It is bit for bit, dtype and strides included, what the plain constructor gives under the
        same seed. Any order, repeatable; each of the names of a tied parameter works. Beyond the
        result, the memory of one operation's tensors is used. The state of the global generator is
        the same afterwards, but it is used in between: not for several threads at once.
        Raises KeyError for an unknown name, RuntimeError after `forget`.
        """
        value = self._remembered()[name]
        if isinstance(value, Window):
            assert self._log is not None, "windows come with the log that they refer to"
            return self._log.materialise([value])[0]
        with _disable_current_modes():
            result = copied(value)
            if is_file_backed(value.untyped_storage()):
                drop_pages(value.untyped_storage())
        return result

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` needs beyond its result.

        Estimated from the tensors of the recorded operations, without scratch inside kernels.
        """
        value = self._remembered()[name]
        if self._log is None or not isinstance(value, Window):
            return 0
        return self._log.peak_bytes(value)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a parameter's value."""
        value = self._remembered()[name]
        if isinstance(value, Window):
            return math.prod(value.size) * value.dtype.itemsize
        return value.numel() * value.element_size()

    def forget(self) -> None:
        """Free the log and the scratch files; values can no longer be had."""
        self._log = None
        self._values = None

    def _remembered(self) -> dict[str, Window | torch.Tensor]:
        if self._values is None:
            raise RuntimeError("the initial values were asked for after they were forgotten")
        return self._values


def construct(
    factory: Callable[[], nn.Module],
    *,
    seed: int,
    scratch_dir: Path,
    fake_from_bytes: int = 16 << 10,
    resident_bytes: int = 256 << 20,
    draw: bool = True,
    check: Callable[[nn.Module], None] = check_memory,
    addition: Addition | None = None,
) -> Construction:
    """Run `factory` under `seed` without keeping its parameters in memory.

    The generators of torch, of Python's `random` and of `numpy.random` are seeded with `seed`
    first, and are left where the plain constructor leaves them. Storages of `fake_from_bytes` and
    more are fake while the factory runs, and every operation on them is logged. Where that cannot
    be exact, the factory runs a second time, eagerly, with its large tensors in unlinked files in
    `scratch_dir`, of which about `resident_bytes` are in memory, and `refusal` of the result says
    why. What the factory raises there is raised.
    Without `draw` the recorded operations draw no random numbers, which is quicker: names, shapes
    and strides are right, the values of parameters, of buffers and of the generators are not.
    `check` is called with the module as the factory left it, before memory that tensors share is
    parted. An `addition` is part of the construction: its values are recorded and given as well.
    Raises what it raises, and CaptureError for parameters that are not initialised or not
    dense on the CPU.
    """
    default_dtype = torch.get_default_dtype()
    files = ScratchFiles(scratch_dir, resident_bytes=resident_bytes)
    try:
        return _recorded(factory, seed, files, fake_from_bytes, check, addition, draw=draw)
    except _AdditionFails as failed:
        raise failed.error from failed.error.__cause__
    except Exception as error:
        # Whatever it is: if it is the factory's own error, the eager construction raises it again.
        refusal = str(error) or type(error).__name__
    torch.set_default_dtype(default_dtype)
    return _file_backed(factory, seed, files, check, addition, refusal)


def _recorded(
    factory: Callable[[], nn.Module],
    seed: int,
    files: ScratchFiles,
    fake_from_bytes: int,
    check: Callable[[nn.Module], None],
    addition: Addition | None,
    *,
    draw: bool,
) -> Construction:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = OperationRecorder(fake_mode, fake_from_bytes=fake_from_bytes, draw=draw)
    _seed(seed)
    with recorder, Intercept(recorder), swapping_fakes(), _silent_fake_kernels():
        module = factory()
        base = _names(module)
        if addition is not None:
            # Nor is it the constructor that looks at the memory of these tensors.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                for name, value in addition.values(module).items():
                    recorder.give(module.get_parameter(name), value)
            recorder.draw = addition.draw
            for add in addition.add:
                _seed(seed)
                _add(add, module, recorder)
    if recorder.refusal is not None:
        raise RefusedError(recorder.refusal)
    check_parameters(module)
    check(module)
    windows = {id(p): recorder.window(p) for p in module.parameters() if isinstance(p, FakeTensor)}
    real_others(module, recorder, fake_mode)
    recorder.log.keep_only(list(windows.values()))
    values = windows | fake_parameters(module, fake_mode, files)
    names = {name: values[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    return Construction(
        module, fake_mode, True, None, recorder.log, names, _base_names(module, base)
    )


def _file_backed(
    factory: Callable[[], nn.Module],
    seed: int,
    files: ScratchFiles,
    check: Callable[[nn.Module], None],
    addition: Addition | None,
    refusal: str,
) -> Construction:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    _seed(seed)
    with FileBacked(files):
        module = factory()
        base = _names(module)
        if addition is not None:
            with torch.no_grad():
                for name, value in addition.values(module).items():
                    module.get_parameter(name).copy_(value())
            for add in addition.add:
                _seed(seed)
                add(module)
    check_parameters(module)
    check(module)
    unfile_buffers(module)
    values = fake_parameters(module, fake_mode, files)
    names = {name: values[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    return Construction(
        module, fake_mode, False, refusal, None, dict(names), _base_names(module, base)
    )


class _AdditionFails(Exception):
    """An addition is refused for good: the base need not be constructed again to hear that."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(str(error))
        self.error = error


def _add(add: Callable[[nn.Module], None], module: nn.Module, recorder: OperationRecorder) -> None:
    try:
        add(module)
    except ConfigError as error:
        if recorder.refusal is None:
            raise _AdditionFails(error) from error
        raise


def _names(module: nn.Module) -> dict[int, tuple[str, torch.Size]]:
    """Return the first name and the shape of each parameter by its identity."""
    found = module.named_parameters()
    return {id(p): (name, p.shape) for name, p in found if not is_lazy(p)}


def _base_names(module: nn.Module, base: Mapping[int, tuple[str, torch.Size]]) -> dict[str, str]:
    """Return the names of before an addition, but of what has got other rows since."""
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in base:
            before, shape = base[id(parameter)]
            if parameter.shape == shape:
                found[name] = before
    return found


@contextlib.contextmanager
def _silent_fake_kernels() -> Iterator[None]:
    """Keep torch from logging errors of fake kernels: here they lead to the eager construction."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
