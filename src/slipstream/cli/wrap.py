"""Text that comes in pieces, broken at spaces as it is shown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable


class StreamWrapper:
    """What to write to a terminal of `width` columns for each piece of a text.

    Nothing is held back: a word is shown as it grows, and when it meets the edge it is taken off its line and begun
    again on the next one. A word wider than the terminal is left to the terminal.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        # Behind the last column terminals disagree on where the cursor stands, so a word to be moved never gets there.
        self._edge = width - 1
        self._column = 0  # cells in this line
        self._word: list[str] = []  # the end of this line since the last space
        self._word_cells = 0

    def push(self, piece: str) -> str:
        """-> what shows `piece`, control sequences included."""
        from rich.cells import cell_len

        return "".join(self._show(character, cell_len(character)) for character in piece)

    def _show(self, character: str, cells: int) -> str:
        if character in "\n\r":
            self._column = 0
            self._end_word()
            return character
        if character.isspace():
            self._end_word()
            if self._column + cells > self._edge:
                self._column = 0
                return "\n"  # in place of the space
            self._column += cells
            return character
        moved = ""
        starts_line = self._word_cells == self._column
        if self._column + cells > (self.width if starts_line else self._edge):
            if starts_line:  # the word fills the line, and the terminal goes on in the next one by itself
                self._column = 0
                self._end_word()
            else:
                moved = self._move_word()
        self._word.append(character)
        self._word_cells += cells
        self._column += cells
        return moved + character

    def _move_word(self) -> str:
        """Erase the word so far and begin it again on the next line."""
        erase = f"\x1b[{self._word_cells}D\x1b[K" if self._word else ""
        self._column = self._word_cells
        return erase + "\n" + "".join(self._word)

    def _end_word(self) -> None:
        self._word.clear()
        self._word_cells = 0


def shown_on_stdout() -> Callable[[str], None]:
    """A function that shows pieces of a text on stdout at once: wrapped on a terminal, elsewhere as they are."""
    wrapper = StreamWrapper(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None

    def show(piece: str) -> None:
        sys.stdout.write(piece if wrapper is None else wrapper.push(piece))
        sys.stdout.flush()

    return show
