"""A stream and its ledger, kept in step: what is fed is written down, and room is made by whole turns.

Knows the policy's window, the template's head and the order of turns. Does not know sampling, text or the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.chat.ledger import Gone, Ledger, Turn, leaving
from headwater.chat.template import Template
from headwater.engines.base import Engine
from headwater.errors import BudgetError, CacheStateError
from headwater.policies import Policy, require


class Conversation:
    """One conversation, from its system prompt on. Raises BudgetError when the prompt leaves no room to talk."""

    def __init__(self, engine: Engine, policy: Policy[Any], system: str | None) -> None:
        require(policy, engine.supplies)
        self.system = system
        self.template = Template.derive(engine, system)
        self.budget = policy.budget
        plain = policy.window()
        self.sinks = 0 if plain is None else plain.pins
        self._check_room()
        window = policy.window(len(self.template.head))
        self.pins = 0 if window is None else window.pins
        self.limit_tokens = self.budget if window is None else None
        """Where a conversation that never evicts ends, or None for one that goes on for ever."""
        self.stream = engine.open(window, limit_tokens=self.limit_tokens)
        self.ledger = Ledger()
        if self.template.head:
            self._step(self.template.head)

    @property
    def first(self) -> int:
        """The oldest unpinned position held, or the next one when there is none."""
        held = self.stream.held
        return len(self.ledger) - max(0, held - min(self.pins, held))

    @property
    def gone(self) -> Gone:
        """What has left the cache so far."""
        return Gone(tokens=len(self.ledger) - self.stream.held, turns=self.ledger.gone_turns(self.first))

    @property
    def prompt_left(self) -> bool:
        """Whether tokens of the head have left, as they do under a policy that pins nothing."""
        return self.pins < len(self.template.head) and self.gone.tokens > 0

    def fits(self, count: int) -> bool:
        """Whether `count` more tokens can be fed; always so where tokens are evicted."""
        return self.limit_tokens is None or len(self.ledger) + count <= self.limit_tokens

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Make room by whole turns, feed, write down. Where no whole turn is left to go, the stream evicts tokens."""
        self.check_in_step()
        window = self.stream.window
        if window is not None and (need := self.stream.held + len(ids) - window.budget) > 0:
            turns = leaving(self.ledger.turns, first=self.first, need=need)
            if turns:
                self.stream.evict(turns[-1].stop - self.first)
        return self._step(ids)

    def take_back(self, count: int) -> bool:
        """Roll the newest `count` tokens back; False, with nothing changed, when they caused an eviction."""
        try:
            self.stream.rollback(count)
        except CacheStateError:
            return False
        self.ledger.take_back(count)
        return True

    def add_turn(self, role: str, text: str, *, start: int, before: Gone, finished: bool = True) -> None:
        """Everything from position `start` on was this turn; `before` is what had left when it began."""
        evicted = self.gone.since(before)
        stop = len(self.ledger)
        self.ledger.turns.append(Turn(role=role, text=text, start=start, stop=stop, evicted=evicted, finished=finished))

    def held_ids(self) -> NDArray[np.int64]:
        """The ids the model can see now."""
        return self.ledger.held(self.pins, self.first)

    def check_in_step(self) -> None:
        """Raises CacheStateError when a step of the model failed half way, so that nobody knows what it holds."""
        if self.stream.seen != len(self.ledger):
            raise CacheStateError(
                f"the model holds {self.stream.seen} tokens where {len(self.ledger)} were written down, because a step "
                "failed half way; start over with reset()"
            )

    def close(self) -> None:
        self.stream.close()

    def _step(self, ids: Sequence[int]) -> NDArray[np.float32]:
        logits = self.stream.feed(ids)
        self.ledger.add(ids)
        return logits

    def _check_room(self) -> None:
        """A message and an answer of one token each must fit beside what is pinned."""
        head, needed = len(self.template.head), self.template.turn_tokens + 2
        taken = max(head, self.sinks)
        if self.budget - taken >= needed:
            return
        if self.sinks > head:
            what, less = f"the sinks take {self.sinks} tokens", "take fewer sinks"
        elif self.system is None:
            what, less = f"what the chat template begins with takes {head} tokens", "give a shorter system prompt"
        else:
            what, less = f"the system prompt takes {head} tokens", "shorten it"
        raise BudgetError(
            f"{what} and the budget is {self.budget}; the shortest message with its answer needs {needed} more: raise "
            f"the budget to at least {taken + needed}, or {less}"
        )
