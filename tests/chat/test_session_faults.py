"""Sessions through what really happens to them: kills, a full disk, a read-only folder, a million turns."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.chat.session import Chat
from headwater.chat.store import Store
from headwater.database import open_database
from headwater.engines.fake import FakeEngine, FakeStream
from headwater.errors import StoreError, UnsupportedCall
from tests.chat.talk import said, stream_of
from tests.chat.test_sessions import opened, restored, talked

ROOT = Path(__file__).parents[2]


def test_two_hundred_kills_lose_nothing_that_was_shown(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.chat.killed", str(tmp_path / "talk.db"), "200", "7"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = dict(line.split(" ") for line in done.stdout.splitlines())
    assert lines["survived"] == "200"
    assert int(lines["exact"]) > 40, "too few kills after which the next answer could be compared"


def test_kills_during_a_migration_leave_the_old_or_the_new(tmp_path: Path):
    path = tmp_path / "x.db"
    old, new = "CREATE TABLE a (n INTEGER) STRICT;", "CREATE TABLE b AS SELECT n, n * 2 AS m FROM a;"
    connection = open_database(path, migrations=(old,))
    connection.execute(
        "INSERT INTO a WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 300000) SELECT n FROM c"
    )
    connection.close()
    program = (
        "from pathlib import Path; from headwater.database import open_database; print('go', flush=True)\n"
        f"open_database(Path({str(path)!r}), migrations=({old!r}, {new!r}))"
    )
    for run in range(12):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.004 * run)
        child.kill()
        child.communicate()
        connection = open_database(path, migrations=(old, new)) if run == 11 else None
        if connection is not None:
            assert connection.execute("SELECT count(*), sum(m) FROM b").fetchone() == (300000, 300000 * 300001)
            connection.close()
    copy = open_database(tmp_path / "x.db.schema-1", migrations=(old,))
    assert copy.execute("SELECT count(*) FROM a").fetchone() == (300000,)
    copy.close()


def test_a_chat_goes_on_while_the_disk_is_full_and_catches_up(small_disk: Path):
    file = small_disk / "talk.db"
    chat = opened(file)
    talked(chat, 2)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as full:
        try:
            while full.write(bytes(4096)):
                pass
        except OSError:
            pass
    for _ in range(30):  # what SQLite had reserved is used up first
        said(chat, "tell me more " * 40)
        if chat.stats().trouble:
            break
    assert "make room on the disk" in (chat.stats().trouble or "")
    with pytest.raises(StoreError, match="journal not on the disk"):
        chat.save()
    said(chat)
    old = chat.messages
    keeper = chat._keeper
    assert keeper is not None
    conversation = keeper.conversation
    chat.reset()
    assert keeper.conversation != conversation, "what is remembered of the new one is its own"
    said(chat, "a new beginning")
    ballast.unlink()
    said(chat, "and now?")
    assert chat.stats().trouble is None
    messages = chat.messages
    chat.close()
    again = restored(file)
    assert again.messages == messages
    assert again._keeper is not None
    journal = again._keeper.journal
    assert [entry.turn.text for entry in journal.entries(1)] == [each["content"] for each in old[1:]]
    again.close()


def test_a_snapshot_that_has_no_room_is_said_and_costs_nothing_else(small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    chat = opened(small_disk / "talk.db")
    talked(chat, 3)
    from headwater.engines import snapshot

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_write_all", full)
        with pytest.raises(StoreError, match=r"no snapshot of the cache: .*No space left on device"):
            chat.save()
    said(chat)
    chat.save()
    assert chat.stats().trouble is None
    chat.close()


def test_a_read_only_folder_is_said(small_disk: Path):
    file = small_disk / "talk.db"
    chat = opened(file)
    talked(chat, 2)
    chat.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        with pytest.raises(StoreError, match=r"read-only|Read-only"):
            opened(file)
        with pytest.raises(StoreError, match=r"read-only|Read-only"):
            Store(file).list()
        with pytest.raises(StoreError, match=r"read-only|Read-only"):
            opened(small_disk / "other.db")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    restored(file).close()


def test_a_million_turns_open_in_under_a_second(tmp_path: Path):
    file, turns, budget = tmp_path / "talk.db", 1_000_000, 200
    chat = opened(file, budget=budget)
    head = chat.stats().seen
    chat.close()
    connection = open_database(file)
    connection.execute(
        "INSERT INTO turns WITH RECURSIVE c (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c LIMIT ?) "
        "SELECT 1, 1, n, CASE n % 2 WHEN 0 THEN 'user' ELSE 'assistant' END, 'a', ? + n * 2, ? + n * 2 + 2, "
        "x'6100000062000000', 1, 0, 0, max(0, ? + n * 2 + 2 - ?), '', '{}' FROM c",
        (turns, head, head, head, budget),
    )
    connection.close()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        again = restored(file)
        times.append(time.perf_counter() - began)
        assert again.stats().turns == turns
        assert again.stats().seen == head + 2 * turns
        assert stream_of(again).tokens == again._talk.held_ids().tolist()
        again.close()
        for snapshot in file.parent.glob("*/*.safetensors"):
            snapshot.unlink()  # the next one is made from the journal
    assert min(times) < 1, times
    last = Chat.restore(file, FakeEngine())
    said(last)
    assert last.stats().turns == turns + 2
    last.close()


def test_a_model_whose_state_cannot_be_saved_keeps_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The chat broke off after the sixteenth message, and when it was closed."""

    def refuse(_: FakeStream) -> None:
        raise UnsupportedCall("layer 3 is a LinearAttentionLayer, whose state cannot be saved")

    monkeypatch.setattr(FakeStream, "snapshot", refuse)
    chat = opened(tmp_path / "talk.db")
    whole = talked(chat, 12)
    assert "no snapshot of the cache: layer 3 is a LinearAttentionLayer" in (chat.stats().trouble or "")
    messages = chat.messages
    chat.close()
    assert len(whole) == 12 and restored(tmp_path / "talk.db").messages == messages
