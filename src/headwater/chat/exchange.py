"""Sessions as text: out to JSON lines or Markdown, in from JSON lines, and whether what is kept is sound.

Knows what a line may hold and which one was wrong. Does not know models: an imported conversation has no tokens until
a model reads it, which happens when it is opened.

JSON lines are an object each: `{"chapter": 1, "system": ...}` begins a conversation, and
`{"role": "user" | "assistant", "content": ...}` is a message; other keys are the exporter's notes and are ignored on
the way in, so that a chat of another program's needs only role and content.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from headwater.chat.journal import Entry, now
from headwater.chat.ledger import Turn
from headwater.chat.store import Opened, Store
from headwater.engines.snapshot import check_snapshot
from headwater.errors import InputFileError, SnapshotError

ROLES = ("user", "assistant")
LONGEST_MESSAGE = 1_000_000
"""Characters in one message of an imported file, at most."""


def as_json_lines(opened: Opened) -> Iterator[str]:
    """Every chapter and message of a session, a line each."""
    for number in range(1, _chapters(opened) + 1):
        chapter = opened.journal.chapter(number)
        if chapter is None:
            continue
        yield _line({"chapter": number, "system": chapter.system})
        for entry in opened.journal.entries(number):
            turn = entry.turn
            yield _line(
                {
                    "role": turn.role,
                    "content": turn.text,
                    "time": entry.created,
                    "tokens": turn.stop - turn.start,
                    "finished": turn.finished,
                    "evicted_tokens": turn.evicted.tokens,
                    "evicted_turns": turn.evicted.turns,
                }
            )


def as_markdown(opened: Opened) -> Iterator[str]:
    """A session for people to read, a piece for each message."""
    yield f"# {opened.name}"
    for number in range(1, _chapters(opened) + 1):
        chapter = opened.journal.chapter(number)
        if chapter is None:
            continue
        if number > 1:
            yield f"---\n\n## Conversation {number}"
        if chapter.system is not None:
            yield f"*System prompt:* {chapter.system}"
        for entry in opened.journal.entries(number):
            cut = "" if entry.turn.finished else " *(cut short)*"
            yield f"**{entry.turn.role}**, {entry.created[:16].replace('T', ' ')}{cut}\n\n{entry.turn.text}"


def import_json_lines(store: Store, name: str, lines: Iterable[bytes], source: str) -> int:
    """A new session with what the lines say; returns its messages.

    All or nothing. Raises InputFileError naming the line that cannot be used, UsageError where the session is there
    already.
    """
    opened = store.open(name, exist=False)
    count = 0
    try:
        with opened.journal.all_or_nothing():
            for chapter, entry in _parsed(opened, lines, source):
                opened.journal.add(chapter, entry)
                count += 1
        if not count:
            raise InputFileError(f"{source} holds no message")
    except BaseException:
        opened.close()
        store.delete(name)
        raise
    opened.close()
    return count


def _parsed(opened: Opened, lines: Iterable[bytes], source: str) -> Iterator[tuple[int, Entry]]:
    chapter, turns = 0, 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        said = _object(line, f"{source}, line {number}")
        where = f"{source}, line {number}"
        if "chapter" in said:
            _check_last(turns, where)
            chapter, turns = _begin(opened, said.get("system"), where), 0
            continue
        if said.get("role") == "system" and turns == 0:
            chapter = _begin(opened, said.get("content"), where)
            continue
        role, text = said.get("role"), said.get("content")
        if role != ROLES[turns % 2]:
            raise InputFileError(
                f"{where}: the role is {role!r} where {ROLES[turns % 2]!r} comes next; messages of user and assistant "
                "take turns, beginning with the user's"
            )
        chapter = chapter or _begin(opened, None, where)
        turn = Turn(
            role=ROLES[turns % 2], text=_text(text, where), start=0, stop=0, finished=bool(said.get("finished", True))
        )
        created = said.get("time") if isinstance(said.get("time"), str) else now()
        yield chapter, Entry(number=turns, turn=turn, ids=array("q"), gone_tokens=0, created=str(created))
        turns += 1
    _check_last(turns, source)


def _check_last(turns: int, where: str) -> None:
    if turns % 2:
        raise InputFileError(f"{where}: the last message of a conversation is the user's; add its answer")


def _begin(opened: Opened, system: Any, where: str) -> int:
    return opened.journal.begin(
        system=None if system is None else _text(system, where, what="system prompt"), wording=None, head=None
    )


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError as error:  # of UTF-8 or of JSON
        raise InputFileError(f"{where} is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise InputFileError(f"{where} is not an object with role and content: {line[:40]!r}")
    return said


def _text(value: Any, where: str, *, what: str = "content") -> str:
    if not isinstance(value, str) or not (value.strip() or what == "content"):
        raise InputFileError(f"{where}: the {what} is {value!r:.60}, not a text")
    if len(value) > LONGEST_MESSAGE:
        raise InputFileError(
            f"{where}: the {what} has {len(value):,} characters; at most {LONGEST_MESSAGE:,} are taken, so split it"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputFileError(
            f"{where}: the {what} is not valid text: character {error.start + 1} is a lone surrogate"
        ) from error
    return value


def faults_of(opened: Opened) -> list[str]:
    """What is wrong with a session, in words; empty when it is sound. A snapshot that is wrong costs time, no words."""
    found = [f"the database: {fault}" for fault in opened.journal.integrity()]
    for number in range(1, _chapters(opened) + 1):
        chapter = opened.journal.chapter(number)
        if chapter is None:
            found.append(f"conversation {number} is missing")
            continue
        place = len(chapter.head) if chapter.head is not None else 0
        for index, entry in enumerate(opened.journal.entries(number)):
            where, turn = f"conversation {number}, message {index}", entry.turn
            if entry.number != index:
                found.append(f"{where} is missing; {entry.number} comes next")
                break
            if turn.role != ROLES[index % 2]:
                found.append(f"{where} is the {turn.role}'s, out of turn")
            if chapter.wording is not None and (turn.start != place or turn.stop - turn.start != len(entry.ids)):
                found.append(f"{where}: its tokens do not follow those before it")
            place = turn.stop
    if opened.snapshot.exists():
        try:
            check_snapshot(opened.snapshot)
        except SnapshotError as error:
            found.append(f"{error}; it will be made again from the journal")
    return found


def _chapters(opened: Opened) -> int:
    last = opened.journal.chapter()
    return 0 if last is None else last.number


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False)
