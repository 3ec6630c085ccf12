"""A conversation taken up again: from its snapshot where that can be trusted, from the journal where it cannot.

Knows how journal, ledger and stream are brought back into step. Does not know sampling, nor when a snapshot is made.
Only what the window held is fed again, so it takes as long after a million turns as after ten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from headwater.chat.conversation import Conversation, Frame
from headwater.chat.journal import Chapter, Entry, Journal
from headwater.chat.ledger import Gone, Ledger
from headwater.chat.store import Opened
from headwater.engines.base import Engine, Stream
from headwater.errors import ContextFull, SnapshotError
from headwater.policies import Policy

BATCH = 1000
"""Turns read at a time where all of them are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """A conversation as it was; `entry` is its last turn, and `unanswered` says that it is a user's message.
    `saved_turns` is how many its snapshot has, None where there was none to go on from. `said` is what the user
    should know."""

    talk: Conversation
    chapter: int
    entry: Entry | None
    unanswered: bool
    saved_turns: int | None
    said: tuple[str, ...]


def notes_of(opened: Opened, chapter: int, entry: Entry | None, talk: Conversation) -> dict[str, str]:
    """What a snapshot says of the place in the journal that it belongs to."""
    return {
        "session": opened.uid,
        "chapter": str(chapter),
        "turns": str(0 if entry is None else entry.number + 1),
        "mark": "" if entry is None else entry.mark,
        "skipped": str(talk.skipped),
    }


def resume(engine: Engine, policy: Policy[Any], opened: Opened, *, same_window: bool = True) -> TakenUp | None:
    """Take up the latest chapter; None when there is none yet. `same_window` says that policy and budget are those it
    was held with last.

    Raises ContextFull when it is longer than a policy that never evicts allows, BudgetError as `Frame.of` does.
    """
    journal = opened.journal
    chapter = journal.chapter()
    if chapter is None:
        return None
    said: list[str] = []
    frame = Frame.of(engine, policy, chapter.system)
    wording = frame.template.wording(engine)
    if chapter.wording != wording or chapter.head is None or chapter.head.tolist() != list(frame.template.head):
        if chapter.wording is not None:
            said.append("another tokenizer or chat template than before: what was said was read again")
        _read_again(engine, journal, chapter, frame, wording)
        same_window = False
    count = journal.count(chapter.number)
    last = journal.entry(chapter.number, count - 1) if count else None
    talk, saved_turns = _from_snapshot(engine, opened, chapter, frame, count, said)
    if talk is None:
        talk = _from_journal(engine, journal, chapter, frame, count, last, same_window=same_window)
    return TakenUp(
        talk=talk,
        chapter=chapter.number,
        entry=last,
        unanswered=last is not None and last.turn.role == "user",
        saved_turns=saved_turns,
        said=tuple(said),
    )


def _from_snapshot(
    engine: Engine, opened: Opened, chapter: Chapter, frame: Frame, count: int, said: list[str]
) -> tuple[Conversation | None, int | None]:
    """The cache as it was saved with the turns since then fed once more, and how many turns were saved."""
    if not opened.snapshot.exists():
        if count:
            said.append("no snapshot of the cache was there; it was made again from the journal")
        return None, None
    journal = opened.journal
    try:
        restored = engine.restore(opened.snapshot, frame.holds, limit_tokens=frame.limit_tokens)
    except SnapshotError as error:
        said.append(f"{error}; the cache was made again from the journal")
        return None, None
    turns = _fitting(restored.notes, opened, chapter, count)
    if turns is None:
        restored.stream.close()
        said.append("the snapshot of the cache is of another conversation; it was made again from the journal")
        return None, None
    at = journal.entry(chapter.number, turns - 1).turn.stop if turns else len(frame.template.head)
    stream = restored.stream
    skipped = int(restored.notes["skipped"])
    first = frame.first(stream, at, skipped)
    ledger = _ledger(journal, chapter, frame, first, turns)
    talk = Conversation(frame, stream, ledger, skipped=skipped)
    talk.check_in_step()
    for entry in journal.entries(chapter.number, turns, count):
        _again(talk, entry)
    return talk, turns


