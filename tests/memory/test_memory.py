"""Passages and documents kept and found again, against the slow twin."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import InputFileError, UsageError
from headwater.memory import Memory
from headwater.memory.documents import pieces
from headwater.memory.embedder import StaticEmbedder, unit
from headwater.memory.held import Held
from headwater.memory.memory import BATCH
from headwater.memory.ranking import SHORTLIST, by_vectors
from headwater.memory.words import words_of
from tests.memory.made import WORDS, Hashed, keys, said, talk
from tests.reference import recall as twin


@pytest.mark.parametrize("embedder", [Hashed(), None], ids=["both", "words alone"])
@pytest.mark.parametrize("count", [2, 9, 40, 300])
def test_it_finds_what_the_slow_twin_finds(embedder: Hashed | None, count: int):
    memory, passages = Memory(embedder=embedder), [*talk(count), *talk(20, 1, "other")]
    for start in range(0, len(passages), 7):  # the context reaches back over what was kept earlier
        memory.remember(passages[start : start + 7])
    chance = random.Random(count)
    for _ in range(20):
        text = " ".join(chance.choices([*WORDS, "the", "unknown"], k=chance.randrange(1, 6)))
        found = keys(memory, text)
        assert found == twin.recall(passages, embedder, text, "c"), text
        assert not any(key.startswith("other") for key in found)


def test_the_twin_ranks_by_hand():
    passages = [said(1, "the boat sank"), said(2, "it was red"), said(3, "we ate"), said(4, "nothing at all")]
    assert twin.recall(passages, None, "boat", "c") == ["c:1", "c:2", "c:3", "c:4"]
    assert twin.recall(passages, None, "red boat?", "c")[:2] == ["c:2", "c:3"], "both words, of one and of two before"
    assert twin.recall([*passages, said(9, "far off")], None, "boat", "c")[-1] == "c:4", "numbers count, not rows"
    assert twin.recall(passages, None, "zebra", "c") == []


def test_the_nearest_of_many_are_those_of_a_full_comparison():
    """The short list by signs loses next to none of the ten best."""
    chance = np.random.default_rng(0)
    centres = unit(chance.standard_normal((50, 256)).astype(np.float32))
    full = unit(np.repeat(centres, 200, axis=0) + 0.05 * chance.standard_normal((10_000, 256)).astype(np.float32))
    held = Held(256)
    for start in range(0, len(full), 999):
        rows = np.arange(start, min(start + 999, len(full)))
        held.add(rows, rows % 2, rows, rows, full[rows])
    assert len(full) > SHORTLIST
    found = 0
    for query in full[::500]:
        nearest, cosines = by_vectors(held, query, 10, np.array([0, 1]))
        exact = np.argsort(-(full @ query), kind="stable")[:10]
        found += len(set(nearest.tolist()) & set(exact.tolist()))
        assert (np.diff(cosines) <= 0).all()
        odd, _ = by_vectors(held, query, 10, np.array([1]))
        assert (odd % 2 == 1).all()
    assert found >= 0.97 * 200


def test_the_small_model_knows_what_is_alike():
    embedder = StaticEmbedder()
    dog, puppy, train = embedder.embed(["my dog barks", "a puppy was barking", "the train to Oslo is late"])
    assert dog @ puppy > 0.5 > dog @ train
    np.testing.assert_allclose(np.linalg.norm([dog, puppy, train], axis=1), 1, rtol=1e-5)
    assert not embedder.embed([""]).any()
    memory = Memory()
    memory.remember([said(1, "My dog is called Rex."), said(2, "I work in a bank."), said(3, "Rain is forecast.")])
    assert keys(memory, "What is the name of my puppy?")[0] == "c:1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        '"',
        'AND OR NOT NEAR("',
        "text:boat*",
        "a" * 100_000,
        "\0",
        "\ud800 boat",
        "🙂",
        "-- ; DROP TABLE",
        "^",
    ],
)
def test_nothing_a_user_writes_is_a_query(text: str):
    memory = Memory(embedder=Hashed())
    memory.remember([said(1, "a boat"), said(2, text or "x")])
    found = keys(memory, text)
    assert set(found) <= {"c:1", "c:2"}
    assert "c:1" in keys(memory, "boat")


def test_words_without_a_meaning_are_left_out_unless_there_are_no_others():
    assert words_of("What is the Name of the boat, the BOAT?") == ["name", "boat"]
    assert words_of("who are you") == ["who", "are", "you"]


def test_what_is_known_stays_and_what_is_skipped_is_not_brought(tmp_path: Path):
    memory = Memory(tmp_path / "m.db", embedder=Hashed())
    memory.remember([said(1, "boat one"), said(2, "boat two")])
    memory.remember([said(1, "boat changed"), said(3, "boat three")])
    assert [each.passage.text for each in memory.recall("one", conversation="c", limit=1)] == ["boat one"]
    assert "c:2" not in keys(memory, "boat", skip={"c:2"})
    assert [len(keys(memory, "boat", limit=limit)) for limit in (0, 1, 2, 3)] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="limit is -1"):
        memory.recall("boat", conversation="c", limit=-1)
    memory.close()
    again = Memory(tmp_path / "m.db", embedder=Hashed())
    assert set(keys(again, "boat")) == {"c:1", "c:2", "c:3"}
    assert again.recall("one", conversation="c")[0].passage == said(1, "boat one")
    assert again.forget_conversation("c") == 3
    assert keys(again, "boat") == []


def test_two_memories_of_one_file_see_each_other(tmp_path: Path):
    first, second = (Memory(tmp_path / "m.db", embedder=Hashed()) for _ in range(2))
    first.remember([said(1, "boat")])
    assert keys(second, "boat") == ["c:1"]
    second.remember([said(2, "boat again")])
    assert set(keys(first, "boat")) == {"c:1", "c:2"}


def test_another_embedder_makes_the_vectors_again(tmp_path: Path):
    class Other(Hashed):
        name, dim = "other", 16

    passages = talk(BATCH + 40)
    Memory(tmp_path / "m.db", embedder=None).remember(passages)
    for embedder in (Hashed(), Other(), Hashed()):
        memory = Memory(tmp_path / "m.db", embedder=embedder)
        assert keys(memory, "violin garden") == twin.recall(passages, embedder, "violin garden", "c")
        assert memory.notices == [
            f"passages with no vectors, or those of another embedder: {len(passages)}; made again from the texts"
        ]
        memory.close()
    memory = Memory(tmp_path / "m.db", embedder=Hashed())
    assert memory.notices == []


# Documents.


def test_a_document_is_found_from_every_conversation_and_forgotten(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("The boat is red.\n\n" + "Rain and snow fell for days on end. " * 60 + "\n\nThe violin is in Oslo.")
    memory = Memory(tmp_path / "m.db", embedder=Hashed())
    count = memory.add_document(file)
    assert count == memory.add_document(file) > 2
    assert memory.documents() == [("notes.txt", count)]
    found = memory.recall("where is the violin", conversation="any")[0].passage
    assert (found.source, found.number) == ("notes.txt", count)
    assert "violin is in Oslo" in found.text
    assert memory.forget("notes.txt") == count
    assert memory.forget("notes.txt") == memory.forget("") == 0
    assert memory.recall("violin", conversation="any") == []


def test_a_document_that_is_added_again_and_again_is_found_whole(tmp_path: Path):
    """What was dropped took the places of what is there, as its vectors were still compared."""
    file = tmp_path / "notes.txt"
    memory, other = (Memory(tmp_path / "m.db", embedder=Hashed()) for _ in range(2))
    for version in range(3):
        file.write_text("\n\n".join(f"boat {n} " + "x" * 880 for n in range(40)) + f"\n\nversion {version}")
        count = memory.add_document(file)
        for each in (memory, other):
            assert len(keys(each, "unheard", limit=60)) == count, version


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "is not a UTF-8 text"),
        (b"a\0b", "has a NUL at character 2"),
        (b" \n ", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "is not a UTF-8 text"),
    ],
)
def test_a_document_that_is_no_text_is_refused_by_name(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "a.bin"
    file.write_bytes(content)
    with pytest.raises(InputFileError, match=words):
        Memory(embedder=None).add_document(file)


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = Memory(embedder=None)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputFileError, match="cannot be read"):
            memory.add_document(path)
    monkeypatch.setattr("headwater.memory.documents.LARGEST_BYTES", 10)
    (tmp_path / "a.txt").write_text("a" * 10)
    assert memory.add_document(tmp_path / "a.txt") == 1
    (tmp_path / "a.txt").write_text("a" * 11)
    with pytest.raises(InputFileError, match="has 11 bytes; at most 10"):
        memory.add_document(tmp_path / "a.txt")
    assert memory.documents() == [("a.txt", 1)]


@pytest.mark.parametrize("text", ["a" * 5000, "word " * 900, "One. Two! " * 300, "p\n\nq\n\n" * 400, "日" * 2000, "x"])
def test_pieces_lose_nothing_and_are_never_too_long(text: str):
    parts = pieces(text)
    assert max(map(len, parts)) <= 900
    assert "".join("".join(part.split()) for part in parts) == "".join(text.split())
    assert len(parts) <= 2 * len(text) / 900 + 2
