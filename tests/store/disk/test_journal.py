"""The journal says what unflushed bytes should be, and nothing that it is not sure of."""

from __future__ import annotations

from pathlib import Path

import pytest

from swaptrain.store.disk.journal import Journal


def test_what_was_written_of_a_step_is_read(tmp_path: Path) -> None:
    """By the process that wrote it and by the next; of that step only."""
    journal = Journal(tmp_path / "journal", 200, token="model")
    journal.create()
    assert journal.read(0) == {}
    for place in range(0, 200, 3):
        journal.write(place, 7, 2**64 - 1 - place)
    journal.write(3, 8, 5)
    journal.close()
    again = Journal(tmp_path / "journal", 200, token="model")
    again.create()
    assert again.read(8) == {3: 5}
    assert again.read(7) == {place: 2**64 - 1 - place for place in range(0, 200, 3) if place != 3}
    assert Journal(tmp_path / "journal", 200, token="other").read(7) == {}
    with pytest.raises(ValueError, match="no place 200"):
        journal.write(200, 1, 1)


def test_a_flipped_bit_voids_one_entry(tmp_path: Path) -> None:
    """Whichever bit it is, the other entries stand; an entry in another's place is void."""
    path = tmp_path / "journal"
    journal = Journal(path, 3, token="model")
    journal.create()
    for place in range(3):
        journal.write(place, 1, 10 + place)
    journal.close()
    content = path.read_bytes()
    for bit in range(24 * 8):
        damaged = bytearray(content)
        damaged[24 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert journal.read(1) == {0: 10, 2: 12}
    path.write_bytes(content[24:48] + content[24:])
    assert journal.read(1) == {1: 11, 2: 12}
    path.unlink()
    assert journal.read(1) == {}
