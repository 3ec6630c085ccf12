"""Memory in a chat, on the fake engine: what left is brought back once, within its allowance, and never in the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.chat.recalling import CLOSING, OPENING
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.errors import BudgetError, UsageError
from headwater.memory import Memory, Passage, Recalled
from tests.chat.talk import GREEDY, MESSAGES, SYSTEM, said, stream_of

FACT = "the parrot is called Quintus"


class Noting:
    """A memory that notes what it is given, and brings what it is told to."""

    def __init__(self) -> None:
        self.kept: list[Passage] = []
        self.bring: list[Passage] | None = None

    def remember(self, passages: Sequence[Passage]) -> None:
        self.kept += passages

    def recall(self, text: str, *, conversation: str, limit: int = 5, skip: Collection[str] = ()) -> list[Recalled]:
        found = self.kept if self.bring is None else self.bring
        words = {word for word in text.split() if len(word) > 5}
        wanted = [each for each in found if each.key not in skip and words & set(each.text.split())]
        return [Recalled(passage=each, score=1.0) for each in wanted[:limit]]


class Broken(Noting):
    def remember(self, passages: Sequence[Passage]) -> None:
        raise OSError("the disk is gone")

    recall: Any = remember


def opened(memory: Any, **options: Any) -> Chat:
    defaults = {"budget": 500, "system": SYSTEM, "sampling": GREEDY, "memory_tokens": 200}
    return Chat.open(FakeEngine(), memory=memory, **{**defaults, **options})


def fed(chat: Chat, turn: int) -> str:
    """What the model was really given as that turn."""
    ledger = chat._talk.ledger
    each = ledger.turns[turn - ledger.past_turns]
    return chat.engine.decode(ledger.between(each.start, each.stop))


def chatted(chat: Chat, exchanges: int) -> None:
    for index in range(exchanges):
        said(chat, MESSAGES[index % len(MESSAGES)])


@pytest.mark.parametrize("memory", [True, Noting(), Memory(embedder=None)], ids=["own", "noting", "words"])
def test_what_left_long_ago_is_brought_before_the_message(memory: Any):
    chat = opened(memory)
    said(chat, FACT)
    chatted(chat, 40)
    said(chat, "what is the parrot called?")
    assert "turn 1, 20" in chat.stats().recalled[0]
    given = fed(chat, chat.stats().turns - 2)
    assert f"{OPENING}> turn 1, 20" in given
    assert f"> I said: {FACT}\n> You said: {chat.messages[2]['content'].strip()[:20]}" in given
    assert given.index(FACT) < given.index("what is the parrot called?")
    assert chat.messages[-2]["content"] == "what is the parrot called?"
    assert stream_of(chat).tokens == chat._talk.held_ids().tolist()
    assert chat.stats().trouble is None
    chat.close()


def test_without_memory_nothing_is_brought():
    chat = opened(False)
    said(chat, FACT)
    chatted(chat, 40)
    said(chat, "what is the parrot called?")
    assert OPENING not in fed(chat, chat.stats().turns - 2)
    with pytest.raises(UsageError, match="has no memory"):
        chat.recall("parrot")


def test_every_exchange_is_kept_once_and_in_order():
    memory = Noting()
    chat = opened(memory)
    for index in range(60):
        said(chat, f"message {index}")
        assert [each.number for each in memory.kept] == list(range(1, index + 2))
    assert memory.kept[3].text == f"user: message 3\nassistant: {chat.messages[8]['content']}"
    assert memory.kept[3].when == chat.turns[6].when != ""


def test_what_was_brought_is_not_brought_again_while_it_is_there():
    memory = Noting()
    chat = opened(memory)
    said(chat, FACT)
    chatted(chat, 40)
    question = "what is the parrot called?"
    said(chat, question)
    assert len(chat.stats().recalled) == 1
    said(chat, question)
    assert chat.stats().recalled == ()
    assert [each.passage.number for each in chat.recall("parrot")] == []
    chatted(chat, 40)  # both have left, and the first question can be found, too
    said(chat, "the parrot")
    assert "turn 1," in chat.stats().recalled[0]


@pytest.mark.parametrize("allowance", [48, 60, 100, 200])
def test_the_allowance_holds_and_the_newest_is_last(allowance: int):
    memory = Noting()
    memory.bring = [
        Passage(key=str(n), conversation="c", number=n, text=f"parrot {n} " + "é🙂 " * length)
        for n, length in ((7, 1), (3, 2), (9, 60), (5, 1))
    ]
    chat = opened(memory, memory_tokens=allowance)
    said(chat, "parrot")
    given = fed(chat, 0)
    block = given[given.index(OPENING) : given.rindex(CLOSING + "parrot") + len(CLOSING)] if OPENING in given else ""
    assert len(chat.engine.encode(block)) <= allowance
    numbers = [int(part.split("\n")[0]) for part in block.split("> turn ")[1:]]
    assert numbers == sorted(numbers)
    if allowance == 200:
        assert numbers == [3, 7, 9]
        assert "…" in block


def test_only_what_fits_better_than_all_that_is_there_is_brought():
    """What is brought beside an answer that the model can see distracts it."""
    memory = Noting()
    chat = opened(memory)
    said(chat, FACT)
    chatted(chat, 40)
    memory.bring = []
    said(chat, "the parrot is green")
    kept = list(memory.kept)
    memory.bring = [kept[-1], kept[0]]  # the one that is held ranks first
    said(chat, "the parrot now")
    assert chat.stats().recalled == ()
    memory.bring = [kept[0], kept[-1]]
    said(chat, "the parrot now")
    assert len(chat.stats().recalled) == 1
    assert "turn 1," in chat.stats().recalled[0]


def test_what_was_brought_leaves_with_its_message():
    memory = Noting()
    chat = opened(memory)
    said(chat, FACT)
    chatted(chat, 40)
    said(chat, "what is the parrot called?")
    start = chat.turns[-2].start
    while chat._talk.first <= start:
        said(chat)
    assert FACT not in chat.engine.decode(stream_of(chat).tokens)


def test_a_memory_that_fails_stops_nothing():
    chat = opened(Broken())
    chatted(chat, 40)
    assert "memory kept nothing of what was said: the disk is gone" in (chat.stats().trouble or "")
    whole = opened(False)
    chatted(whole, 40)
    assert chat.messages == whole.messages


def test_what_failed_is_kept_when_memory_works_again():
    memory: Any = Noting()
    chat = opened(memory)
    memory.remember = Broken().remember
    chatted(chat, 40)
    assert memory.kept == []
    del memory.remember
    said(chat)
    assert [each.number for each in memory.kept] == list(range(1, 42))
    assert chat.stats().trouble is None


@pytest.mark.parametrize("allowance", [47, 0, True, "9"])
def test_an_allowance_that_cannot_be_is_refused(allowance: Any):
    with pytest.raises(UsageError, match="memory_tokens must be an integer of at least 48"):
        opened(Noting(), memory_tokens=allowance)


def test_an_allowance_larger_than_the_window_is_refused():
    with pytest.raises(BudgetError, match=r"memory_tokens may take 500 tokens and the budget of 500 leaves \d+; raise"):
        opened(Noting(), memory_tokens=500)


def test_a_prompt_that_leaves_memory_no_room_leaves_the_chat_as_it_was():
    chat = opened(Noting())
    said(chat, FACT)
    messages, held = chat.messages, chat._talk.held_ids().tolist()
    with pytest.raises(BudgetError, match="memory_tokens may take 200 tokens"):
        chat.set_system("You know a great deal about boats. " * 9)
    assert chat.messages == messages
    assert stream_of(chat).tokens == held
    assert said(chat)


# In a session.


def test_a_session_remembers_across_an_end(tmp_path: Path):
    file = tmp_path / "talk.db"
    first = opened(True, session=file)
    said(first, FACT)
    chatted(first, 40)
    first.close()
    again = opened(True, session=file, system=None)
    said(again, "what is the parrot called?")
    assert "turn 1," in again.stats().recalled[0]
    again.close()
    last = opened(True, session=file, system=None)
    said(last, "the parrot called what?")
    assert not any("turn 1," in each for each in last.stats().recalled), "what was brought before is still there"
    last.close()


def test_memory_that_comes_later_reads_what_had_left_before(tmp_path: Path):
    file = tmp_path / "talk.db"
    first = opened(False, session=file)
    said(first, FACT)
    chatted(first, 40)
    first.close()
    again = opened(True, session=file, system=None)
    assert again._talk.ledger.past_turns > 0
    assert [each.passage.number for each in again.recall("parrot")][:1] == [1]
    again.close()


def test_starting_over_forgets_nothing_else(tmp_path: Path):
    chat = opened(True, session=tmp_path / "talk.db")
    said(chat, FACT)
    chatted(chat, 40)
    chat.reset()
    said(chat, "what is the parrot called?")
    assert chat.stats().recalled == ()
    chat.close()
