"""Tokens that are due: a conversation says what it has to be fed next, and whoever drives it feeds them.

Knows who is fed what, and what came of it. Does not know turns, text, or who drives: one who drives a single
conversation feeds them at once (`driven`), one who drives several feeds a token to each together (`feed_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from headwater.chat.interrupts import whole_step
from headwater.engines.base import Engine, Stream
from headwater.errors import CacheStateError


class Due:
    """Tokens for a stream. `written` is told of them as soon as they are fed."""

    def __init__(self, stream: Stream, ids: Sequence[int], written: Callable[[Sequence[int]], None]) -> None:
        self.stream, self.ids = stream, ids
        self._written = written
        self._came: NDArray[np.float32] | Exception | None = None

    @property
    def fed(self) -> bool:
        """Whether the stream holds them."""
        return isinstance(self._came, np.ndarray)

    def feed(self) -> None:
        """Feed them; what goes wrong is raised by `result`, where the conversation waits for it."""
        with whole_step():
            try:
                self.take(self.stream.feed(self.ids))
            except Exception as error:
                self._came = error

    def take(self, came: NDArray[np.float32] | Exception) -> None:
        """They were fed elsewhere: the logits after the last one, `[vocab]`, or why they were not."""
        if not isinstance(came, Exception):
            self._written(self.ids)
        self._came = came

    def result(self) -> NDArray[np.float32]:
        """The logits after the last one, `[vocab]`. Raises what feeding them raised."""
        if self._came is None:
            raise CacheStateError(f"{len(self.ids)} tokens are due and nobody has fed them; feed() them first")
        if isinstance(self._came, Exception):
            raise self._came
        return self._came


Steps = Generator[Due | str, None, None]
"""What a conversation does: it asks for tokens to be fed, and says a piece of text for every token that it drew."""


def driven(steps: Steps) -> Generator[str, None, None]:
    """The pieces of text of one conversation, whose tokens are fed when they are due."""
    with closing(steps):
        for step in steps:
            if isinstance(step, Due):
                step.feed()
            else:
                yield step


def feed_together(engine: Engine, dues: Sequence[Due]) -> None:
    """Feed tokens that are due in conversations of one engine, a single one in each."""
    came = engine.feed_together([due.stream for due in dues], [due.ids[0] for due in dues])
    for due, each in zip(dues, came, strict=True):
        due.take(each)
