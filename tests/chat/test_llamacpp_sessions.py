"""Sessions and memory on the llama.cpp engine: a chat that is there tomorrow, whatever happened to its snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.chat.session import Chat
from headwater.errors import UsageError
from tests import tiny_gguf
from tests.llamacpp import require_llamacpp

ENGINE = "llamacpp:n_threads=1"
SAID = [f"message number {index}" for index in range(12)]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Open the same session again and again; the arguments are those of `Chat.open`."""
    require_llamacpp()
    model = tiny_gguf.write(tmp_path / "tiny.gguf", context_length=1024)

    def make(**given: Any) -> Chat:
        given.setdefault("engine", ENGINE)
        sampling = {"temperature": 0.0}
        return Chat.open(str(model), session=tmp_path / "talk.db", max_tokens=12, sampling=sampling, **given)

    return make


def test_a_session_goes_on_from_its_snapshot(opened: Any):
    with opened(system="Be brief.", budget=200) as chat:
        for text in SAID:
            "".join(chat.send(text))
        seen, held = chat.stats().seen, chat.stats().held
        assert chat.stats().evicted_turns > 10
    with opened() as chat:
        assert chat.stats().notice is None
        assert (chat.stats().seen, chat.stats().held) == (seen, held)
        assert chat._talk.stream.seen == seen  # from the snapshot: nothing was fed again
        "".join(chat.send("more"))
        assert chat._talk.stream.kept.tolist() == [
            *range(chat._talk.pins),
            *range(chat._talk.first, chat._talk.stream.seen),
        ]


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_session_without_a_usable_snapshot_goes_on_from_its_journal(opened: Any, harm: str):
    with opened(budget=200) as chat:
        assert chat._keeper is not None
        snapshot = chat._keeper.opened.snapshot
        for text in SAID:
            "".join(chat.send(text))
    if harm == "missing":
        snapshot.unlink()
    else:
        snapshot.write_bytes(snapshot.read_bytes()[:-50])
    with opened() as chat:
        assert "made again from the journal" in (chat.stats().notice or "")
        assert [message["content"] for message in chat.messages if message["role"] == "user"] == SAID
        "".join(chat.send("more"))


def test_a_session_keeps_its_engine_and_the_engine_s_options(opened: Any):
    with opened(budget=200, engine=f"{ENGINE},type_k=q8_0") as chat:
        "".join(chat.send("hi"))
    with opened(engine=None) as chat:
        assert chat.engine.settings.type_k == "q8_0"
    with pytest.raises(UsageError, match="was begun with 'llamacpp:n_threads=1,type_k=q8_0' as its engine"):
        opened()


def test_memory_brings_back_what_left(opened: Any):
    with opened(budget=400, memory=True, memory_tokens=100) as chat:
        "".join(chat.send("The password is marzipan."))
        for text in SAID:
            "".join(chat.send(text))
        assert chat.stats().evicted_turns > 2
        "".join(chat.send("What is the password, marzipan?"))
        assert chat.stats().recalled
