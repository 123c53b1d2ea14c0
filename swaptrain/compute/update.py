"""The update of one parameter: torch's own optimizer, given views of the state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swaptrain.compute.blocks import block_elements, check_layout, narrow, widen
from swaptrain.compute.optimizer_classes import (
    ELEMENTWISE,
    MeasuredStateShapes,
    optimizer_arguments,
    optimizer_class,
    takes_argument,
)
from swaptrain.compute.split_master import is_dense, storage_order
from swaptrain.compute.state_codecs import (
    CODING_BYTES,
    Draws,
    ShapeAndDtype,
    StateDtype,
    codec_of,
    is_coded,
)
from swaptrain.errors import ConfigError

__all__ = ["Rules", "UpdateRule"]

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What an optimizer of torch raises over an argument of a kind that it does not expect."""


class UpdateRule:
    """How one parameter is updated: torch's own optimizer, given views of the state.

    One optimizer object serves every parameter: for each call it gets the parameter, its gradient
    and its state, and forgets them afterwards. So it holds no memory of its own but a scratch block
    for split masters, and it is not safe to call from several threads at once.
    """

    fused: bool
    """Whether torch's fused implementation is used: wherever the class has one."""

    elementwise: bool
    """Whether a parameter may be stepped in blocks, with the bits of the step on the whole."""

    def __init__(
        self,
        *,
        name: str,
        lr: float,
        weight_decay: float | None,
        arguments: Mapping[str, object],
        state: StateDtype = "float32",
        seed: int = 0,
        decays_all: bool = False,
        scratch: dict[torch.device, Tensor] | None = None,
    ) -> None:
        """Look up `name` in torch.optim; a `weight_decay` of None leaves the class's default.

        `state` is how the optimizer's state is stored; rounding by chance draws under `seed`. With
        `decays_all` parameters of one dimension decay too. Rules of one run share `scratch`.

        Raises:
            ConfigError: unknown or unusable optimizer, unknown argument, a value torch refuses, or
                an optimizer whose state has to stay float32.
        """
        cls = optimizer_class(name)
        chosen = optimizer_arguments(cls, weight_decay=weight_decay, arguments=arguments)
        # Typed as Any: the constructors of the classes have no common signature.
        constructor: Any = cls

        def make(parameters: list[Tensor]) -> Optimizer:
            optimizer: Optimizer = constructor(parameters, lr=lr, **chosen)
            return optimizer

        try:
            optimizer = make([torch.zeros(2, 3)])
        except _REFUSALS as error:
            reason = repr(error) if isinstance(error, KeyError) else str(error)
            given = ", ".join(f"{name}={value}" for name, value in chosen.items())
            raise ConfigError(
                f"optimizer: torch.optim.{cls.__name__} refuses: {reason} (given: {given})"
            ) from error
        self.fused = chosen.get("fused") is True
        self.elementwise = cls.__name__ in ELEMENTWISE
        self.lr, self.decays_all, self.seed = lr, decays_all, seed
        self._codec = codec_of(state)
        if self._codec is not None and optimizer.defaults.get("centered"):
            raise ConfigError(
                f"optimizer.state: {state} and centered: the variance is a difference of two "
                "tensors, which may be below 0 once both are rounded: set state to float32"
            )
        if self._codec is not None and not self.elementwise:
            raise ConfigError(
                f"optimizer.state: {state} is for optimizers that treat each element by itself, "
                f"and {cls.__name__} does not: set it to float32"
            )
        self.weight_decay = float(optimizer.defaults.get("weight_decay", 0.0))
        self._decays = takes_argument(cls, "weight_decay")
        self._optimizer = optimizer
        # Called for each block, under no_grad: torch's own wrappers do that too, but take as long
        # again for hooks, of which there are none here, and for labels in its profiler.
        self._optimizer_step: Callable[[Optimizer], object] = inspect.unwrap(cls.step)
        self._group = optimizer.param_groups[0]
        self._group["params"] = []
        self._shapes = MeasuredStateShapes(make)
        self._scratch = {} if scratch is None else scratch

    def state_tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each float32 state tensor of a parameter of this shape.

        torch's `step` is not among them: it is the number of updates made before.

        Raises:
            ConfigError: the optimizer cannot update such a parameter.
        """
        return self._shapes.shapes(shape)

    def stored(self, shape: tuple[int, ...]) -> dict[str, ShapeAndDtype]:
        """Return name, shape and dtype of what is stored of the state of such a parameter.

        What has the parameter's shape is coded where `optimizer.state` asks for that and the
        parameter is not small. Raises ConfigError as `state_tensors` does.
        """
        found: dict[str, ShapeAndDtype] = {}
        for name, own in self.state_tensors(shape).items():
            if self._codec is not None and own == shape and is_coded(shape):
                found |= self._codec.stored(name, shape)
            else:
                found[name] = own, "float32"
        return found

    def scratch_bytes(
        self,
        shape: tuple[int, ...],
        *,
        split: bool,
        rounded: bool = False,
        holes: bool = False,
        device: torch.device | str = "cpu",
    ) -> int:
        """Return a bound of what an update of such a parameter allocates beyond its arguments.

        Measured in copies of a block, or of the parameter where it must be stepped whole: those of
        the state that torch creates in the first step, the joined master, the widened gradient, and
        temporaries.
        """
        states = self.state_tensors(shape).values()
        elements = math.prod(shape)
        if self.elementwise:
            block = block_elements(torch.device(device))
            # Blocks of masters and gradients are made in full, and kept, however small it is.
            master_elements = 2 * block if split or rounded else 0
            elements = min(elements, block)
            copies = len(states) + (0 if self.fused else 3)
            if self._codec is not None and is_coded(shape):
                # Decoded blocks are made in full, and kept.
                master_elements = (2 + len(states)) * block
                copies += len(states)
        else:
            master_elements = 2 * elements if split or rounded else 0
            copies = len(states) + 4
        small_bytes = 4 * 64 + (4 * math.prod(shape) if holes else 0)
        small_bytes += CODING_BYTES if self._codec is not None or rounded else 0
        return 4 * (master_elements + copies * elements) + small_bytes

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        updates_before: int,
        lr: float,
        decay: bool,
        name: str = "",
        first: int = 0,
    ) -> None:
        """Update a whole float32 `parameter` and its `state` in place.

        `gradient` is float32 with the parameter's shape and strides. `state` has the names and
        numbers of elements of `stored`, dense and in any shape; what has the parameter's shape
        lies in the parameter's order of memory. With `updates_before` 0 the contents of `state` are
        ignored and filled. `decay=False` means no weight decay. Rounding by chance goes by the
        parameter's `name`, and by `first`: where a 1-D piece of one begins.

        A parameter with holes in its memory is stepped as a row-major copy, and so have `gradient`
        and `state` to lie: torch's fused kernels, its own optimizers too, walk memory without
        looking at strides, and take what lies in the holes for elements.
        """
        if not is_dense(parameter):
            copy = parameter.contiguous()
            self.update(
                copy, gradient, state, updates_before=updates_before, lr=lr, decay=decay, name=name
            )
            parameter.copy_(copy)
            return
        self._begin(lr=lr, decay=decay)
        views, coded = self._state_views(parameter, state)
        small = parameter.numel() <= block_elements(parameter.device)
        # A first step allocates all of the state, and an unfused one temporaries of its size:
        # in blocks both are bounded.
        whole = small or not self.elementwise or (self.fused and updates_before > 0)
        if whole and not coded:
            check_layout(parameter, gradient)
            self._step(parameter, gradient, views, updates_before)
            return
        flat = storage_order(parameter)  # [n]
        draws = Draws(self.seed, updates_before + 1, name, first)
        for block, block_gradient, block_state in self._blocks(
            parameter, gradient, views, coded, draws
        ):
            self._step(flat[block], block_gradient, block_state, updates_before)

    def update_split(
        self,
        hi: Tensor,
        lo: Tensor | None,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        updates_before: int,
        lr: float,
        decay: bool,
        coefficient: Tensor | None = None,
        look: Callable[[Tensor], None] | None = None,
        name: str = "",
        first: int = 0,
    ) -> None:
        """Update a parameter that is kept as a split master, `hi` and `lo`, in place.

        `hi` is bfloat16 with the parameter's shape and strides, `lo` int16 or uint16 with as many
        elements in the same order of memory; or `hi` float16 and `lo` the whole master; with None
        `hi` is all there is, and is rounded by chance. `gradient` may be bfloat16 as well; the
        optimizer is
        given it in float32, times `coefficient`, [], if there is one, for which a float32 gradient
        changes. `look`, which may raise, is shown it in float32 too, in blocks where it is used in
        blocks: each right before, when it is in the processor's cache anyway. The rest as for
        `update`.
        """
        self._begin(lr=lr, decay=decay)
        views, coded = self._state_views(hi, state)
        draws = Draws(self.seed, updates_before + 1, name, first)
        if not self.elementwise:
            master = torch.empty_like(hi, dtype=torch.float32)
            check_layout(master, gradient)
            widen(hi, lo, master)
            gradient = gradient.float()
            if look is not None:
                look(gradient)
            if coefficient is not None:
                gradient.mul_(coefficient)
            self._step(master, gradient, views, updates_before)
            narrow(master, hi, lo, draws)
            return
        hi_flat = storage_order(hi)  # [n]
        lo_flat = None if lo is None else storage_order(lo)  # [n]
        shapes = self.state_tensors(tuple(hi.shape))
        scratch = self._scratch_blocks(hi.device, 2 + sum(name not in state for name in shapes))
        for block, block_gradient, block_state in self._blocks(hi, gradient, views, coded, draws):
            master, wide = scratch[:2, : block_gradient.numel()]  # [block] each
            lower = None if lo_flat is None else lo_flat[block]
            widen(hi_flat[block], lower, master, scratch=wide)
            if block_gradient.dtype != torch.float32:
                block_gradient = wide.copy_(block_gradient)
            if look is not None:
                look(block_gradient)
            if coefficient is not None:
                block_gradient.mul_(coefficient)
            self._step(master, block_gradient, block_state, updates_before)
            narrow(master, hi_flat[block], lower, draws.at(block.start))

    def _begin(self, *, lr: float, decay: bool) -> None:
        """Set what is the same for all blocks of a call."""
        self._group["lr"] = lr
        if self._decays:
            self._group["weight_decay"] = self.weight_decay if decay else 0.0

    def _step(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], updates_before: int
    ) -> None:
        """Make one step of torch's optimizer on one tensor, and leave the result in the views."""
        subject = parameter.detach()
        subject.grad = gradient.detach()
        optimizer = self._optimizer
        self._group["params"] = [subject]
        if updates_before > 0:
            given: dict[str, Any] = dict(state)
            if self._shapes.keeps_step(parameter.dim()):
                device = parameter.device if self.fused else None
                # Not `torch.tensor`, which copies from the host and waits for the device.
                given["step"] = torch.full(
                    (), float(updates_before), dtype=torch.float32, device=device
                )
            optimizer.state[subject] = given
        try:
            with torch.no_grad():
                self._optimizer_step(optimizer)
            after = optimizer.state[subject]
            for name, view in state.items():
                # Made by torch in the first step; or replaced instead of updated in place.
                if after[name].data_ptr() != view.data_ptr():
                    view.copy_(after[name])
        finally:
            # Nothing of the caller's may be kept alive, or overwritten by the next call.
            optimizer.state.clear()
            self._group["params"] = []

    def _state_views(
        self, parameter: Tensor, stored: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the state in torch's shapes, in the parameter's layout, and what is coded, [n].

        The one by torch's names, the other by those of arrays.
        """
        views, coded = {}, dict(stored)
        for name, shape in self.state_tensors(tuple(parameter.shape)).items():
            if name not in stored:
                continue
            flat = storage_order(coded.pop(name))
            if shape == tuple(parameter.shape):
                views[name] = flat.as_strided(shape, parameter.stride(), flat.storage_offset())
            else:
                views[name] = flat.view(shape)
        return views, {name: storage_order(tensor) for name, tensor in coded.items()}

    def _blocks(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        coded: Mapping[str, Tensor],
        draws: Draws,
    ) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Yield the blocks of an elementwise update: where it is, its gradient, its state.

        Gradient and state are [block], but for a scalar of the state, [].
        A scalar of the state (the product that NAdam keeps) is for the whole parameter, and every
        block changes it: all blocks but the last work on copies. Coded state is decoded before a
        block and encoded after it.
        """
        check_layout(parameter, gradient)
        flat_gradient = storage_order(gradient)  # [n]
        flat_state = {  # [n], or a scalar's []
            name: view if view.shape != parameter.shape else storage_order(view)
            for name, view in state.items()
        }
        all_names = self.state_tensors(tuple(parameter.shape)) if coded else ()
        names = [name for name in all_names if name not in state]
        decoded = (
            self._scratch_blocks(parameter.device, 2 + len(names))[2:].unbind() if names else ()
        )
        count, size = parameter.numel(), block_elements(parameter.device)
        for start in range(0, max(1, count), size):
            block = slice(start, min(start + size, count))
            last = block.stop == count
            of_block = {}
            for name, view in flat_state.items():
                if view.dim() > 0:
                    of_block[name] = view[block]
                else:
                    of_block[name] = view if last else view.clone()
            for name, scratch in zip(names, decoded, strict=True):
                of_block[name] = scratch[: block.stop - block.start]
                if self._codec is not None and draws.step > 1:
                    self._codec.decode(name, coded, block, of_block[name])
            yield block, flat_gradient[block], of_block
            for name in names:
                if self._codec is not None:
                    self._codec.encode(name, of_block[name], coded, block, draws)

    def _scratch_blocks(self, device: torch.device, rows: int) -> Tensor:
        """Return float32 blocks for masters, gradients and decoded state, [rows, n], and keep them.

        The first two are for masters and gradients.
        """
        found = self._scratch.get(device)
        if found is None or len(found) < rows:
            found = torch.empty(rows, block_elements(device), dtype=torch.float32, device=device)
            self._scratch[device] = found
        return found[:rows]


Rules = Callable[[str], UpdateRule]
"""The rule of a parameter, by its name."""