def _fitting(notes: Mapping[str, str], opened: Opened, chapter: Chapter, count: int) -> int | None:
    """After how many turns of this chapter a snapshot was made; None for one that is not of this journal."""
    if notes.get("session") != opened.uid or notes.get("chapter") != str(chapter.number):
        return None
    turns = int(notes["turns"])
    if turns > count or (turns and opened.journal.entry(chapter.number, turns - 1).mark != notes["mark"]):
        return None
    return turns


def _again(talk: Conversation, entry: Entry) -> None:
    """Feed a turn as it was fed: a question at once, an answer token by token, and what closed it at once."""
    closing = len(entry.ids) if entry.turn.role == "user" else int(entry.details.get("closing", 0))
    body = len(entry.ids) - closing
    talk.replay(entry.ids[:body])
    if closing:
        talk.feed(entry.ids[body:])
    talk.ledger.turns.append(entry.turn)


def _from_journal(
    engine: Engine,
    journal: Journal,
    chapter: Chapter,
    frame: Frame,
    count: int,
    last: Entry | None,
    *,
    same_window: bool,
) -> Conversation:
    """A new cache that holds what the old one held, as far as it fits the budget."""
    end = len(frame.template.head) if last is None else last.turn.stop
    if frame.limit_tokens is not None and end > frame.limit_tokens:
        raise ContextFull(
            f"the conversation has {end} tokens and the budget is {frame.limit_tokens}, which this policy never frees; "
            "raise the budget, or take streaming-llm"
        )
    first = frame.pins + last.gone_tokens if same_window and last is not None else 0
    if frame.limit_tokens is None and end - max(first - frame.pins, 0) > frame.budget:
        first = _latest_that_fits(journal, chapter, frame, count, end)
    skipped = max(0, first - frame.pins)
    ledger = _ledger(journal, chapter, frame, first if skipped else 0, count)
    stream: Stream = frame.open(engine)
    front, rest = ledger.front if ledger.base else ledger.ids, ledger.ids[first - ledger.base :]
    ids = array("q", chain(front[: frame.pins], rest)) if skipped else ledger.ids
    if ids:
        stream.feed(ids.tolist())
    return Conversation(frame, stream, ledger, skipped=skipped, fed=len(ids))


def _latest_that_fits(journal: Journal, chapter: Chapter, frame: Frame, count: int, end: int) -> int:
    """The earliest position from which on whole exchanges fit beside the pins; of a larger exchange, its end."""
    least = end - (frame.budget - frame.pins)
    number = journal.from_position(chapter.number, least, before=count)
    for entry in journal.entries(chapter.number, number, count):
        if entry.turn.role == "user" and entry.turn.start >= least:
            return entry.turn.start
    return least


def _ledger(journal: Journal, chapter: Chapter, frame: Frame, first: int, count: int) -> Ledger:
    """The ledger after `count` turns, from the exchange that covers position `first` on."""
    head = array("q", frame.template.head)
    number = journal.from_position(chapter.number, first, before=count) if count else 0
    ledger = Ledger()
    if number:
        front = head[:]
        for entry in journal.entries(chapter.number):
            if len(front) >= frame.pins:
                break
            front.extend(entry.ids)
        ledger = Ledger(front=front[: frame.pins], past_turns=number)
        ledger.base = journal.entry(chapter.number, number).turn.start
    else:
        ledger.add(head)
    for entry in journal.entries(chapter.number, number, count):
        ledger.add(entry.ids)
        ledger.turns.append(entry.turn)
    return ledger


def _read_again(engine: Engine, journal: Journal, chapter: Chapter, frame: Frame, wording: str) -> None:
    """Write down the ids that this engine's tokenizer and template make of what was said."""
    template = frame.template

    def entries() -> Iterator[Entry]:
        place, count = len(template.head), journal.count(chapter.number)
        for first in range(0, count, BATCH):
            for entry in list(journal.entries(chapter.number, first, min(first + BATCH, count))):
                turn = entry.turn
                if turn.role == "user":
                    ids = template.question(engine, turn.text, first=entry.number == 0)
                else:
                    ids = [*engine.encode(turn.text), *template.answer_close]
                turn = replace(turn, start=place, stop=place + len(ids), evicted=Gone())
                place = turn.stop
                yield replace(entry, turn=turn, ids=array("q", ids), gone_tokens=0)

    journal.rewrite(chapter.number, wording, template.head, entries())
