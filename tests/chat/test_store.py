"""Sessions by name: made, listed, deleted, and one process at a time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.chat.store import Store, check_name
from headwater.errors import SessionBusy, UnknownName, UsageError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "talks.db")


@pytest.mark.parametrize("name", ["anna", "work notes", "v1.2-b", "日本", "x"])
def test_names_that_people_use_are_taken(name: str):
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a/b",
        "a\\b",
        "..",
        ".hidden",
        "a.",
        "a ",
        "x" * 65,
        "a\0b",
        "a\nb",
        "C:",
        "\ud800",
        "/etc/passwd",
        "~x",
    ],
)
def test_names_that_are_paths_or_no_names_are_refused(name: str):
    with pytest.raises(UsageError, match="cannot be the name of a session"):
        check_name(name)


@pytest.mark.parametrize("name", ["con", "NUL", "com1", "lpt9.txt"])
def test_reserved_names_are_refused(name: str):
    with pytest.raises(UsageError, match="reserve"):
        check_name(name)


def test_a_session_is_there_again(store: Store):
    first = store.open("anna")
    first.journal.keep_settings({"model": "m"})
    first.close()
    second = store.open("anna", create=False)
    assert second.uid == first.uid
    assert second.journal.settings == {"model": "m"}
    assert stat.S_IMODE((store.folder / f"{second.uid}.lock").stat().st_mode) == 0o600
    second.close()
    assert [(each.name, each.model, each.open_in) for each in store.list()] == [("anna", "m", None)]


def test_one_that_is_not_there_is_named_with_those_that_are(store: Store):
    store.open("anna").close()
    with pytest.raises(UnknownName, match="unknown session 'bob'; known: anna"):
        store.open("bob", create=False)


def test_the_second_to_open_it_is_told_who_has_it(store: Store):
    first = store.open("anna")
    with pytest.raises(SessionBusy, match=f"open in process {os.getpid()}"):
        store.open("anna")
    assert store.list()[0].open_in == str(os.getpid())
    first.close()
    store.open("anna").close()


def test_what_a_killed_process_held_is_taken_over(store: Store):
    program = (
        "import sys, time; from headwater.chat.store import Store\n"
        f"held = Store({str(store.path)!r}).open('anna'); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(SessionBusy, match=f"process {holder.pid}"):
        store.open("anna")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    began = time.monotonic()
    store.open("anna").close()
    assert time.monotonic() - began < 5


def test_what_a_killed_process_had_half_written_is_swept(store: Store):
    opened = store.open("anna")
    opened.close()
    mine, other = (store.folder / f".{uid}.safetensors.ab.half" for uid in (opened.uid, "0" * 32))
    for half in (mine, other):
        half.write_bytes(b"x")
    store.open("anna").close()
    assert not mine.exists()
    assert other.exists(), "it may be being written now"


def test_a_deleted_session_leaves_no_file(store: Store):
    opened = store.open("anna")
    opened.journal.begin(system=None, wording=None, head=None)
    opened.snapshot.write_bytes(b"x")
    opened.close()
    store.delete("anna")
    assert store.list() == []
    assert not [path for path in store.folder.iterdir() if opened.uid in path.name]
    with pytest.raises(UnknownName):
        store.delete("anna")


def test_nothing_is_made_by_looking(tmp_path: Path):
    assert Store(tmp_path / "no.db").list() == []
    assert not list(tmp_path.iterdir())
