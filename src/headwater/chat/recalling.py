"""What memory brings into a conversation: kept as it is said, recalled before a message once the cache has lost it.

Knows which exchanges the cache still holds, and what is worth bringing within an allowance of tokens: only what fits
the message better than everything that is there anyway, for the rest distracts. Does not know how anything is found.
Whatever a memory raises ends here: the answer comes without it, and `trouble` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from headwater.chat.conversation import Conversation
from headwater.chat.ledger import Turn
from headwater.engines.base import Engine
from headwater.memory.base import Passage, Recalled, Remembers

ALLOWANCE = 256
"""Tokens that recalled text may take before a message."""
MOST = 5
"""Passages brought at once."""
LEAST = 24
"""A passage is cut to what is left of the allowance only when that many tokens are."""

OPENING, CLOSING, CUT = "Earlier in our conversation:\n\n", "\n", "…\n"
ASKED, ANSWERED = "user: ", "\nassistant: "
"""What an exchange is kept as; the model is told "I said" and "You said" instead."""

Earlier = Callable[[int, int], Iterable[Turn]]
"""The turns `[first, stop)` of the conversation that are no longer in its ledger."""


class Recaller:
    """One conversation and its memory. `brought` is what came with the last message."""

    def __init__(
        self, memory: Remembers, engine: Engine, conversation: str, *, allowance: int, earlier: Earlier | None = None
    ) -> None:
        self.memory, self.conversation, self.allowance = memory, conversation, allowance
        self.brought: tuple[Passage, ...] = ()
        self.trouble: str | None = None
        self.remembered = 0
        """Exchanges that memory has."""
        self.present: dict[str, int] = {}
        """The keys of what was brought, and the position of the message that each came with."""
        self._engine, self._earlier = engine, earlier

    def keep(self, talk: Conversation) -> None:
        """Keep what was said since the last time."""
        said = talk.ledger.turn_count // 2
        if said <= self.remembered:
            return
        try:
            new = exchanges(talk, self._earlier, self.remembered, said)
            self.memory.remember(
                [
                    Passage(
                        key=self._key(number),
                        conversation=self.conversation,
                        number=number,
                        text=f"{ASKED}{asked.text}{ANSWERED}{answered.text}",
                        when=asked.when,
                    )
                    for number, (asked, answered) in enumerate(new, start=self.remembered + 1)
                ]
            )
            self.remembered, self.trouble = said, None
        except Exception as error:
            self.trouble = f"memory kept nothing of what was said: {error or type(error).__name__}"

    def look(self, text: str, talk: Conversation, *, limit: int = MOST) -> list[Recalled]:
        """What memory has to say to a text that the cache does not say better: what ranks above all that it holds."""
        held = range(talk.gone.turns // 2 + 1, talk.ledger.turn_count // 2 + 1)
        self.present = {key: start for key, start in self.present.items() if start >= talk.first}
        there = {self._key(number) for number in held} | set(self.present)
        found = self.memory.recall(text, conversation=self.conversation, limit=limit)
        return list(takewhile(lambda each: each.passage.key not in there, found))[:limit]

    def bring(self, text: str, talk: Conversation) -> str:
        """What goes before a message: a delimited block within the allowance, newest last, or nothing."""
        self.brought = ()
        self.keep(talk)
        try:
            chosen, block = self._chosen(self.look(text, talk))
        except Exception as error:
            self.trouble = f"memory brought nothing: {error or type(error).__name__}"
            return ""
        self.brought = chosen
        self.present |= dict.fromkeys((passage.key for passage in chosen), len(talk.ledger))
        return block

    def _chosen(self, found: Sequence[Recalled]) -> tuple[tuple[Passage, ...], str]:
        """The best that fit, and their block."""
        parts: list[tuple[Passage, str]] = []
        left = self.allowance - self._tokens(OPENING + CLOSING)
        for each in found:
            passage = each.passage
            label, said = f"> {origin(passage)}\n", _quoted(passage)
            room = left - self._tokens(label) - 1
            ids = self._engine.encode(said)
            if len(ids) > room:
                if room < LEAST:
                    continue
                said = self._engine.decode(ids[: room - self._tokens(CUT)]).rstrip("\ufffd") + CUT
            parts.append((passage, label + said))
            left -= self._tokens(label + said)
        while parts:
            order = sorted(parts, key=lambda part: (not part[0].source, part[0].source, part[0].number))
            block = OPENING + "".join(part[1] for part in order) + CLOSING
            if self._tokens(block) <= self.allowance:  # joined, texts may be other tokens than each by itself
                return tuple(part[0] for part in order), block
            parts.pop()
        return (), ""

    def _tokens(self, text: str) -> int:
        return len(self._engine.encode(text))

    def _key(self, number: int) -> str:
        return f"{self.conversation}:{number}"


def _quoted(passage: Passage) -> str:
    """A passage as the model is told it, every line marked as a quotation."""
    text = passage.text.strip()
    if not passage.source and text.startswith(ASKED):
        asked, _, answered = text.removeprefix(ASKED).partition(ANSWERED)
        text = f"I said: {asked}\nYou said: {answered}"
    return "".join(f"> {line}\n" for line in text.splitlines())


def origin(passage: Passage) -> str:
    """Where a passage is from, for people and models."""
    if passage.source:
        return f"{passage.source}, part {passage.number}"
    return f"turn {passage.number}" + (f", {passage.when[:16].replace('T', ' ')}" if passage.when else "")


def exchanges(talk: Conversation, earlier: Earlier | None, first: int, stop: int) -> list[tuple[Turn, Turn]]:
    """The exchanges `[first, stop)` of a conversation, counted from 0: each message with its answer."""
    first, stop, past = 2 * first, 2 * stop, talk.ledger.past_turns
    turns = list(earlier(first, min(stop, past))) if first < past and earlier is not None else []
    turns += talk.ledger.turns[max(0, first - past) : max(0, stop - past)]
    return list(zip(turns[::2], turns[1::2], strict=True))
