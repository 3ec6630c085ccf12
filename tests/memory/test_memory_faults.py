"""What can go wrong with a memory: damage, other processes and threads, embedders that break their word, odd names."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.database import MIGRATIONS, open_database
from headwater.errors import MemoryFault, MissingExtra, UsageError
from headwater.memory import Memory, Passage
from headwater.memory import memory as memory_module
from headwater.memory.embedder import StaticEmbedder
from tests.memory.made import Hashed, keys, said, talk
from tests.reference import recall as twin

SURROGATE = "\ud800"
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
"""Lone surrogates and NULs among the rest."""
static = cache(StaticEmbedder)


@pytest.mark.parametrize("blob", [b"", b"\0", b"\xff" * 64, b"\x01\x3c" * 32, None], ids=repr)
def test_a_damaged_vector_is_made_again_and_said(tmp_path: Path, blob: bytes | None):
    """Cut off, empty, not numbers, of another length than 1."""
    passages = talk(30)
    memory = Memory(tmp_path / "m.db", embedder=Hashed())
    memory.remember(passages)
    found, stored = keys(memory, "boat oslo"), vectors(tmp_path / "m.db")
    memory.close()
    change(tmp_path / "m.db", "UPDATE passages SET vector = ? WHERE id IN (7, 9)", blob)
    memory = Memory(tmp_path / "m.db", embedder=Hashed())
    assert keys(memory, "boat oslo") == found
    assert memory.notices == ["passages with damaged vectors: 2; made again from the texts"]
    assert vectors(tmp_path / "m.db") == stored
    memory.close()


def vectors(path: Path) -> list[tuple[str, bytes]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT embedder, vector FROM passages ORDER BY id").fetchall()
    finally:
        connection.close()


def change(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def test_a_damaged_file_is_said(tmp_path: Path):
    (tmp_path / "m.db").write_bytes(b"nonsense" * 1000)
    with pytest.raises(MemoryFault, match="cannot be used"):
        Memory(tmp_path / "m.db", embedder=None)
    memory = Memory(tmp_path / "n.db", embedder=None)
    memory.remember([said(1, "boat")])
    change(tmp_path / "n.db", "DROP TABLE passage_words")
    with pytest.raises(MemoryFault, match=r"n\.db cannot be used"):
        memory.recall("boat", conversation="c")
    memory.close()
    with pytest.raises(MemoryFault, match="closed"):
        memory.recall("boat", conversation="c")
    memory.close()


@pytest.mark.parametrize("broken", ["shape", "numbers"])
def test_an_embedder_that_breaks_its_word_is_refused_and_nothing_is_kept(broken: str):
    class Broken(Hashed):
        name = "broken"

        def embed(self, texts):
            made = super().embed(texts)
            return made[:, :-1] if broken == "shape" else np.where(made > 0, np.nan, made)

    memory = Memory(embedder=Broken())
    with pytest.raises(MemoryFault, match="embedder broken gave an array"):
        memory.remember([said(1, "boat")])
    assert memory._rows.execute("SELECT count(*) FROM passages").fetchone() == (0,)


def test_without_the_extra_it_says_so_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"wordllama is not installed.*headwater\[memory\]"):
        Memory(tmp_path / "m.db")
    assert not (tmp_path / "m.db").exists()


def test_an_embedder_that_nobody_knows_is_refused():
    """Any word was taken for "auto"."""
    with pytest.raises(UsageError, match="unknown embedder 'minilm'; known: auto; also accepted: an Embedder"):
        Memory(embedder="minilm")  # pyright: ignore[reportArgumentType]


def test_names_that_no_file_can_hold_are_names_all_the_same(tmp_path: Path):
    """A lone surrogate, as in a file name that is not UTF-8, ended in an error of the codec."""
    odd = SURROGATE + "\0"
    memory = Memory(embedder=Hashed())
    memory.remember(
        [Passage(key=odd, conversation=odd, number=1, text=f"boat {odd}", when=odd), said(2, "boat", conversation="c")]
    )
    assert len(memory.recall("boat", conversation=odd)) == 1
    assert memory.recall("boat", conversation=odd, skip=[odd]) == []
    (tmp_path / "a.txt").write_text("a river")
    assert memory.add_document(tmp_path / "a.txt", name=odd) == 1
    assert memory.forget(odd) == 1
    assert memory.forget_conversation(odd) == 1
    with pytest.raises(UsageError, match="needs a name"):
        memory.add_document(tmp_path / "a.txt", name="")


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=4), question=ANY_TEXT)
def test_any_text_is_kept_and_asked_for(texts: list[str], question: str):
    memory = Memory(embedder=static())
    try:
        memory.remember([said(number, text) for number, text in enumerate(texts, start=1)])
        known = {f"c:{number}" for number in range(1, len(texts) + 1)}
        assert set(keys(memory, question)) <= known
        for number, text in enumerate(texts, start=1):
            if any("a" <= each <= "z" for each in text):
                assert f"c:{number}" in keys(memory, text)
    finally:
        memory.close()


def test_all_of_a_call_is_kept_or_nothing():
    memory = Memory(embedder=Hashed())
    wrong = Passage(key="w", conversation="c", number="x", text="boat")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MemoryFault):
        memory.remember([said(1, "boat"), wrong])
    assert keys(memory, "boat") == []
    memory.remember([said(1, "boat")])
    assert keys(memory, "boat") == ["c:1"]


def test_what_one_thread_takes_back_is_not_anothers(monkeypatch: pytest.MonkeyPatch):
    """A connection has one transaction: what a second thread wrote inside the first one's went with it."""
    memory = Memory(embedder=None)
    insert, began, failed = memory._insert, threading.Event(), []

    def fails(rows):
        insert(rows)
        began.set()
        time.sleep(0.3)
        raise MemoryFault("on purpose")

    def first() -> None:
        try:
            memory.remember([said(1, "boat one")])
        except MemoryFault as error:
            failed.append(error)

    monkeypatch.setattr(memory, "_insert", fails)
    thread = threading.Thread(target=first)
    thread.start()
    assert began.wait(10)
    monkeypatch.setattr(memory, "_insert", insert)
    memory.remember([said(2, "boat two")])
    thread.join()
    assert len(failed) == 1
    assert keys(memory, "boat") == ["c:2"]


