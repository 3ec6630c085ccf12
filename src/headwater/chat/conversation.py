"""A stream and its ledger, kept in step: what is fed is written down, and room is made by whole turns.

Knows the policy's window, the template's head and the order of turns. Does not know sampling, text or the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.chat import journal
from headwater.chat.due import Due
from headwater.chat.ledger import Gone, Ledger, Turn, leaving
from headwater.chat.template import Template
from headwater.engines.base import Engine, Stream
from headwater.errors import BudgetError, CacheStateError
from headwater.policies import Policy, require
from headwater.policies.protection import WithSinks
from headwater.policies.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a conversation is held in: the template's pieces, the window, and what is pinned in it.

    `limit_tokens` is where a conversation that never evicts ends, or None for one that goes on for ever.
    """

    policy: str
    system: str | None
    template: Template
    budget: int
    sinks: int
    pins: int
    holds: Window | Policy[Any] | None
    limit_tokens: int | None

    @classmethod
    def of(cls, engine: Engine, policy: Policy[Any], system: str | None) -> Frame:
        """Raises BudgetError when the system prompt leaves no room to talk."""
        require(policy, engine.supplies)
        template = Template.derive(engine, system)
        _check_room(template, system, _pins(policy.live()), policy.budget)
        return cls.around(policy, template, system)

    @classmethod
    def around(cls, policy: Policy[Any], template: Template, system: str | None = None) -> Frame:
        """For a template that is known already."""
        holds = policy.live(len(template.head))
        return cls(
            policy=policy.name,
            system=system,
            template=template,
            budget=policy.budget,
            sinks=_pins(policy.live()),
            pins=_pins(holds),
            holds=holds,
            limit_tokens=policy.budget if holds is None else None,
        )

    def first(self, stream: Stream, end: int, skipped: int) -> int:
        """The oldest unpinned position that a stream holds, or the next one, `end`, when there is none; `skipped`
        tokens were never fed to it."""
        if isinstance(self.holds, Policy):  # any head may hold on to anything
            return skipped + stream.oldest(self.pins)
        return end - max(0, stream.held - min(self.pins, stream.held))

    def open(self, engine: Engine) -> Stream:
        """An empty stream for it."""
        return engine.open(self.holds, limit_tokens=self.limit_tokens)


class Conversation:
    """One conversation in its frame. `skipped` tokens of the ledger were never fed to this stream: they had left before
    it was taken up again."""

    def __init__(self, frame: Frame, stream: Stream, ledger: Ledger, *, skipped: int = 0, fed: int = 0) -> None:
        self.frame, self.stream, self.ledger, self.skipped = frame, stream, ledger, skipped
        self.fed = fed
        """Tokens that were computed for it here; what a snapshot brought was not."""
        self.system, self.template, self.budget = frame.system, frame.template, frame.budget
        self.sinks, self.pins, self.limit_tokens = frame.sinks, frame.pins, frame.limit_tokens

    @classmethod
    def begin(
        cls,
        engine: Engine,
        policy: Policy[Any],
        system: str | None,
        *,
        read: Callable[[Engine, Frame], Stream] | None = None,
    ) -> Conversation:
        """A new conversation, from its system prompt on. `read` gives a stream that has read the frame's head already.

        Raises BudgetError when the prompt leaves no room to talk.
        """
        frame = Frame.of(engine, policy, system)
        if read is not None and frame.template.head:
            talk = cls(frame, read(engine, frame), Ledger())
            talk.ledger.add(frame.template.head)
            return talk
        talk = cls(frame, frame.open(engine), Ledger())
        if frame.template.head:
            talk.feed(frame.template.head)
        return talk

    @property
    def first(self) -> int:
        """The oldest unpinned position held, or the next one when there is none."""
        return self.frame.first(self.stream, len(self.ledger), self.skipped)

    @property
    def gone(self) -> Gone:
        """What has left the cache so far."""
        return Gone(tokens=len(self.ledger) - self.stream.held, turns=self.ledger.gone_turns(self.first))

    @property
    def prompt_left(self) -> bool:
        """Whether tokens of the head have left, as they do under a policy that pins nothing."""
        return self.pins < len(self.template.head) and self.gone.tokens > 0

    @property
    def full(self) -> str:
        """What to say where no more fits."""
        return (
            f"{len(self.ledger)} of {self.limit_tokens} are used, which {self.frame.policy} never frees; start over "
            "with reset(), raise the budget, or use streaming-llm"
        )

    def fits(self, count: int) -> bool:
        """Whether `count` more tokens can be fed; always so where tokens are evicted."""
        return self.limit_tokens is None or len(self.ledger) + count <= self.limit_tokens

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Make room by whole turns, feed, write down. Where no whole turn is left to go, the stream evicts tokens."""
        (due,) = self.dues(ids, max(1, len(ids)))
        due.feed()
        return due.result()

    def dues(self, ids: Sequence[int], piece: int) -> list[Due]:
        """What has to be fed, in order and at most `piece` tokens at a time, for `ids` to be written down; the room is
        made now, once for all."""
        self.check_in_step()
        window = self.stream.window
        if window is not None and (need := self.stream.held + len(ids) - window.budget) > 0:
            turns = leaving(self.ledger.turns, first=self.first, need=need)
            if turns:
                self.stream.evict(turns[-1].stop - self.first)
        parts = [ids[start : start + piece] for start in range(0, max(1, len(ids)), piece)]
        return [Due(self.stream, part, self._written) for part in parts]

    def replay(self, ids: Sequence[int]) -> None:
        """Feed what was fed token by token, with the evictions that it had then, in as few pieces as that allows."""
        window, rest = self.stream.window, list(ids)
        while rest:
            count = len(rest) if window is None else max(1, window.budget - self.stream.held)
            self.feed(rest[:count])
            rest = rest[count:]

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
        turn = Turn(
            role=role, text=text, start=start, stop=stop, evicted=evicted, finished=finished, when=journal.now()
        )
        self.ledger.turns.append(turn)

    def held_ids(self) -> NDArray[np.int64]:
        """The ids the model can see now."""
        return self.ledger.held(self.pins, self.first)

    def check_in_step(self) -> None:
        """Raises CacheStateError when a step of the model failed half way, so that nobody knows what it holds."""
        fed, written = self.skipped + self.stream.seen, len(self.ledger)
        if fed != written:
            raise CacheStateError(
                f"the model holds {fed} tokens where {written} were written down, because a step failed half way; "
                "start over with reset()"
            )

    def close(self) -> None:
        self.stream.close()

    def _written(self, ids: Sequence[int]) -> None:
        self.ledger.add(ids)
        self.fed += len(ids)


def _pins(holds: Window | Policy[Any] | None) -> int:
    """How many of the first tokens never leave."""
    if isinstance(holds, Window):
        return holds.pins
    return holds.sinks if isinstance(holds, WithSinks) else 0


def _check_room(template: Template, system: str | None, sinks: int, budget: int) -> None:
    """A message and an answer of one token each must fit beside what is pinned."""
    head, needed = len(template.head), template.turn_tokens + 2
    taken = max(head, sinks)
    if budget - taken >= needed:
        return
    if sinks > head:
        what, less = f"the sinks take {sinks} tokens", "take fewer sinks"
    elif system is None:
        what, less = f"what the chat template begins with takes {head} tokens", "give a shorter system prompt"
    else:
        what, less = f"the system prompt takes {head} tokens", "shorten it"
    raise BudgetError(
        f"{what} and the budget is {budget}; the shortest message with its answer needs {needed} more: raise "
        f"the budget to at least {taken + needed}, or {less}"
    )
