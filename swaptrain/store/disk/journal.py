"""What is known of bytes that nobody flushed: a checksum and a step for each place on the disk."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from swaptrain.store.disk.durable_files import allocate, run_error

__all__ = ["Journal"]

_BODY = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQQ")
_PAGE_BYTES = 4096


class Journal:
    """A file of entries, one per place in the spill: the step and the checksum of its content.

    An entry is written when the content is, and neither is ever flushed: a killed process leaves
    both in the hands of the kernel, a power loss any part of them. So an entry is believed only if
    it verifies, is of the step in question, and the content has its checksum; one whose place was
    overwritten since is simply not true any more.
    """

    def __init__(self, path: Path, places: int, *, token: str) -> None:
        """Describe the journal in `path`; `token` names the run: entries of another are void."""
        self.path, self.places = path, places
        self._seed = xxhash.xxh3_64_intdigest(token.encode())
        self._descriptor = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return -(-max(1, self.places) * _ENTRY.size // _PAGE_BYTES) * _PAGE_BYTES

    def create(self) -> None:
        """Reserve the file; entries that exist are kept. Raises RunError (disk full)."""
        allocate(self.path, self.nbytes)

    def write(self, place: int, step: int, checksum: int) -> None:
        """Say that a place holds content of `step`; raises RunError."""
        if not 0 <= place < self.places:
            raise ValueError(f"the journal has no place {place}")
        entry = _ENTRY.pack(step, checksum, self._digest(place, _BODY.pack(step, checksum)))
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            begin, done = place * _ENTRY.size, 0
            while done < len(entry):
                done += os.pwrite(self._descriptor, entry[done:], begin + done)
        except OSError as error:
            raise run_error(error, self.path, "write", len(entry)) from error

    def read(self, step: int) -> dict[int, int]:
        """Return the checksums of the places that hold content of `step`, as far as is known."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise run_error(error, self.path, "read") from error
        found = {}
        for place in range(min(self.places, len(content) // _ENTRY.size)):
            entry = content[place * _ENTRY.size : (place + 1) * _ENTRY.size]
            of_step, checksum, digest = _ENTRY.unpack(entry)
            if of_step == step and digest == self._digest(place, entry[: _BODY.size]):
                found[place] = checksum
        return found

    def clear(self) -> None:
        """Let no entry be believed any more; raises RunError."""
        try:
            # In place: its room stays reserved. An entry of zeros does not verify.
            with self.path.open("r+b") as file:
                file.write(bytes(self.nbytes))
        except OSError as error:
            raise run_error(error, self.path, "write", self.nbytes) from error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _digest(self, place: int, body: bytes) -> int:
        return xxhash.xxh3_64_intdigest(body + place.to_bytes(8, "little"), seed=self._seed)
