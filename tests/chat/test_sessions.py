"""Sessions on the disk, on the fake engine: gone on with after an end, a kill, a full disk, another budget."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headwater.chat import journal
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.errors import ContextFull, SessionBusy, StoreError, UnknownName, UsageError
from tests.chat.talk import GREEDY, MESSAGES, SYSTEM, check_whole_turns, said, stream_of

POLICIES = ["streaming-llm", "sliding-window", "full"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "talk.db"


def opened(file: Path, **options: Any) -> Chat:
    defaults = {"budget": 200, "system": SYSTEM, "sampling": GREEDY, "policy": "streaming-llm"}
    return Chat.open(FakeEngine(), session=file, **{**defaults, **options})


def restored(file: Path) -> Chat:
    return Chat.restore(file, FakeEngine())


def snapshots(file: Path) -> list[Path]:
    return list(file.parent.glob("*/*.safetensors"))


def rows(file: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def talked(chat: Chat, turns: int, start: int = 0) -> list[str]:
    return [said(chat, MESSAGES[index % len(MESSAGES)]) for index in range(start, start + turns)]


# Going on.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("turns", [0, 1, 3, 40])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)])
def test_a_session_goes_on_as_if_nothing_had_happened(file: Path, policy: str, turns: int, sampling: Sampling):
    budget = 4000 if policy == "full" else 200
    whole = Chat.open(FakeEngine(), policy=policy, budget=budget, system=SYSTEM, sampling=sampling)
    first = opened(file, policy=policy, budget=budget, sampling=sampling)
    assert talked(first, turns) == talked(whole, turns)
    first.close()
    again = restored(file)
    assert again.messages == whole.messages
    assert again.turns == whole.turns
    for name in ("seen", "held", "pinned", "turns", "evicted_turns", "evicted_tokens"):
        assert getattr(again.stats(), name) == getattr(whole.stats(), name), name
    assert again._talk.held_ids().tolist() == whole._talk.held_ids().tolist()
    assert talked(again, 8, turns) == talked(whole, 8, turns)
    assert again.messages == whole.messages
    assert again.stats().trouble is None


def test_turns_after_the_snapshot_are_fed_as_they_were(file: Path):
    """A kill after the snapshot: the journal goes further than the cache that was saved."""
    whole = Chat.open(FakeEngine(), budget=200, system=SYSTEM, sampling=GREEDY)
    chat = opened(file)
    talked(chat, 20)
    chat.save()
    talked(chat, 7, 20)
    killed = copied(file)
    talked(whole, 27)
    (snapshot,) = killed.parent.glob(f"{killed.stem}-sessions/*.safetensors")
    saved = snapshot.read_bytes()
    restored(killed).close()
    assert snapshot.read_bytes() != saved, "one that is closed without a word need not feed them once more"
    again = restored(killed)
    assert again.stats().notice is None
    assert talked(again, 5, 27) == talked(whole, 5, 27)
    assert again.turns == whole.turns


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("turns", [1, 2, 5, 40])
def test_without_its_snapshot_the_cache_is_made_again(file: Path, policy: str, turns: int):
    first = opened(file, policy=policy, budget=4000 if policy == "full" else 200)
    talked(first, turns)
    held, seen, gone = first._talk.held_ids().tolist(), first.stats().seen, first.stats().evicted_tokens
    first.close()
    for snapshot in snapshots(file):
        snapshot.unlink()
    again = restored(file)
    assert "made again from the journal" in (again.stats().notice or "")
    assert again._talk.held_ids().tolist() == held == stream_of(again).tokens
    assert again.stats().seen == seen
    assert again.stats().evicted_tokens == gone
    for _ in range(20):
        said(again)
        assert stream_of(again).tokens == again._talk.held_ids().tolist()
        if policy != "full":
            check_whole_turns(again)
    again.close()
    assert said(restored(file)) is not None


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 1000])
def test_a_snapshot_that_is_none_is_said_and_dropped(file: Path, content: bytes):
    first = opened(file)
    talked(first, 12)
    held = first._talk.held_ids().tolist()
    first.close()
    (snapshot,) = snapshots(file)
    snapshot.write_bytes(content)
    again = restored(file)
    assert "made again from the journal" in (again.stats().notice or "")
    assert again._talk.held_ids().tolist() == held


def test_a_snapshot_of_another_conversation_is_not_taken(file: Path, tmp_path: Path):
    for path in (file, tmp_path / "other.db"):
        chat = opened(path)
        talked(chat, 5 if path == file else 6)
        chat.close()
    mine, other = (next((tmp_path / f"{name}-sessions").glob("*.safetensors")) for name in ("talk", "other"))
    shutil.copyfile(other, mine)
    again = restored(file)
    assert "of another conversation" in (again.stats().notice or "")
    assert len(again.messages) == 11


def test_a_journal_from_an_older_copy_does_not_take_a_snapshot_of_a_later_time(file: Path):
    """The same session and number of turns, but other turns."""
    chat = opened(file)
    talked(chat, 3)
    chat.close()
    older = copied(file, "older")
    for path, text in ((file, "one thing"), (older, "another thing")):
        chat = restored(path)
        said(chat, text)
        chat.close()
    (late,) = snapshots(file)
    (mine,) = snapshots(older)
    shutil.copyfile(late, mine)
    assert "of another conversation" in (restored(older).stats().notice or "")


# The journal.


def test_a_message_is_on_the_disk_before_its_answer_is_over(file: Path):
    chat = opened(file)
    pieces = chat.send("hi")
    next(pieces)
    assert rows(file, "SELECT role, text FROM turns") == [("user", "hi")]
    answer = "".join(pieces)
    assert len(answer) > 0
    kept = rows(file, "SELECT role, text, length(ids), start, stop FROM turns ORDER BY number")
    assert [row[0] for row in kept] == ["user", "assistant"]
    assert kept[1][1] == chat.messages[-1]["content"]
    assert all(length == 4 * (stop - start) for _, _, length, start, stop in kept)


def copied(file: Path, name: str = "killed") -> Path:
    """The files as a kill would leave them at this moment, in a folder of their own."""
    folder = file.parent / name
    folder.mkdir()
    for each in file.parent.glob(f"{file.name}*"):
        shutil.copyfile(each, folder / each.name)
    if (sessions := file.parent / f"{file.stem}-sessions").exists():
        shutil.copytree(sessions, folder / sessions.name)
    return folder / file.name


def test_a_question_that_got_no_answer_stays_and_is_said(file: Path):
    chat = opened(file)
    talked(chat, 3)
    pieces = chat.send("what did I say?")
    next(pieces)
    again = restored(copied(file))
    assert "the last message got no answer before the program ended: 'what did I say?'" in (again.stats().notice or "")
    assert again.messages[-2:] == [
        {"role": "user", "content": "what did I say?"},
        {"role": "assistant", "content": ""},
    ]
    assert not again.turns[-1].finished
    said(again)
    assert stream_of(again).tokens == again._talk.held_ids().tolist()


def test_starting_over_keeps_what_was_said_before(file: Path):
    chat = opened(file)
    talked(chat, 3)
    chat.reset()
    said(chat, "again")
    chat.set_system("You are long.")
    said(chat, "other")
    messages = chat.messages
    chat.close()
    assert restored(file).messages == messages
    assert restored_rows(file) == [(1, 6), (2, 2), (3, 2)]


def restored_rows(file: Path) -> list[Any]:
    return rows(file, "SELECT chapter, count(*) FROM turns GROUP BY chapter ORDER BY chapter")


def test_a_clock_that_goes_backwards_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch):
    times = iter(f"20{99 - index}-01-01T00:00:00.000+00:00" for index in range(90))
    monkeypatch.setattr(journal, "now", lambda: next(times))
    chat = opened(file)
    talked(chat, 4)
    messages = chat.messages
    chat.close()
    assert restored(file).messages == messages


# Settings.


def test_what_is_left_out_is_as_the_session_had_it(file: Path):
    first = opened(file, budget=300, sampling=Sampling(temperature=0.3, seed=1), max_tokens=9, stop=["xyz"])
    said(first)
    first.close()
    again = Chat.open(FakeEngine(), session=file, max_tokens=7)
    assert again.policy == first.policy
    assert again.sampling == first.sampling
    assert (again.max_tokens, again.stop, again.system) == (7, ("xyz",), SYSTEM)
    again.close()
    assert restored(file).max_tokens == 7


@pytest.mark.parametrize("budget", [120, 1000])
@pytest.mark.parametrize("policy", ["streaming-llm", "sliding-window"])
def test_another_budget_or_policy_makes_the_cache_again(file: Path, budget: int, policy: str):
    first = opened(file)
    talked(first, 30)
    first.close()
    again = Chat.open(FakeEngine(), session=file, budget=budget, policy=policy)
    assert again.stats().budget == budget
    assert again.stats().held <= budget
    assert len(again.turns) == 60
    assert stream_of(again).tokens == again._talk.held_ids().tolist()
    for _ in range(10):
        said(again)
        check_whole_turns(again)
    again.close()
    last = restored(file)
    assert last.stats().notice is None
    assert last.stats().budget == budget


def test_a_conversation_too_long_for_a_policy_that_never_frees_is_refused(file: Path):
    first = opened(file)
    talked(first, 30)
    first.close()
    with pytest.raises(ContextFull, match="never frees; raise the budget"):
        Chat.open(FakeEngine(), session=file, policy="full", budget=200)
    assert len(restored(file).turns) == 60


def test_another_model_or_system_prompt_is_refused(file: Path):
    opened(file).close()
    with pytest.raises(UsageError, match="begun with 'fake' as its model, and 'other' was given"):
        Chat.open("other", engine="fake", session=file)
    with pytest.raises(UsageError, match="another system prompt"):
        Chat.open(FakeEngine(), session=file, system="Be someone else.")
    restored(file)


def test_another_tokenizer_reads_again_what_was_said(file: Path):
    class Shouting(FakeEngine):
        def render(self, messages: Any, *, open_answer: bool) -> str:
            return "!" + super().render(messages, open_answer=open_answer)

    first = opened(file)
    talked(first, 20)
    messages = first.messages
    first.close()
    again = Chat.restore(file, Shouting())
    assert "read again" in (again.stats().notice or "")
    assert again.messages == messages
    whole = again.engine.render(again.messages, open_answer=False)
    ids = again.engine.encode(whole, special=True)
    assert again._talk.ledger.ids.tolist() == ids[again._talk.ledger.base :]
    said(again)
    assert stream_of(again).tokens == again._talk.held_ids().tolist()


def test_what_was_said_can_be_read_after_the_end(file: Path):
    first = opened(file)
    talked(first, 30)
    first.close()
    again = restored(file)
    assert again._talk.ledger.past_turns > 0
    said(again)
    messages = again.messages
    again.close()
    again.close()
    assert again.messages == messages
    assert len(again.turns) == 62


def test_two_chats_in_one_session_are_refused(file: Path):
    first = opened(file)
    with pytest.raises(SessionBusy):
        opened(file)
    first.close()
    opened(file).close()


def test_a_session_that_is_not_there_is_not_restored(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UsageError, match="is not there"):
        restored(file)
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(UnknownName, match="unknown session 'nobody'"):
        Chat.restore("nobody", FakeEngine())
    with pytest.raises(UsageError, match="no session to save"):
        Chat.open(FakeEngine()).save()


def test_a_chat_that_cannot_begin_leaves_the_session_to_others(file: Path):
    with pytest.raises(UsageError, match="budget"):
        opened(file, budget=3)
    opened(file).close()


# A disk that will not.


def test_a_journal_that_cannot_be_written_is_said_and_written_later(file: Path):
    chat = opened(file)
    said(chat)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("CREATE TRIGGER full BEFORE INSERT ON turns BEGIN SELECT raise(FAIL, 'disk is full'); END")
    said(chat, "is anybody there?")
    assert "2 entries of the journal not on the disk" in (chat.stats().trouble or "")
    assert "disk is full" in (chat.stats().trouble or "")
    with pytest.raises(StoreError, match="disk is full"):
        chat.save()
    other.execute("DROP TRIGGER full")
    said(chat, "and now?")
    assert chat.stats().trouble is None
    messages = chat.messages
    chat.close()
    assert restored(file).messages == messages


def test_closing_with_messages_that_could_not_be_written_says_so(file: Path):
    chat = opened(file)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("CREATE TRIGGER full BEFORE INSERT ON turns BEGIN SELECT raise(FAIL, 'disk is full'); END")
    said(chat)
    with pytest.raises(StoreError, match="closed with 2 entries of the journal not on the disk"):
        chat.close()
    assert [message["content"] for message in chat.messages][1] == "hi"
    other.execute("DROP TRIGGER full")
    opened(file).close()
