"""What the sessions' tests share: a chat on the fake engine, and the check that every step must pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine, FakeStream

SYSTEM = "You are brief."
GREEDY = Sampling(temperature=0)
MESSAGES = ["hi", "how are you?", "tell me more about it", "and then what happened to the boat?", "é🙂 日本", "  ok  "]


def opened(engine: Engine | None = None, **options: Any) -> Chat:
    return Chat.open(engine or FakeEngine(), **{"budget": 160, "system": SYSTEM, "sampling": GREEDY, **options})


def said(chat: Chat, text: str = "hi") -> str:
    return "".join(chat.send(text))


def stream_of(chat: Chat) -> FakeStream:
    stream = chat._talk.stream
    assert isinstance(stream, FakeStream)
    return stream


def check_step(chat: Chat) -> None:
    """What must hold between any two steps: ledger and stream agree, the budget holds, the prompt is there."""
    talk, stream = chat._talk, stream_of(chat)
    assert stream.seen == len(talk.ledger)
    assert stream.tokens == np.array(talk.ledger.ids)[stream.kept].tolist() == talk.held_ids().tolist()
    assert stream.held <= chat.stats().budget
    if talk.pins:
        assert stream.kept[: len(talk.template.head)].tolist() == list(range(len(talk.template.head)))


def check_whole_turns(chat: Chat) -> None:
    """The oldest thing held beside the pins is the beginning of a message, or what the sinks left of the first."""
    talk = chat._talk
    assert talk.first in {turn.start for turn in chat.turns if turn.role == "user"} | {talk.pins}


def check_turns(chat: Chat) -> None:
    """Turns follow one another without a gap, user and assistant in turn."""
    place = len(chat._talk.template.head)
    for index, turn in enumerate(chat.turns):
        assert turn.role == ("user", "assistant")[index % 2]
        assert turn.start == place < turn.stop
        place = turn.stop
        if turn.role == "assistant" and not chat.stop:
            assert chat.engine.decode(chat._talk.ledger.ids[turn.start : turn.stop]) == turn.text + "\n"
    assert place == len(chat._talk.ledger)
