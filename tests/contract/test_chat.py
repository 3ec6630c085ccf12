"""A session drives every engine alike: whole turns leave, the ledger is what the stream holds."""

from __future__ import annotations

import pytest

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine


@pytest.mark.parametrize("policy", ["streaming-llm", "sliding-window"])
def test_a_session_past_the_window(engine: Engine, policy: str):
    chat = Chat.open(engine, system="Hi.", budget=110, policy=policy, sampling=Sampling(temperature=0), max_tokens=20)
    talk = chat._talk
    for index in range(25):
        for _ in chat.send(f"message {index}"):
            assert talk.stream.held <= 110
            assert talk.stream.seen == len(talk.ledger)
            starts = {turn.start for turn in chat.turns if turn.role == "user"} | {talk.pins}
            assert talk.first in starts
        kept = talk.stream.kept.tolist()
        assert kept == [*range(min(talk.pins, talk.first)), *range(talk.first, talk.stream.seen)]
        assert talk.held_ids().tolist() == [talk.ledger.ids[position] for position in kept]
    assert chat.stats().evicted_turns > 40
    assert chat.stats().seen > 5 * 110


def test_answers_depend_on_the_engine_and_the_seed_alone(engine: Engine):
    def answers() -> list[str]:
        chat = Chat.open(engine, budget=110, sampling=Sampling(temperature=1.5, seed=3), max_tokens=15)
        return ["".join(chat.send(text)) for text in ("one", "two", "three", "four")]

    assert answers() == answers()


def test_a_stop_string_is_rolled_back_or_left_exactly(engine: Engine, tolerance: float):
    """After a stop string the next message goes on from what the ledger holds."""
    plain = Chat.open(engine, budget=110, sampling=Sampling(temperature=0), max_tokens=30)
    text = "".join(plain.send("hello"))
    stop = text[6:8]
    chat = Chat.open(engine, budget=110, sampling=Sampling(temperature=0), max_tokens=30, stop=stop)
    assert "".join(chat.send("hello")) == text[: text.index(stop)]
    stream = engine.open(chat._talk.stream.window)
    stream.feed(chat._talk.ledger.ids.tolist())
    again = chat._talk.feed(engine.encode("x"))
    assert abs(again - stream.feed(engine.encode("x"))).max() <= tolerance
