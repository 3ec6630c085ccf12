"""Notes on what left: the model's own two lines, written while nobody waits, there again before a message."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headwater.chat.notes import CUT, FURTHEST, LINES, LONGEST, LOT, OPENING, Notes
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.errors import BudgetError, UsageError
from tests.chat.talk import GREEDY, SYSTEM, check_step, check_turns, said

STORY = "I sailed to Oslo in the rain and the parrot would not stop talking about the weather there"


def opened(engine: FakeEngine | None = None, **options: Any) -> Chat:
    defaults = {"budget": 900, "system": SYSTEM, "sampling": GREEDY, "summary_tokens": 400, "max_tokens": 40}
    return Chat.open(engine or Watched(), **{**defaults, **options})


class Watched(FakeEngine):
    """An engine that remembers what it was asked to sum up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[str] = []
        self.steps = 0

    def open(self, window: Any, **options: Any):
        stream = super().open(window, **options)
        if window is None and "limit_tokens" in options:
            feed, ids, place = stream.feed, [], len(self.asked)
            self.asked.append("")

            def watched(tokens: Any):
                self.steps += 1
                ids.extend(tokens)
                self.asked[place] = self.decode(ids)
                return feed(tokens)

            stream.feed = watched  # pyright: ignore[reportAttributeAccessIssue]
        return stream


def fed(chat: Chat) -> str:
    """What the model was really given as the last message."""
    turn = chat._talk.ledger.turns[-2]
    return chat.engine.decode(chat._talk.ledger.between(turn.start, turn.stop))


def chatted(chat: Chat, exchanges: int) -> list[bool]:
    """Talk and idle; whether notes came with each message."""
    came = []
    for number in range(exchanges):
        said(chat, f"{number}: {STORY}")
        assert chat.stats().trouble is None
        check_step(chat)
        came.append(OPENING in fed(chat))
        assert chat.idle()
    check_turns(chat)
    return came


def test_what_left_is_noted_once_in_order_and_without_a_gap():
    chat = opened()
    chatted(chat, 40)
    notes = chat.notes
    assert len(notes) >= 6
    assert notes[0].first == 1
    assert all(later.first == note.last + 1 for note, later in pairwise(notes))
    assert chat._talk.gone.turns // 2 - notes[-1].last <= LOT // len(STORY) + 1, "less than a lot is waiting"
    engine = chat.engine
    assert isinstance(engine, Watched)
    for note in notes:
        (asked,) = [each for each in engine.asked if f"User: {note.first - 1}: " in each]
        numbers = range(note.first - 1, note.last)
        assert all(f"User: {number}: {STORY}\nAssistant: " in asked for number in numbers)
        assert f"User: {note.last}: " not in asked
        assert 1 <= len(note.text.splitlines()) <= LINES
        assert len(engine.encode(note.text)) <= LONGEST
    chat.close()


def test_notes_are_in_the_cache_all_the_time_once_and_within_their_allowance():
    chat = opened()
    came = chatted(chat, 60)
    first = came.index(True)
    assert not all(came[first:]), "they are not brought while they are there"
    ledger = chat._talk.ledger
    held = [turn for turn in ledger.turns if turn.start >= chat._talk.first and turn.role == "user"]
    with_notes = [OPENING in chat.engine.decode(ledger.between(turn.start, turn.stop)) for turn in held]
    assert any(with_notes)
    said(chat, "and now?")
    while OPENING not in fed(chat):
        said(chat, "and now?")
    assert chat.stats().recalled[0].startswith("notes on turns ")
    block = fed(chat)[fed(chat).index(OPENING) : fed(chat).index("and now?")]
    assert len(chat.engine.encode(block)) <= 400
    notes = chat._reminders.notes
    assert notes is not None
    assert all(note.text in block for note in notes.brought)
    chat.close()


def test_the_latest_notes_are_taken_when_not_all_fit():
    chat = opened()
    chatted(chat, 60)
    notes = chat._reminders.notes
    assert notes is not None
    chosen = notes._chosen()
    assert chosen == chat.notes[-len(chosen) :]
    assert 1 <= len(chosen) < len(chat.notes)
    chat.close()


def after_one():
    looks = iter([False])
    return lambda: next(looks, True)


