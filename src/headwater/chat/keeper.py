"""What keeps a chat: every turn into the journal at once, and a snapshot of the cache now and then.

Knows when to write and what to do when the disk will not take it: the chat goes on, `trouble` says what is wrong, and
what could not be written is tried again with the next turn. Does not know turns, sampling or how a snapshot looks.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headwater.chat.conversation import Conversation
from headwater.chat.journal import Entry
from headwater.chat.ledger import Turn
from headwater.chat.prefixes import Prefixes
from headwater.chat.resume import BATCH, TakenUp, notes_of, resume
from headwater.chat.settings import Settings
from headwater.chat.store import Opened
from headwater.engines.base import Engine, Snapshot
from headwater.errors import HeadwaterError, StoreError, UsageError
from headwater.policies import Policy

PREFIXES = "prompts"
NOTES = 64
"""How many notes of a conversation are taken up again: more than any allowance takes."""
EVERY_TURNS = 16
EVERY_S = 60.0
"""A snapshot is made after so many turns, or after the first turn when so much time has passed."""


class Keeper:
    """Keeps one session, from `resume` to `close`. `clock` is in seconds and never goes back."""

    def __init__(
        self,
        opened: Opened,
        settings: Settings,
        system: str | None = None,
        *,
        clock: Callable[[], float],
        every_turns: int = EVERY_TURNS,
        every_s: float = EVERY_S,
    ) -> None:
        """`system` is a prompt that was asked for; raises UsageError where the session has another one."""
        self.opened, self.journal, self._settings = opened, opened.journal, settings
        chapter, stored = self.journal.chapter(), self.journal.settings
        if chapter is not None and system is not None and system != chapter.system:
            raise UsageError(
                f"session {opened.name!r} has another system prompt; leave it out, or change it in the chat, "
                "which begins a new conversation"
            )
        wanted = settings.as_json()
        self._same_window = all(stored.get(name) == wanted[name] for name in ("policy", "policy_options"))
        self.same_seed = stored.get("sampling", {}).get("seed") == settings.sampling.seed
        """Whether the sampler goes on where it was."""
        self.prefixes = Prefixes(opened.folder / PREFIXES)
        self._clock, self._every_turns, self._every_s = clock, every_turns, every_s
        self._chapter = 0
        self._last: Entry | None = None
        self._backlog: list[Callable[[], object]] = []
        self._writer: threading.Thread | None = None
        self._saved_turns, self._saved_at = 0, clock()
        self._journal_trouble: str | None = None
        self._snapshot_trouble: str | None = None

    @property
    def name(self) -> str:
        """What the user calls the session."""
        return self.opened.name

    @property
    def trouble(self) -> str | None:
        """What is not on the disk, and why; None when all is."""
        said = [text for text in (self._journal_trouble, self._snapshot_trouble, self.prefixes.trouble) if text]
        return "; ".join(said) or None

    # The journal.

    def resume(self, engine: Engine, policy: Policy[Any]) -> TakenUp | None:
        """What there is to go on with; None in a new session. Raises as `resume.resume` does."""
        taken = resume(engine, policy, self.opened, same_window=self._same_window)
        self.journal.keep_settings(self._settings.as_json())
        if taken is not None:
            self._chapter, self._last = taken.chapter, taken.entry
            self._saved_turns = -1 if taken.saved_turns is None else taken.saved_turns
        return taken

    def begin(self, talk: Conversation, engine: Engine) -> None:
        """A new chapter, whose conversation has only its head."""
        self._join()
        self._last, self._saved_turns = None, 0
        head, wording = array("q", talk.template.head), talk.template.wording(engine)

        self._chapter += 1  # the number that the journal gives it, now or when there is room on the disk
        self._write(lambda: self.journal.begin(system=talk.system, wording=wording, head=head))

    def turn(self, talk: Conversation, details: Mapping[str, Any]) -> None:
        """The conversation's newest turn is over: write it down."""
        turn = talk.ledger.turns[-1]
        entry = Entry(
            number=self._turns,
            turn=turn,
            ids=talk.ledger.between(turn.start, turn.stop),
            gone_tokens=talk.gone.tokens,
            created=turn.when,
            details=details,
        )
        self._last, chapter = entry, self._chapter
        self._write(lambda: self.journal.add(chapter, entry))

    def branch(self, count: int) -> None:
        """Go on from the first `count` turns: a new chapter repeats them, and the old one stays as it was.

        Raises StoreError, with nothing changed, when the disk does not take it.
        """
        self._join()
        self.catch_up()
        if self._backlog:
            raise StoreError(f"session {self.name!r} cannot go back: {self._journal_trouble}")
        old, journal = self.journal.chapter(self._chapter), self.journal
        if old is None:
            raise StoreError(f"session {self.name!r} has lost conversation {self._chapter}; look at it with verify")
        with journal.all_or_nothing():
            chapter = journal.begin(system=old.system, wording=old.wording, head=old.head)
            names = f"{self.opened.uid}/{old.number}:", f"{self.opened.uid}/{chapter}:"
            for first in range(0, count, BATCH):
                for entry in list(journal.entries(old.number, first, min(count, first + BATCH))):
                    journal.add(chapter, _repeated(entry, *names))
            for first, last, text in journal.notes(old.number, NOTES):
                if 2 * last <= count:
                    journal.add_note(chapter, first, last, text)
        self._chapter, self._saved_turns = chapter, -1
        self._last = journal.entry(chapter, count - 1) if count else None

    @property
    def conversation(self) -> str:
        """What tells this conversation from all others."""
        return f"{self.opened.uid}/{self._chapter}"

    def earlier(self, first: int, stop: int) -> tuple[Turn, ...]:
        """The turns `[first, stop)` of the conversation; after `close`, too."""
        if first >= stop:
            return ()
        with self.opened.reading() as journal:
            return tuple(entry.turn for entry in journal.entries(self._chapter, first, stop))

    def brought(self, talk: Conversation) -> list[tuple[int, Mapping[str, Any]]]:
        """Where the turns in the ledger begin, oldest first, with the details of each."""
        entries = self.journal.entries(self._chapter, talk.ledger.past_turns)
        return [(entry.turn.start, entry.details) for entry in entries]

    def note(self, first: int, last: int, text: str) -> None:
        """Write down what the model wrote on the exchanges from `first` to `last`."""
        chapter = self._chapter
        self._write(lambda: self.journal.add_note(chapter, first, last, text))

    def notes(self) -> list[tuple[int, int, str]]:
        """The latest notes of the conversation, oldest first."""
        return self.journal.notes(self._chapter, NOTES)

    @property
    def _turns(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    def _write(self, new: Callable[[], object]) -> None:
        """Write what is waiting, and this; what the disk does not take waits."""
        self._backlog.append(new)
        self.catch_up()

    def catch_up(self) -> None:
        """Try once more to write what is waiting."""
        try:
            while self._backlog:
                self._backlog[0]()
                del self._backlog[0]
            self._journal_trouble = None
        except StoreError as error:
            count = len(self._backlog)
            self._journal_trouble = (
                f"{count} entr{'y' if count == 1 else 'ies'} of the journal not on the disk: {error}"
            )

    # Snapshots.

    def rest(self, talk: Conversation) -> None:
        """Between two exchanges: make a snapshot if one is due, and let it be written beside the chat."""
        due = self._turns - self._saved_turns >= self._every_turns or self._clock() - self._saved_at >= self._every_s
        if due and self._turns != self._saved_turns and not (self._writer and self._writer.is_alive()):
            self.save(talk, wait=False)

    def save(self, talk: Conversation, *, wait: bool = True) -> None:
        """Make a snapshot of the conversation as it is now; with `wait`, it is on the disk when this returns, or
        `trouble` says why not."""
        self._join()
        if self._backlog:
            self.catch_up()
        if self._backlog:
            return  # a snapshot of what the journal does not have could never be used
        self._saved_turns, self._saved_at = self._turns, self._clock()
        try:
            snapshot = talk.stream.snapshot()
        except HeadwaterError as error:  # a model with a state that cannot be saved: the journal is enough
            self._snapshot_trouble = f"no snapshot of the cache: {error}"
            return
        notes = notes_of(self.opened, self._chapter, self._last, talk)
        self._writer = threading.Thread(target=self._store, args=(snapshot, notes), name="headwater-snapshot")
        self._writer.start()
        if wait:
            self._join()

    def _store(self, snapshot: Snapshot, notes: Mapping[str, str]) -> None:
        try:
            snapshot.write(self.opened.snapshot, notes)
            self._snapshot_trouble = None
        except (HeadwaterError, OSError) as error:
            self._snapshot_trouble = f"no snapshot of the cache: {error}"

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def close(self, talk: Conversation | None) -> None:
        """Save the conversation if it can be (None: it cannot) and give the session back.

        Raises StoreError when messages could not be written; they are lost then.
        """
        try:
            if talk is not None and self._turns != self._saved_turns:
                self.save(talk)
            self._join()
            self.catch_up()
        finally:
            self.opened.close()
        if self._backlog:
            raise StoreError(f"session {self.name!r} was closed with {self._journal_trouble}")


def _repeated(entry: Entry, old: str, new: str) -> Entry:
    """A turn as another conversation has it, of which memory knows nothing yet."""
    recalled = [key.replace(old, new, 1) for key in entry.details.get("recalled", ())]
    return replace(entry, details={**entry.details, "recalled": recalled, "remembered": 0})
