"""Breaking lines between words in text that is still being written.

Knows how wide characters are. Does not know where the text comes from. A word is held back until it is whole, so it
comes at most one piece late; scripts that are written without spaces break after any character.
"""

from __future__ import annotations

from rich.cells import cell_len

_LONGEST_WORD = 32
"""Longer ones are given out in parts, unbroken, so that nothing waits for a space that never comes."""


class Wrapper:
    """Text goes in by pieces and comes out with line breaks, never wider than `width` unless one word is."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._gap = self._word = ""
        self._after_wide = False

    def push(self, text: str) -> str:
        """What can be shown now."""
        out = []
        for letter in text:
            if letter == "\n":
                out.append(self.finish() + "\n")
                self._column = 0
            elif letter.isspace():
                out.append(self._place())
                self._gap += letter
            else:
                self._word += letter
                if cell_len(letter) > 1 or len(self._word) >= _LONGEST_WORD:
                    out.append(self._place())
        return "".join(out)

    def finish(self) -> str:
        """What is left at the end."""
        return self._place()

    def _place(self) -> str:
        """The word held back, after its gap or on a new line."""
        if not self._word:
            return ""
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        breakable = gap or self._after_wide or cell_len(word[0]) > 1
        self._after_wide = cell_len(word[-1]) > 1
        if self._column and breakable and self._column + cell_len(gap + word) > self.width:
            gap, self._column = "\n", 0
        self._column += cell_len(gap.lstrip("\n") + word)
        return gap + word
