"""Eager construction whose large tensors live in unlinked files: exact for every module."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from swaptrain.capture.init.operations import base_name, is_strided, storages
from swaptrain.capture.init.replay import Window, storage_key
from swaptrain.errors import RunError

__all__ = ["FileBacked", "ScratchFiles", "drop_pages", "is_file_backed"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MS_SYNC = 4
_MADV_DONTNEED = 4


class ScratchFiles:
    """Storages in unlinked files of one directory; the least recently used leave memory first.

    The files vanish with the last reference to a storage, or with the process.
    """

    def __init__(self, scratch_dir: Path, *, resident_bytes: int) -> None:
        self._scratch_dir = scratch_dir
        self._resident_limit_bytes = resident_bytes
        # Weak: a temporary of the constructor must not be kept, nor written out.
        self._resident: OrderedDict[int, StorageWeakRef] = OrderedDict()
        self._resident_bytes: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Return a new storage of `size_bytes`, of zeros. Raises RunError if the disk is full."""
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = self._open()
        try:
            # Without the blocks a store into the mapping would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
            storage = torch.UntypedStorage.from_file(
                f"/proc/self/fd/{descriptor}", shared=True, nbytes=size_bytes
            )
            assert isinstance(storage, torch.UntypedStorage)
            return storage
        except OSError as error:
            raise RunError(
                f"cannot reserve {size_bytes} bytes in {self._scratch_dir} to initialise the "
                f"model: {error.strerror}; free that much there"
            ) from error
        finally:
            os.close(descriptor)
            if name is not None:
                os.unlink(name)

    def _open(self) -> tuple[int, str | None]:
        """Open a new file for reading and writing; it has a name only where it must have one."""
        try:
            return os.open(self._scratch_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
        except OSError as error:
            # The codes of file systems, and of kernels, that do not have files without names.
            if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
                raise
        return tempfile.mkstemp(prefix="initialise-", dir=self._scratch_dir)

    def touch(self, storage: torch.UntypedStorage) -> None:
        """Note that `storage` is in memory now; write out and drop others beyond the limit."""
        self._resident[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._resident.move_to_end(storage._cdata)
        self._resident_bytes[storage._cdata] = storage.nbytes()
        dead = [key for key, held in self._resident.items() if held.expired()]  # type: ignore[no-untyped-call]
        for key in dead:
            del self._resident[key], self._resident_bytes[key]
        held_bytes = sum(self._resident_bytes.values())
        while held_bytes > self._resident_limit_bytes and len(self._resident) > 1:
            key, oldest = self._resident.popitem(last=False)
            held_bytes -= self._resident_bytes.pop(key)
            drop_pages(torch.UntypedStorage._new_with_weak_ptr(oldest.cdata))


def is_file_backed(storage: torch.UntypedStorage) -> bool:
    """Whether the bytes of `storage` are pages of a file."""
    return storage.filename is not None


def drop_pages(storage: torch.UntypedStorage) -> None:
    """Write a file-backed storage to its file and give its memory back."""
    address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
    for call, flag in ((_LIBC.msync, _MS_SYNC), (_LIBC.madvise, _MADV_DONTNEED)):
        if call(address, size, flag) != 0:
            raise RunError(f"writing out initial weights failed: {os.strerror(ctypes.get_errno())}")


class FileBacked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves each large new CPU storage that an operation makes into a scratch file."""

    def __init__(self, files: ScratchFiles, *, file_from_bytes: int = 1 << 20) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = files
        self._file_from_bytes = file_from_bytes

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            inputs = storages(tree_leaves((args, kwargs)))
            results, structure = tree_flatten(func(*args, **(kwargs or {})))
            moved: dict[int, torch.UntypedStorage] = {}
            for key, storage in storages(results).items():
                if (
                    key not in inputs
                    and storage.device.type == "cpu"
                    and storage.nbytes() >= self._file_from_bytes
                ):
                    moved[key] = self._files.allocate(storage.nbytes())
                    if not base_name(func).startswith(("empty", "new_empty")):
                        moved[key].copy_(storage)
            for storage in (*inputs.values(), *moved.values()):
                if is_file_backed(storage):
                    self._files.touch(storage)
            results = [
                Window.of(leaf).on(moved[storage_key(leaf)])
                if is_strided(leaf) and storage_key(leaf) in moved
                else leaf
                for leaf in results
            ]
            return tree_unflatten(results, structure)