def test_it_ends_within_a_step_and_goes_on_where_it_was():
    """However often it is stopped, the notes are those of a chat that was never stopped."""
    whole, halting = opened(), opened()
    for number in range(30):
        for chat in (whole, halting):
            said(chat, f"{number}: {STORY}")
        whole.idle()
        engine = halting.engine
        assert isinstance(engine, Watched)
        before = engine.steps
        while not halting.idle(after_one()):
            assert engine.steps <= before + 1
            before = engine.steps
    assert whole.notes == halting.notes != ()
    assert whole.messages == halting.messages
    whole.close()
    halting.close()


def test_without_an_idle_moment_nothing_is_noted_and_the_chat_goes_on():
    chat = opened()
    for number in range(20):
        said(chat, f"{number}: {STORY}")
    assert chat.notes == ()
    assert chat.stats().trouble is None
    assert chat.idle()
    assert len(chat.notes) >= 2, "all that waited is noted at once"
    chat.close()


def test_of_a_long_past_only_the_latest_is_noted():
    chat = opened()
    for number in range(FURTHEST + 40):
        said(chat, f"{number}: {STORY}")
    chat.idle()
    gone = chat._talk.gone.turns // 2
    assert chat.notes[0].first == gone - FURTHEST + 1 > 1
    chat.close()


def test_an_exchange_larger_than_a_lot_is_noted_without_its_middle():
    chat = opened(budget=2000)
    said(chat, "begin " + "x" * 1500 + " end")
    for number in range(30):
        said(chat, f"{number}: {STORY}")
    chat.idle()
    engine = chat.engine
    assert isinstance(engine, Watched)
    assert CUT in engine.asked[0]
    assert "begin" in engine.asked[0]
    assert (chat.notes[0].first, chat.notes[0].last) == (1, 1)
    chat.close()


def test_a_model_that_fails_or_says_nothing_stops_no_chat():
    class Failing(FakeEngine):
        def open(self, window: Any, **options: Any):
            if window is None:
                raise MemoryError("no room")
            return super().open(window, **options)

    chat = opened(Failing())
    for number in range(20):
        said(chat, f"{number}: {STORY}")
        assert chat.idle()
    assert chat.stats().trouble == "no notes on what left: no room"
    assert chat.notes == ()
    chat.close()

    class Silent(Notes):
        def _lot(self, talk: Any):
            return [] if self.written else [(1, "x" * LOT)]

    engine = FakeEngine()
    silent = Silent(engine, allowance=100)
    engine.decode = lambda tokens: " \n"  # pyright: ignore[reportAttributeAccessIssue]
    talk = opened()._talk
    assert silent.write(talk, lambda: False)
    assert silent.trouble == "the model wrote nothing on turns 1 to 1"
    assert silent.bring(talk) == ""


def test_a_session_has_its_notes_again(tmp_path: Path):
    path = tmp_path / "x.db"
    with opened(session=path) as chat:
        came = chatted(chat, 30)
        notes = chat.notes
        said(chat, "one more")
        there = OPENING in fed(chat) or any(came[-3:])
    with opened(session=path) as again:
        assert again.notes == notes
        standing = again._reminders.notes
        assert standing is not None
        assert (standing._standing is not None) or not there
        assert again.idle()
        assert again.notes == notes, "what was noted is not noted again"
        said(again, "what now?")
        again.reset()
        assert again.notes == ()
        said(again, "hello")
    with opened(session=path) as third:
        assert third.notes == ()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"summary_tokens": 10}, UsageError, "summary_tokens must be an integer of at least 48, got 10"),
        ({"summary_tokens": -1}, UsageError, "summary_tokens must be an integer"),
        ({"summary_tokens": True}, UsageError, "summary_tokens must be an integer"),
        (
            {"summary_tokens": 800, "budget": 160},
            BudgetError,
            "summary_tokens may take 800 tokens and the budget of 160",
        ),
        (
            {"summary_tokens": 100, "memory": True, "memory_tokens": 90, "budget": 160},
            BudgetError,
            "memory_tokens and summary_tokens may take 190 tokens",
        ),
    ],
)
def test_allowances_that_cannot_be_are_refused(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        opened(**options)


def test_notes_off_is_the_default():
    chat = opened(summary_tokens=0)
    for number in range(20):
        said(chat, f"{number}: {STORY}")
    assert chat.idle()
    assert chat.notes == ()
    chat.close()
