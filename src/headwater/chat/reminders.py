"""What goes before a message: the model's notes on what left the cache, and what memory brings of it.

Knows which of the two a chat has, and what they may take. Does not know how either finds what it says. What either of
them raises ends there: the answer comes without it, and `trouble` says why.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.chat.conversation import Conversation, Frame
from headwater.chat.keeper import Keeper
from headwater.chat.notes import Note, Notes, about
from headwater.chat.recalling import LEAST, Recaller, origin
from headwater.chat.resume import TakenUp
from headwater.engines.base import Engine
from headwater.errors import BudgetError, UsageError
from headwater.memory.base import Remembers


class Reminders:
    """Those of one conversation; either may be missing."""

    def __init__(self, recaller: Recaller | None, notes: Notes | None) -> None:
        self.recaller, self.notes = recaller, notes

    def bring(self, text: str, talk: Conversation) -> str:
        """What goes before a message, or nothing."""
        noted = "" if self.notes is None else self.notes.bring(talk)
        return noted + ("" if self.recaller is None else self.recaller.bring(text, talk))

    def keep(self, talk: Conversation) -> None:
        """Keep what was said since the last time."""
        if self.recaller is not None:
            self.recaller.keep(talk)

    def idle(self, talk: Conversation, stop: Callable[[], bool]) -> bool:
        """Write notes until all is done, or `stop` says so; whether all is done."""
        return self.notes is None or self.notes.write(talk, stop)

    @property
    def progress(self) -> dict[str, Any]:
        """What a journal has to know of every turn."""
        return {"remembered": 0 if self.recaller is None else self.recaller.remembered}

    @property
    def brought(self) -> dict[str, Any]:
        """What a journal has to know of a message: what came with it."""
        return {
            "recalled": [] if self.recaller is None else [passage.key for passage in self.recaller.brought],
            "notes": [] if self.notes is None else [note.last for note in self.notes.brought],
        }

    @property
    def told(self) -> tuple[str, ...]:
        """What came with the last message, for people."""
        noted = () if self.notes is None else tuple(map(about, self.notes.brought))
        return noted + (() if self.recaller is None else tuple(origin(each) for each in self.recaller.brought))

    @property
    def trouble(self) -> str | None:
        """What failed, and why."""
        return "; ".join(each.trouble for each in (self.recaller, self.notes) if each and each.trouble) or None

    def take_up(self, keeper: Keeper, taken: TakenUp) -> None:
        """Go on where the journal says that they were."""
        if self.recaller is not None and taken.entry is not None:
            self.recaller.remembered = int(taken.entry.details.get("remembered", 0))
            self.recaller.present = {
                key: start for start, details in keeper.brought(taken.talk) for key in details.get("recalled", ())
            }
        if self.notes is not None:
            for start, details in keeper.brought(taken.talk):
                if lasts := details.get("notes"):
                    self.notes.stand(start, [note for note in self.notes.written if note.last in lasts])

    def follow(self, before: Reminders, tokens: int) -> None:
        """Be those of a conversation that repeats the first `tokens` of the one `before`."""
        before.close()
        if self.recaller is not None and before.recaller is not None:
            old, new = before.recaller.conversation, self.recaller.conversation
            present = before.recaller.present.items()
            self.recaller.present = {key.replace(old, new, 1): at for key, at in present if at < tokens}

    def close(self) -> None:
        """Drop what was begun."""
        if self.notes is not None:
            self.notes.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a chat is to be reminded of: by a memory (None: by none) in up to `memory_tokens` before a message, and by
    notes in up to `summary_tokens` (0: none are written)."""

    memory: Remembers | None
    memory_tokens: int
    summary_tokens: int

    def check(self, frame: Frame) -> None:
        """Raises UsageError or BudgetError for allowances that cannot be, or leave no room to talk."""
        wanted = {"memory_tokens": self.memory_tokens if self.memory is not None else 0}
        wanted["summary_tokens"] = self.summary_tokens
        for name, tokens in wanted.items():
            off = tokens == 0 and (name == "summary_tokens" or self.memory is None)
            if isinstance(tokens, bool) or not isinstance(tokens, int) or (tokens < 2 * LEAST and not off):
                raise UsageError(f"{name} must be an integer of at least {2 * LEAST}, got {tokens!r}")
        allowed = sum(wanted.values())
        taken = max(frame.pins, len(frame.template.head)) + frame.template.turn_tokens + 2
        if allowed and taken + allowed > frame.budget:
            names = " and ".join(name for name, tokens in wanted.items() if tokens)
            raise BudgetError(
                f"{names} may take {allowed} tokens and the budget of {frame.budget} leaves {frame.budget - taken}; "
                f"raise the budget to at least {taken + allowed}, or lower {names}"
            )

    def begin(self, engine: Engine, keeper: Keeper | None) -> Reminders:
        """For the conversation that has begun, or was taken up again."""
        earlier = None if keeper is None else keeper.earlier
        recaller = notes = None
        if self.memory is not None:
            conversation = uuid.uuid4().hex if keeper is None else keeper.conversation
            recaller = Recaller(self.memory, engine, conversation, allowance=self.memory_tokens, earlier=earlier)
        if self.summary_tokens and keeper is None:
            notes = Notes(engine, allowance=self.summary_tokens)
        elif self.summary_tokens and keeper is not None:
            written = [Note(first=first, last=last, text=text) for first, last, text in keeper.notes()]
            notes = Notes(
                engine,
                allowance=self.summary_tokens,
                earlier=earlier,
                keep=lambda note: keeper.note(note.first, note.last, note.text),
                written=written,
            )
        return Reminders(recaller, notes)
