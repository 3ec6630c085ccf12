"""A text that goes on: no turns and no template, in a fixed budget all the same.

Knows how a text is fed and continued. Does not know messages or sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headwater.chat.answer import Answer, Watch
from headwater.chat.conversation import Conversation, Frame
from headwater.chat.due import Steps
from headwater.chat.ledger import Ledger
from headwater.chat.reader import check_text, checked_stops
from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.template import Template
from headwater.engines.base import Engine
from headwater.errors import ContextFull, UsageError
from headwater.policies import Policy, require

NO_TEMPLATE = Template(head=(), first_user_open=(), user_open=(), user_close=(), answer_close=(), trims=False)


class Continuation:
    """`prompt_tokens`, `tokens` and `finished` are what it is so far. Raises UsageError for an empty text."""

    def __init__(
        self,
        engine: Engine,
        text: str,
        *,
        policy: Policy[Any],
        sampling: Sampling,
        max_tokens: int,
        stop: tuple[str, ...] = (),
        watch: Watch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_text(text)
        require(policy, engine.supplies)
        self._ids = engine.encode(text)
        if not self._ids:
            raise UsageError("the text is empty; there is nothing to go on from")
        frame = Frame.around(policy, NO_TEMPLATE)
        self._talk = Conversation(frame, frame.open(engine), Ledger())
        self._engine, self._sampler, self._stop = engine, Sampler(sampling), checked_stops(stop)
        self._max_tokens, self._watch, self._clock = max_tokens, watch, clock
        self.prompt_tokens, self.tokens, self.finished = len(self._ids), 0, False

    def steps(self, piece: int) -> Steps:
        """What has to be fed, `piece` tokens of the prompt at a time, and the text in pieces."""
        talk = self._talk
        try:
            if not talk.fits(len(self._ids) + 1):
                raise ContextFull(f"the text takes {len(self._ids)} tokens and {talk.full}")
            dues = talk.dues(self._ids, piece)
            for due in dues:
                yield due
                due.result()
            answer = Answer(
                self._engine,
                talk,
                self._sampler,
                dues[-1].result(),
                asked=talk.gone,
                stop=self._stop,
                max_tokens=self._max_tokens,
                clock=self._clock,
                watch=self._watch,
            )
            over = False
            while not over:
                if (due := answer.due) is not None:
                    yield due
                said, over = answer.step()
                self.tokens, self.finished = answer.tokens, answer.finished
                yield said
        finally:
            talk.close()
