"""System prompts read once and shared: the same answers, no second reading, and nothing shared that could change."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headwater.chat import prefixes
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine, FakeStream
from tests.chat.talk import GREEDY, SYSTEM, said

LONG = "You are brief and know a great deal about boats. " * 3


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens every call of `feed` was given."""
    counts: list[int] = []
    feed = FakeStream.feed

    def counted(stream: FakeStream, tokens: list[int]) -> object:
        counts.append(len(tokens))
        return feed(stream, tokens)

    monkeypatch.setattr(FakeStream, "feed", counted)
    return counts


def opened(file: Path, system: str = LONG, budget: int = 300) -> Chat:
    return Chat.open(FakeEngine(), session=file, system=system, budget=budget, sampling=GREEDY)


def prompts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/prompts/*.safetensors"))


def test_a_known_prompt_is_not_read_again(tmp_path: Path, fed: list[int]):
    whole = Chat.open(FakeEngine(), system=LONG, budget=300, sampling=GREEDY)
    head = len(whole._talk.template.head)
    first = opened(tmp_path / "a.db")
    assert head in fed
    answers = [said(first, "hi"), said(first, "more")]
    first.reset()  # the same prompt, so nothing is read
    del fed[:]
    first.reset()
    assert fed == []
    assert [said(first, "hi"), said(first, "more")] == answers == [said(whole, "hi"), said(whole, "more")]
    first.close()


def test_sessions_of_one_store_share_and_do_not_disturb_each_other(
    tmp_path: Path, fed: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path))
    chats = [Chat.open(FakeEngine(), session="a", system=LONG, budget=300, sampling=GREEDY)]
    del fed[:]
    chats.append(Chat.open(FakeEngine(), session="b", system=LONG, budget=300, sampling=GREEDY))
    assert fed == []
    first = said(chats[0], "hi")
    said(chats[0], "and more")
    assert said(chats[1], "hi") == first
    for chat in chats:
        chat.close()


def test_another_prompt_or_window_is_read_by_itself(tmp_path: Path):
    file = tmp_path / "a.db"
    chat = opened(file)
    chat.set_system(SYSTEM)
    chat.close()
    assert len(prompts(tmp_path)) == 2
    again = Chat.open(FakeEngine(), session=file, budget=250)
    again.reset()
    again.close()
    assert len(prompts(tmp_path)) == 3


def test_a_damaged_one_is_made_again(tmp_path: Path):
    chat = opened(tmp_path / "a.db")
    expected = said(chat, "hi")
    (file,) = prompts(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] + b"\0" + whole[len(whole) // 2 + 1 :])
    chat.reset()
    assert said(chat, "hi") == expected
    assert file.read_bytes() == whole
    chat.close()


def test_only_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "MOST", 3)
    chat = opened(tmp_path / "a.db")
    for index in range(6):
        chat.set_system(f"{LONG} {index}")
    assert len(prompts(tmp_path)) == 3
    chat.close()


def test_one_that_cannot_be_kept_is_said(tmp_path: Path):
    (tmp_path / "a-sessions").mkdir()
    (tmp_path / "a-sessions" / "prompts").write_text("in the way")
    chat = opened(tmp_path / "a.db")
    assert "the system prompt's cache was not kept" in (chat.stats().trouble or "")
    said(chat, "hi")
    chat.close()


def test_what_a_killed_process_left_is_swept_and_what_another_writes_is_not(tmp_path: Path):
    chat = opened(tmp_path / "a.db")
    folder = prompts(tmp_path)[0].parent
    old, new = folder / ".x.1.half", folder / ".y.2.half"
    for half in (old, new):
        half.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * prefixes.HALF_S, time.time() - 2 * prefixes.HALF_S))
    chat.set_system("Another prompt, so that one is kept.")
    assert not old.exists()
    assert new.exists()
    chat.close()