def test_common_words_are_left_out_of_many_passages(monkeypatch: pytest.MonkeyPatch):
    """However long the question, a bounded number of occurrences is looked at: the rarest words are taken."""
    monkeypatch.setattr(memory_module, "MOST_OCCURRENCES", 60)
    memory = Memory(embedder=None)
    texts = [f"common {'often' if n % 5 == 0 else ''} {'now' if n % 12 == 0 else ''}" for n in range(240)]
    memory.remember([said(n + 1, text) for n, text in enumerate(texts)] + [said(241, "needle", "other")])
    assert memory._rarest(["common", "needl"]) == ["needl"]
    assert memory._rarest(["common", "unheard"]) == ["common"], "the rarest is looked for, however often it is there"
    assert memory._rarest(["now", "often", "needl"]) == ["now", "needl"]
    monkeypatch.setattr(memory_module, "MOST_OCCURRENCES", 69)
    assert memory._rarest(["now", "often", "needl"]) == ["now", "often", "needl"]
    assert memory._rarest(["unheard"]) == []


def test_a_kill_while_indexing_leaves_all_of_a_batch_or_nothing(tmp_path: Path):
    path = tmp_path / "m.db"
    Memory(path, embedder=None).close()
    program = (
        "import sys; from pathlib import Path; from headwater.memory import Memory, Passage\n"
        f"memory = Memory(Path({str(path)!r}), embedder=None); print('go', flush=True)\n"
        "for n in range(100000):\n"
        "    memory.remember([Passage(key=f'{n}:{i}', conversation='c', number=10*n+i, text=f'boat {n}') "
        "for i in range(10)])\n"
    )
    for run in range(4):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.05 + 0.03 * run)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    memory = Memory(path, embedder=Hashed())
    (count,) = memory._rows.execute("SELECT count(*) FROM passages").fetchone()
    assert count > 0
    assert count % 10 == 0
    assert memory._rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    memory._rows.execute("INSERT INTO passage_words (passage_words) VALUES ('integrity-check')")
    assert len(keys(memory, "boat 0", limit=3)) == 3


def test_a_memory_of_the_older_schema_finds_what_it_found(tmp_path: Path):
    """Its index had the words of earlier passages in a column of their own."""
    path, passages = tmp_path / "m.db", talk(30)
    old = open_database(path, migrations=MIGRATIONS[:2])
    for each in passages:
        old.execute(
            "INSERT INTO passages (key, conversation, source, number, text, context, said, embedder) "
            "VALUES (?, 'c', '', ?, ?, 'boat', 'then', '')",
            (each.key, each.number, each.text),
        )
    old.close()
    memory = Memory(path, embedder=Hashed())
    assert keys(memory, "violin rain") == twin.recall(passages, Hashed(), "violin rain", "c")
    memory._rows.execute("INSERT INTO passage_words (passage_words) VALUES ('integrity-check')")
    memory.close()
