"""The journal of a session: every message as rows in the user's database, written before it is shown as complete.

Knows the tables of a conversation and what follows from them. Does not know models, caches or files. A snapshot of a
cache is only worth something together with the journal, and `Entry.mark` is what it is checked against.

A session has chapters: `/reset` and a new system prompt begin another one. Positions, turns and ids are those of a
chapter. Times are for people only; what came first is told by numbers, so a clock may go backwards.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from headwater.chat.ledger import Gone, Turn
from headwater.database import faults, writing
from headwater.errors import StoreError

_TURN = "number, role, text, start, stop, ids, finished, evicted_tokens, evicted_turns, gone_tokens, created, details"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A turn as the journal has it. `number` counts from 0; `gone_tokens` had left the cache in all when it ended;
    `details` holds usage, timings, recalls and the sampler's state, as JSON allows."""

    number: int
    turn: Turn
    ids: array[int]
    gone_tokens: int
    created: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """What tells this turn from every other that could stand in its place."""
        turn = self.turn
        said = json.dumps([self.number, turn.role, turn.text, turn.start, turn.stop, self.created])
        return hashlib.sha256(said.encode() + _blob(self.ids)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """What a chapter began with. `wording` tells a tokenizer and chat template from others; None, like `head`, where
    the chapter was never read by a model."""

    number: int
    system: str | None
    wording: str | None
    head: array[int] | None


class Journal:
    """The rows of one session. Raises StoreError when the disk or the file will not do what is asked."""

    def __init__(self, connection: sqlite3.Connection, path: Path, session: int) -> None:
        self._rows, self.path, self.id = connection, path, session

    # What the session is.

    @property
    def settings(self) -> dict[str, Any]:
        """What the session was opened with last, as JSON allows."""
        return json.loads(self._one("SELECT settings FROM sessions WHERE id = ?", self.id)[0])

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Remember what the session is opened with."""
        with self._writing():
            self._rows.execute(
                "UPDATE sessions SET settings = ? WHERE id = ?", (json.dumps(settings, sort_keys=True), self.id)
            )

    def chapter(self, number: int | None = None) -> Chapter | None:
        """A chapter, by default the latest; None before the first."""
        with faults(self.path):
            row = self._rows.execute(
                "SELECT number, system, wording, head FROM chapters WHERE session = ? AND number = "
                "coalesce(?, (SELECT chapter FROM sessions WHERE id = ?))",
                (self.id, number, self.id),
            ).fetchone()
        if row is None:
            return None
        head = None if row[3] is None else _ids(row[3])
        return Chapter(number=row[0], system=row[1], wording=row[2], head=head)

    def begin(self, *, system: str | None, wording: str | None, head: Sequence[int] | None) -> int:
        """Open the next chapter; returns its number."""
        with self._writing():
            (number,) = self._one("SELECT coalesce(max(number), 0) + 1 FROM chapters WHERE session = ?", self.id)
            self._rows.execute(
                "INSERT INTO chapters VALUES (?, ?, ?, ?, ?, ?)",
                (self.id, number, system, wording, None if head is None else _blob(head), now()),
            )
            self._rows.execute("UPDATE sessions SET chapter = ?, updated = ? WHERE id = ?", (number, now(), self.id))
        return number

    # Turns.

    def add(self, chapter: int, entry: Entry) -> None:
        """Write a turn down; it is on the disk when this returns. Raises StoreError for one that does not come next."""
        turn = entry.turn
        row = (
            *(self.id, chapter, entry.number, turn.role, turn.text, turn.start, turn.stop, _blob(entry.ids)),
            *(turn.finished, turn.evicted.tokens, turn.evicted.turns, entry.gone_tokens, entry.created),
            json.dumps(entry.details),
        )
        with self._writing():
            if entry.number != self.count(chapter):
                raise StoreError(
                    f"turn {entry.number} does not come next: {self.path} has {self.count(chapter)} turns of this "
                    "conversation; was it changed by another program?"
                )
            self._rows.execute(f"INSERT INTO turns VALUES ({', '.join('?' * len(row))})", row)
            self._rows.execute("UPDATE sessions SET updated = ? WHERE id = ?", (now(), self.id))

    def count(self, chapter: int) -> int:
        """How many turns a chapter has."""
        return self._one(
            "SELECT coalesce(max(number) + 1, 0) FROM turns WHERE session = ? AND chapter = ?", self.id, chapter
        )[0]

    def entries(self, chapter: int, first: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The turns `[first, stop)` of a chapter in order, read as they are asked for."""
        with faults(self.path):
            rows = self._rows.execute(
                f"SELECT {_TURN} FROM turns WHERE session = ? AND chapter = ? AND number >= ? AND number < ? "
                "ORDER BY number",
                (self.id, chapter, first, 1 << 62 if stop is None else stop),
            )
            for row in rows:
                yield _entry(row)

    def entry(self, chapter: int, number: int) -> Entry:
        """One turn."""
        return next(self.entries(chapter, number, number + 1))

    def from_position(self, chapter: int, position: int, *, before: int) -> int:
        """The number of the turn that covers a position, looked for from turn `before` backwards; a user's."""
        with faults(self.path):
            rows = self._rows.execute(
                "SELECT number FROM turns WHERE session = ? AND chapter = ? AND number < ? AND start <= ? "
                "ORDER BY number DESC LIMIT 1",
                (self.id, chapter, before, position),
            ).fetchone()
        return 0 if rows is None else rows[0] // 2 * 2

    def rewrite(self, chapter: int, wording: str, head: Sequence[int], entries: Iterator[Entry]) -> None:
        """Put other ids and positions in the place of a chapter's, all or nothing."""
        with self._writing():
            self._rows.execute(
                "UPDATE chapters SET wording = ?, head = ? WHERE session = ? AND number = ?",
                (wording, _blob(head), self.id, chapter),
            )
            self._rows.executemany(
                "UPDATE turns SET start = ?, stop = ?, ids = ?, evicted_tokens = 0, evicted_turns = 0, "
                "gone_tokens = 0 WHERE session = ? AND chapter = ? AND number = ?",
                (
                    (entry.turn.start, entry.turn.stop, _blob(entry.ids), self.id, chapter, entry.number)
                    for entry in entries
                ),
            )

    # Notes.

    def add_note(self, chapter: int, first: int, last: int, text: str) -> None:
        """Write down what was noted on the exchanges from `first` to `last`."""
        with self._writing():
            self._rows.execute(
                "INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?, ?, ?)", (self.id, chapter, last, first, text, now())
            )

    def notes(self, chapter: int, most: int) -> list[tuple[int, int, str]]:
        """The latest notes of a chapter, oldest first: the exchanges they are on, and their text."""
        with faults(self.path):
            rows = self._rows.execute(
                "SELECT first, last, text FROM notes WHERE session = ? AND chapter = ? ORDER BY last DESC LIMIT ?",
                (self.id, chapter, most),
            ).fetchall()
        return rows[::-1]

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """Everything that is written inside, or nothing."""
        return self._writing()

    def integrity(self) -> list[str]:
        """What SQLite itself finds wrong with the file."""
        with faults(self.path):
            found = [row[0] for row in self._rows.execute("PRAGMA integrity_check")]
            strays = self._rows.execute("PRAGMA foreign_key_check").fetchall()
        return [fault for fault in found if fault != "ok"] + [f"a row of {row[0]} belongs to nothing" for row in strays]

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._rows, self.path)

    def _one(self, query: str, *values: Any) -> Any:
        with faults(self.path):
            return self._rows.execute(query, values).fetchone()


def _entry(row: Sequence[Any]) -> Entry:
    number, role, text, start, stop, ids, finished, tokens, turns, gone, created, details = row
    turn = Turn(
        role=role,
        text=text,
        start=start,
        stop=stop,
        evicted=Gone(tokens=tokens, turns=turns),
        finished=bool(finished),
        when=created,
    )
    return Entry(
        number=number, turn=turn, ids=_ids(ids), gone_tokens=gone, created=created, details=json.loads(details)
    )


def _blob(ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit little-endian integers."""
    return np.asarray(ids, dtype="<i4").tobytes()


def _ids(blob: bytes) -> array[int]:
    return array("q", np.frombuffer(blob, dtype="<i4").astype(np.int64).tobytes())


def now() -> str:
    """The time of day, as the journal writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
