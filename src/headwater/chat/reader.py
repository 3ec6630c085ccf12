"""From generated tokens to pieces of text that can be shown at once, and what is text at all.

Knows that a character may take several tokens, and that the text may be about to become a stop string. Does not know
where the tokens come from. Whatever the pieces, together they are the decoded answer up to the stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headwater.errors import UsageError

_UNFINISHED = "\ufffd"
_TAIL = 16
"""Decoding restarts this many tokens back, so that a long answer costs no more per token than a short one."""


def checked_stops(stop: Sequence[str] | str) -> tuple[str, ...]:
    """The stop strings. Raises UsageError for an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"a stop string must be text of at least one character, got {text!r}")
    return stops


def check_message(text: str) -> None:
    """Raises UsageError for what cannot be said: nothing, white space, lone surrogates."""
    if not text.strip():
        raise UsageError("the message is empty; type something")
    check_text(text)


def check_text(text: str) -> None:
    """Raises UsageError for a text with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the message is not valid text: character {error.start + 1} is a lone surrogate, {text[error.start]!r}"
        ) from error


class Reader:
    """Reads one answer, token by token."""

    def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tail: list[int] = []
        self._shown = 0
        self._waiting = ""
        self._given = 0
        self._ends: list[int] = []
        self.stopped = False
        """Whether a stop string was found; nothing comes after it."""
        self.surplus = 0
        """Once stopped: how many of the newest tokens lie wholly in the stop string or after it."""

    def push(self, token: int) -> str:
        """Text that is certain now; often empty."""
        self._tail.append(token)
        text = self._decode(self._tail)
        # A last character that is still incomplete decodes to one replacement character, until the rest has come.
        settled = len(text) - text.endswith(_UNFINISHED)
        self._take(text[self._shown : settled])
        self._shown = max(self._shown, settled)
        if len(self._tail) >= 2 * _TAIL and settled == len(text):
            self._tail = self._tail[-_TAIL:]
            self._shown = len(self._decode(self._tail))
        return self._give()

    def flush(self) -> str:
        """What was held back, at the end of the answer. An unfinished character comes out as U+FFFD."""
        if self.stopped:
            return ""
        self._waiting += self._decode(self._tail)[self._shown :]
        self._tail, self._shown = [], 0
        out, self._waiting = self._waiting, ""
        return out

    def _take(self, new: str) -> None:
        self._waiting += new
        self._ends.append(self._given + len(self._waiting))

    def _give(self) -> str:
        places = [place for stop in self._stop if (place := self._waiting.find(stop)) >= 0]
        if places:
            self.stopped = True
            safe = min(places)
            end = self._given + safe
            self.surplus = sum(start >= end for start in [0, *self._ends[:-1]])
        else:
            safe = len(self._waiting) - max((_overlap(self._waiting, stop) for stop in self._stop), default=0)
        out, self._waiting = self._waiting[:safe], self._waiting[safe:]
        self._given += safe
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
