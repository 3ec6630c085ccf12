"""A chat driven step by step, taken back, and told of exchanges that were had elsewhere; on the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.chat.due import Due, driven
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.chat.store import Store
from headwater.engines.fake import FakeEngine
from headwater.errors import CacheStateError, StoreError, UnknownName, UsageError
from headwater.memory import Memory
from tests.chat.talk import GREEDY, MESSAGES, SYSTEM, check_step, check_turns, opened, said, stream_of

LONG = "and what of the boat that lay in the harbour? " * 4


def held(chat: Chat) -> list[int]:
    return chat._talk.held_ids().tolist()


def check_step_of_a_part(chat: Chat) -> None:
    """Of a conversation that was made again, the ledger has the latest part alone."""
    talk = chat._talk
    assert stream_of(chat).tokens == held(chat)
    assert talk.skipped + stream_of(chat).seen == len(talk.ledger)


def kept(file: Path, **options: Any) -> Chat:
    return Chat.open(FakeEngine(), session=file, **{"budget": 400, "system": SYSTEM, "sampling": GREEDY, **options})


# Steps.


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_steps_say_what_send_says(piece: int):
    whole, stepped = opened(), opened()
    for text in [*MESSAGES, LONG, *MESSAGES]:
        steps = list(driven(stepped.steps(text, piece=piece)))
        assert "".join(steps) == said(whole, text)
        check_step(stepped)
    assert held(stepped) == held(whole)
    assert stepped.turns == whole.turns


def test_a_long_message_takes_several_steps_before_the_first_token():
    chat = opened(budget=600)
    question = len(chat._talk.template.question(chat.engine, LONG, first=True))
    steps = chat.steps(LONG, piece=50)
    for count in range(1, -(-question // 50)):
        due = next(steps)
        assert isinstance(due, Due)
        assert chat.stats().turns == 0
        due.feed()
        assert chat._talk.ledger.ids[-1] == chat._talk.template.question(chat.engine, LONG, first=True)[50 * count - 1]
    due = next(steps)
    assert isinstance(due, Due)
    due.feed()
    assert isinstance(next(steps), str)
    assert [turn.role for turn in chat._talk.ledger.turns] == ["user"]


def test_what_was_fed_in_vain_is_told_where_it_is_waited_for():
    chat = opened()
    steps = chat.steps("hi")
    due = next(steps)
    assert isinstance(due, Due)
    with pytest.raises(CacheStateError, match="nobody has fed them"):
        due.result()
    due.take(MemoryError("no memory for this step"))
    assert not due.fed
    with pytest.raises(MemoryError, match="no memory for this step"):
        next(steps)
    assert chat.turns == ()
    check_step(chat)
    assert said(chat) == said(opened())


def test_a_token_that_was_fed_when_nobody_waits_any_more_is_not_fed_again():
    chat, other = opened(), opened()
    steps = chat.steps("hi")
    pieces = 0
    for step in steps:
        if isinstance(step, Due):
            step.feed()
            if pieces == 3:
                break
        else:
            pieces += 1
    steps.close()
    heard = driven(other.steps("hi"))
    for _ in range(3):
        next(heard)
    heard.close()
    assert held(chat) == held(other)
    check_step(chat)


def test_a_message_that_nobody_waits_for_is_fed_to_its_end():
    chat, other = opened(budget=600), opened(budget=600)
    steps = chat.steps(LONG, piece=50)
    next(steps)
    steps.close()
    assert [(turn.role, turn.text, turn.finished) for turn in chat.turns] == [
        ("user", LONG, True),
        ("assistant", "", False),
    ]
    check_step(chat)
    check_turns(chat)
    list(zip(other.send(LONG), range(1), strict=False))
    assert said(chat)


def test_watching_shows_what_every_token_was_drawn_from():
    chat, seen = opened(sampling=Sampling(temperature=0, repetition_penalty=1)), []
    text = "".join(driven(chat.steps("hi", watch=lambda logits, token: seen.append((int(np.argmax(logits)), token)))))
    assert bytes(token for _, token in seen).decode() == text
    assert all(best == token for best, token in seen)
    assert chat.stats().answer_tokens == len(seen)


def test_another_way_of_drawing_holds_from_the_next_answer_on():
    sampling = Sampling(temperature=1.5, seed=4)
    first, second = opened(), opened()
    for chat in (first, second):
        said(chat)
        chat.draw_by(sampling)
    assert said(first, "more") == said(second, "more")
    assert first.sampling == sampling
    greedy = opened()
    said(greedy)
    assert said(greedy, "more") != first.turns[-1].text


# Taking back.


@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_what_was_taken_back_was_never_said(exchanges: int):
    chat, other = opened(budget=600), opened(budget=600)
    for number in range(4):
        said(chat, f"message {number}")
        if number < 4 - exchanges:
            said(other, f"message {number}")
    assert chat.take_back(exchanges)
    assert (held(chat), chat.turns) == (held(other), other.turns)
    assert said(chat, "and now?") == said(other, "and now?")
    check_turns(chat)


def test_what_something_left_for_cannot_be_taken_back():
    chat = opened(budget=120)
    while chat.stats().evicted_turns == 0:
        said(chat, "how are you today?")
    while chat._talk.ledger.turns[-1].evicted.tokens == 0:
        said(chat, "how are you today?")
    before = held(chat), chat.turns
    assert not chat.take_back(1)
    assert (held(chat), chat.turns) == before


@pytest.mark.parametrize("exchanges", [1, 2, 5])
def test_a_cache_is_made_again_where_something_left(tmp_path: Path, exchanges: int):
    """What is held then is what was held then; what had left is not fed again."""
    chat, other = kept(tmp_path / "a.db", budget=160), kept(tmp_path / "b.db", budget=160)
    for number in range(20):
        said(chat, f"message {number} of many")
        if number < 20 - exchanges:
            said(other, f"message {number} of many")
    before = chat.stats().fed
    assert not chat.take_back(5)
    assert chat.take_back(exchanges, again=True)
    assert held(chat) == held(other)
    assert chat.turns == other.turns
    assert chat.stats().fed - before <= 160
    said(chat, "and now?")
    check_step_of_a_part(chat)
    chat.close()
    again = Chat.restore(tmp_path / "a.db", FakeEngine())
    assert len(again.turns) == 2 * (20 - exchanges) + 2
    again.close()
    other.close()


@pytest.mark.parametrize("exchanges", [0, -1, 3])
def test_more_than_was_said_cannot_be_taken_back(exchanges: int):
    chat = opened(budget=600)
    said(chat)
    said(chat)
    with pytest.raises(UsageError, match="there are 2 exchanges"):
        chat.take_back(exchanges)


def test_a_session_goes_on_from_what_was_left(tmp_path: Path):
    chat, other = kept(tmp_path / "a.db"), kept(tmp_path / "b.db")
    said(chat, "one")
    said(chat, "two")
    said(other, "one")
    assert chat.take_back(1)
    answers = [said(each, "three") for each in (chat, other)]
    chat.close()
    again = Chat.restore(tmp_path / "a.db", FakeEngine())
    assert answers[0] == answers[1]
    assert [turn.text for turn in again.turns] == [turn.text for turn in other.turns]
    assert said(again, "four") == said(other, "four")
    again.close()
    other.close()
    opened = Store(tmp_path / "a.db").open("a", create=False)
    assert [entry.turn.text for entry in opened.journal.entries(1)][::2] == ["one", "two"], "nothing that was said goes"
    opened.close()


def test_a_disk_that_refuses_leaves_the_conversation_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chat = kept(tmp_path / "a.db")
    said(chat, "one")
    said(chat, "two")
    before = held(chat), chat.turns
    keeper = chat._keeper
    assert keeper is not None

    def full(**_: object) -> int:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(keeper.journal, "begin", full)
        with pytest.raises(StoreError, match="the disk is full"):
            chat.take_back(1)
    assert (held(chat), chat.turns) == before
    said(chat, "three")
    assert chat.stats().trouble is None
    chat.close()


def test_memory_forgets_what_was_brought_with_what_is_taken_back():
    chat = opened(budget=600, memory=Memory(embedder=None), memory_tokens=200)
    said(chat, "the boat is called Ariel")
    while not chat.stats().evicted_turns:
        said(chat, "and so on and on")
    for _ in range(30):
        said(chat, "what is the boat called?")
        assert chat._reminders.recaller is not None
        came = chat._reminders.recaller.present if chat.stats().recalled else {}
        if came and chat.take_back(1):
            assert all(at < chat.stats().seen for at in chat._reminders.recaller.present.values())
            break
    else:
        raise AssertionError("nothing that came with a message could be taken back")
    said(chat, "what is the boat called?")
    assert chat.stats().recalled


# Hearing.


def test_what_was_heard_is_as_if_it_had_been_said():
    whole, told = opened(budget=300), opened(budget=300)
    for text in MESSAGES:
        told.hear(text, said(whole, text))
        assert [(turn.role, turn.text) for turn in told.turns] == [(turn.role, turn.text) for turn in whole.turns]
        check_step(told)
    assert said(told, "so?") == said(whole, "so?")


def test_what_was_heard_comes_back_with_the_session(tmp_path: Path):
    chat, whole = kept(tmp_path / "a.db", budget=120), opened(budget=120)
    for number in range(8):
        chat.hear(f"question {number}", "a rather long answer, which was given elsewhere")
        whole.hear(f"question {number}", "a rather long answer, which was given elsewhere")
    chat.close()
    again = Chat.restore(tmp_path / "a.db", FakeEngine())
    assert held(again) == held(whole)
    assert said(again) == said(whole)
    again.close()


def test_what_is_no_text_is_not_heard():
    chat = opened()
    with pytest.raises(UsageError, match="lone surrogate"):
        chat.hear("hi", "\ud800")
    assert not chat.turns
    assert stream_of(chat).seen == len(chat._talk.template.head)


# The store.


def test_a_session_that_was_taken_from_a_store(tmp_path: Path):
    store = Store(tmp_path / "many.db")
    chat = Chat.open(FakeEngine(), session=store.open("first"), budget=300)
    said(chat, "one")
    assert chat.stats().fed == chat.stats().seen
    chat.close()
    again = Chat.open(FakeEngine(), session=store.open("first", create=False))
    assert (again.stats().fed, again.stats().turns) == (0, 2)
    again.close()


def test_a_session_can_be_renamed(tmp_path: Path):
    store = Store(tmp_path / "many.db")
    for name in ("first", "second"):
        store.open(name).close()
    store.rename("first", "third")
    assert {listed.name for listed in store.list()} == {"second", "third"}
    with pytest.raises(UsageError, match="there is a session 'third' already"):
        store.rename("second", "third")
    with pytest.raises(UsageError, match="cannot be the name"):
        store.rename("second", "../x")
    with pytest.raises(UnknownName, match="unknown session 'first'"):
        store.rename("first", "fourth")
