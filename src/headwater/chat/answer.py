"""An answer while it is being generated: one token after another, until something ends it.

Knows how a token is fed, drawn and read, and how an answer is closed so that the next message can follow. Does not know
messages, sessions or what the user is told.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.chat.conversation import Conversation
from headwater.chat.due import Due
from headwater.chat.interrupts import whole_step
from headwater.chat.ledger import Gone
from headwater.chat.reader import Reader
from headwater.chat.sampling import Sampler
from headwater.engines.base import Engine
from headwater.errors import ContextFull

Watch = Callable[[NDArray[np.float32], int], None]
"""Is shown the logits that a token was drawn from, `[vocab]`, and the token."""


class Answer:
    """`asked` and `before` are what had left the cache before its message, and before itself. `text`, `tokens`,
    `finished` and `tokens_per_s` are what it is so far."""

    def __init__(
        self,
        engine: Engine,
        talk: Conversation,
        sampler: Sampler,
        logits: NDArray[np.float32],
        *,
        asked: Gone,
        stop: tuple[str, ...],
        max_tokens: int,
        clock: Callable[[], float],
        watch: Watch | None = None,
    ) -> None:
        self._engine, self._talk, self._sampler, self._clock = engine, talk, sampler, clock
        self._reader, self._logits, self._max_tokens = Reader(engine.decode, stop), logits, max_tokens
        self._pending: list[int] = []  # drawn and shown, but not fed yet
        self._due: Due | None = None
        self._began, self._busy_s = 0.0, 0.0
        self._watch = watch
        self.start, self.asked, self.before = len(talk.ledger), asked, talk.gone
        self.text, self.tokens, self.finished, self.closing = "", 0, False, 0

    @property
    def tokens_per_s(self) -> float | None:
        """Without the time to the first token; None before the second."""
        return (self.tokens - 1) / self._busy_s if self._busy_s > 0 else None

    @property
    def due(self) -> Due | None:
        """The token that was drawn last, which has to be fed before the next `step`; None before the first."""
        if self._due is None and self._pending:
            self._began = self._clock()
            (self._due,) = self._talk.dues(self._pending, 1)
        return self._due

    def step(self) -> tuple[str, bool]:
        """Draw and read. The piece of text, and whether the answer is over.

        Raises what feeding the token that was due raised, and ContextFull in a conversation that never evicts and has
        no room for a token and the end of the answer.
        """
        talk = self._talk
        with whole_step():
            if self._due is not None:
                self._logits = self._due.result()
                self._pending, self._due = [], None
            if not talk.fits(1 + len(talk.template.answer_close)):
                raise ContextFull(f"the answer was cut: {talk.full}")
            token = self._sampler.draw(self._logits, talk.held_ids() if self._sampler.wants_context else ())
            if token in self._engine.stop_tokens:
                self.finished = True
                return self._show(self._reader.flush()), True
            self._pending = [token]
            self.tokens += 1
            if self._watch is not None:
                self._watch(self._logits, token)
            piece = self._reader.push(token)
            self.finished = self._reader.stopped
            over = self.finished or self.tokens == self._max_tokens
            if over:
                piece += self._reader.flush()
            if self.tokens > 1:
                self._busy_s += self._clock() - self._began
            return self._show(piece), over

    def close(self) -> None:
        """Feed what ends it. Its last `closing` tokens were fed at once."""
        talk = self._talk
        if self._due is not None and self._due.fed:
            self._pending = []
        self._show(self._reader.flush())
        if self._reader.surplus:
            self._pending = []
            talk.take_back(self._reader.surplus - 1)
        ids = [*self._pending, *talk.template.answer_close]
        talk.feed(ids)
        self.closing = len(ids)

    def _show(self, piece: str) -> str:
        self.text += piece
        return piece
