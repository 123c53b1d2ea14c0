"""Text that is written as it comes, though what makes it may begin again."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["WrittenOnce"]


class WrittenOnce:
    """Hands text on to `write`; of a text that begins again, what has not been written."""

    def __init__(self, write: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._write, self._note = write, note
        self._written = ""
        self._text = ""

    def begin(self) -> None:
        """Begin the text, for the first time or again."""
        self._text = ""

    def __call__(self, text: str) -> None:
        """Take the next part; where it is another text than before, say so and write it anew."""
        self._text += text
        if self._written.startswith(self._text):
            return
        if not self._text.startswith(self._written):
            self._note("the run was trained on while it was read: another text begins")
            self._write("" if self._written.endswith("\n") else "\n")
            self._written = ""
        self._write(self._text[len(self._written) :])
        self._written = self._text
