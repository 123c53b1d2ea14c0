"""The mode under which a module is constructed with large tensors fake, every operation logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from swaptrain.capture.init import operations
from swaptrain.capture.init.exchange import FakeTwins
from swaptrain.capture.init.replay import Log, LoggedOperation, Window, copied, storage_key

__all__ = ["OperationRecorder", "RefusedError"]

_LARGE_BYTES = 1 << 30
"""What is not even reserved, where its content comes later."""
_MOST_OPERATIONS = 200_000
_MOST_REPLAYED = 100_000
_MOST_CONSTANT_BYTES = 64 << 20


class RefusedError(Exception):
    """The construction does something that a recording cannot repeat exactly."""


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on large CPU tensors fake and logs them; runs the others as they are.

    Random operations are drawn for real into a scratch tensor when they are recorded, so that the
    generator is always where the plain constructor would have it, whatever looks at it; not with
    `draw` False, for those who want no values.
    Raises RefusedError from inside an operation; `refusal` keeps the reason, in case the
    factory swallows the exception.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, *, fake_from_bytes: int, draw: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self.refusal: str | None = None
        self._fake_mode = fake_mode
        self._fake_from_bytes = fake_from_bytes
        self.draw = draw
        # A storage's key is its address: each has to live as long as the log.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._constant_bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            leaves, structure = tree_flatten((args, kwargs or {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for tensor in tensors:
                self._check(func, tensor)
            if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return self._run_fake(func, leaves, structure)
            return self._run_real(func, leaves, structure)

    def refuse(self, reason: str) -> RefusedError:
        """Note that the construction cannot be recorded, and return the error to raise."""
        self.refusal = self.refusal or reason
        return RefusedError(reason)

    def window(self, tensor: torch.Tensor) -> Window:
        """Return the window of a fake tensor; refuse one that no logged operation created."""
        window = Window.of(tensor)
        if not self.log.knows(window.storage):
            raise self.refuse("a fake tensor appeared that no recorded operation created")
        if tensor.untyped_storage().nbytes() != self.log.storage_bytes(window.storage):
            raise self.refuse("the constructor changes the size of a storage")
        return window

    def give(self, tensor: torch.Tensor, value: Callable[[], torch.Tensor]) -> None:
        """Let a tensor have a value from elsewhere, laid out as it is, whatever made it before.

        Of a fake one the value is asked for when something that depends on it is.
        """
        if not isinstance(tensor, FakeTensor):
            with torch.no_grad():
                tensor.copy_(value())
            return
        window = self.window(tensor)
        if not window.covers(self.log.storage_bytes(window.storage)):
            raise self.refuse("a parameter that begins from a checkpoint shares its memory")
        self.log.append(
            LoggedOperation(
                value,
                (),
                tree_flatten(((), {}))[1],
                (window,),
                reads=frozenset(),
                writes=frozenset({window.storage}),
                generator_state=None,
                default_dtype=torch.get_default_dtype(),
            ),
            {},
        )

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return real tensors with the present values of the fake `tensors`."""
        values = self.log.materialise([self.window(tensor) for tensor in tensors])
        if self.log.replayed > _MOST_REPLAYED:
            raise self.refuse("the constructor looks at values of large tensors too often")
        return values

    def _check(self, func: OpOverload, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            self.window(tensor)
            if tensor.is_conj() or tensor.is_neg():
                raise self.refuse(f"{func} gets a lazily conjugated or negated tensor")
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise self.refuse(f"{func} gets a {type(tensor).__name__}")
        elif operations.is_strided(tensor) and self.log.knows(storage_key(tensor)):
            # `.data =` from where Intercept does not see it.
            raise self.refuse(f"{func} gets a plain tensor on the storage of a fake one")

    def _run_real(self, func: OpOverload, leaves: list[Any], structure: TreeSpec) -> Any:
        """Run an operation without fake arguments; a large new result is dropped for a fake."""
        state = operations.generator_state(func, leaves)
        args, kwargs = tree_unflatten(leaves, structure)
        if func is torch.ops.aten.empty.memory_format:
            with self._fake_mode:  # more than the machine has is no memory even while untouched
                fake = func(*args, **kwargs)
            if fake.device.type == "cpu" and fake.untyped_storage().nbytes() >= _LARGE_BYTES:
                self._append(func, leaves, structure, [fake], set(), set(), state)
                return fake
        result = func(*args, **kwargs)
        results, result_structure = tree_flatten(result)
        inputs = operations.storages(leaves)
        created = {
            key: storage.nbytes()
            for key, storage in operations.storages(results).items()
            if key not in inputs
            and storage.device.type == "cpu"
            and storage.nbytes() >= self._fake_from_bytes
        }
        if not created or func._schema.is_mutable:
            return result
        if any(storage.nbytes() >= self._fake_from_bytes for storage in inputs.values()):
            return result
        twins = FakeTwins(self._fake_mode)
        for position, leaf in enumerate(results):
            if operations.is_strided(leaf) and storage_key(leaf) in created:
                results[position] = twins.of(Window.of(leaf), created[storage_key(leaf)])
        self._append(func, leaves, structure, results, set(), set(), state)
        return tree_unflatten(results, result_structure)

    def _run_fake(self, func: OpOverload, leaves: list[Any], structure: TreeSpec) -> Any:
        """Run an operation that has a fake argument on fakes, and log it if it makes content."""
        written = operations.written_tensors(func, leaves, structure)
        fake_written = [tensor for tensor in written if isinstance(tensor, FakeTensor)]
        self._refuse_if_hidden(func, leaves, written)
        if written and not fake_written:
            return self._run_on_values(func, leaves, structure)
        # The windows are taken before the operation: it may move a tensor (t_, set_).
        arguments = operations.windows_of_fakes(leaves)
        writes = [Window.of(tensor) for tensor in fake_written]
        inputs = operations.storages(leaves)
        sizes = {key: storage.nbytes() for key, storage in inputs.items()}
        try:
            result = self._on_fakes(func, leaves, structure)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if fake_written:
                raise self.refuse(f"{func} writes what depends on values") from error
            return self._run_on_values(func, leaves, structure)
        if any(storage.nbytes() != sizes[key] for key, storage in inputs.items()):
            raise self.refuse(f"{func} changes the size of a storage")
        results = tree_leaves(result)
        created = operations.storages(results).keys() - inputs.keys()
        if created and operations.promises_a_view(func):
            raise self.refuse(f"the fake result of {func} does not share storage as the real does")
        if not created and not writes:
            return result
        reads = {leaf.storage for leaf in arguments if isinstance(leaf, Window)}
        if operations.reads_only_shapes(func):
            reads.clear()
        elif operations.fills_its_target(func) and writes[0].covers(sizes[writes[0].storage]):
            reads = {leaf.storage for leaf in arguments[1:] if isinstance(leaf, Window)}
        state = operations.generator_state(func, leaves)
        drawn = state is not None and (self.draw or not operations.draws_by_shape(func))
        if drawn or (created and not operations.has_known_layout(func)):
            self._rehearse(func, leaves, structure, results, created)
        touched = {window.storage for window in writes}
        self._append(func, arguments, structure, results, reads, touched, state)
        return result

    def _refuse_if_hidden(
        self, func: OpOverload, leaves: Sequence[Any], written: Sequence[torch.Tensor]
    ) -> None:
        """Refuse operations whose effect on memory the schema hides, or that mix fake and real."""
        name = func._schema.name
        if (
            "batch_norm" in name
            and not func._schema.is_mutable
            and any(leaf is True for leaf in leaves)
        ):
            raise self.refuse(f"{func} changes running statistics without saying so")
        real = [
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        ]
        if torch.Tag.inplace_view in func.tags and real:
            raise self.refuse(f"{func} puts a fake and a real tensor on one storage")
        if len({isinstance(tensor, FakeTensor) for tensor in written}) > 1:
            raise self.refuse(f"{func} writes into fake and real tensors")

    def _on_fakes(self, func: OpOverload, leaves: Sequence[Any], structure: TreeSpec) -> Any:
        # detach: the converter remembers the object it saw, and a parameter may be exchanged later.
        fakes = [
            self._fake_mode.from_tensor(leaf.detach())
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = tree_unflatten(fakes, structure)
        with self._fake_mode:
            return func(*args, **kwargs)

    def _run_on_values(self, func: OpOverload, leaves: Sequence[Any], structure: TreeSpec) -> Any:
        """Run for real what only real memory can answer: `.item()`, or a write into a buffer."""
        values = iter(self.values([leaf for leaf in leaves if isinstance(leaf, FakeTensor)]))
        real = [next(values) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(real, structure)
        return func(*args, **kwargs)

    def _rehearse(
        self,
        func: OpOverload,
        leaves: Sequence[Any],
        structure: TreeSpec,
        foreseen: Sequence[Any],
        created: AbstractSet[int],
    ) -> None:
        """Run an operation for real once: to draw its random numbers, or to learn its strides."""
        if operations.draws_by_shape(func):
            results = self._run_on_scratch(func, leaves, structure)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            results = tree_leaves(self._run_on_values(func, leaves, structure))
        else:
            try:
                results = self._run_on_scratch(func, leaves, structure)
            except RuntimeError:
                # Zeros are no legal input to an inverse or a decomposition.
                results = tree_leaves(self._run_on_values(func, leaves, structure))
        for fake, real in zip(foreseen, results, strict=True):
            if not isinstance(fake, FakeTensor) or storage_key(fake) not in created:
                continue
            if not Window.of(fake).same_layout(real):
                raise self.refuse(f"{func} gives other strides than its fake kernel says")

    def _run_on_scratch(
        self, func: OpOverload, leaves: Sequence[Any], structure: TreeSpec
    ) -> list[Any]:
        # Random numbers are drawn over anything; other operations might trip over NaN.
        make = torch.empty if operations.draws_by_shape(func) else torch.zeros
        scratch = [
            Window.of(leaf).on(
                make(leaf.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
            )
            if isinstance(leaf, FakeTensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = tree_unflatten(scratch, structure)
        return tree_leaves(func(*args, **kwargs))

    def _append(
        self,
        func: OpOverload,
        arguments: Sequence[Any],
        structure: TreeSpec,
        results: Sequence[Any],
        reads: AbstractSet[int],
        writes: AbstractSet[int],
        state: torch.Tensor | None,
    ) -> None:
        """Log an operation; `results` on storages that the log does not know are its creations."""
        if len(self.log) >= _MOST_OPERATIONS:
            raise self.refuse(f"the constructor runs more than {_MOST_OPERATIONS} operations")
        fakes = [leaf for leaf in results if isinstance(leaf, FakeTensor)]
        created = {
            key: storage
            for key, storage in operations.storages(fakes).items()
            if not self.log.knows(key)
        }
        windows = tuple(
            Window.of(leaf)
            if isinstance(leaf, FakeTensor) and storage_key(leaf) in created
            else None
            for leaf in results
        )
        self._storages.update(created)
        operation = LoggedOperation(
            func,
            tuple(self._constant(leaf) for leaf in arguments),
            structure,
            windows,
            frozenset(reads),
            frozenset(writes | created.keys()),
            state,
            torch.get_default_dtype(),
        )
        self.log.append(operation, {key: storage.nbytes() for key, storage in created.items()})

    def _constant(self, leaf: Any) -> Any:
        """Return what the log keeps of an argument: a copy of a real tensor."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._constant_bytes += leaf.untyped_storage().nbytes()
        if self._constant_bytes > _MOST_CONSTANT_BYTES:
            raise self.refuse("large tensors come from outside torch (numpy, lists, files)")
        return copied(leaf)
