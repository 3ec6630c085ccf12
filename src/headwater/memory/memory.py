"""Passages in the user's database, found by their words and by their meaning.

Knows how two rankings become one, and what of a passage is looked at. Does not know chats, nor how a text becomes a
vector.

A passage is found by its own words and, for less, by those of what was said just before it: an answer rarely repeats
what it is about. The two rankings are fused by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009): a passage
at place `r` of a ranking gets `weight / (RANK + r)`. The numbers below were chosen on one half of the questions of
`bench/memory.py` and are reported on the other.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from headwater.database import FILE, open_database, transaction
from headwater.errors import MemoryFault, StoreError
from headwater.memory.base import Passage, Recalled
from headwater.memory.documents import pieces, read_document
from headwater.memory.embedder import Embedder, StaticEmbedder, unit
from headwater.memory.vectors import Vectors
from headwater.memory.words import clean, quoted, words_of

BEFORE = 3
"""How many passages before one are its context."""
CONTEXT_CHARACTERS = 4000
CONTEXT_WEIGHT = 0.5
"""What a word in the context is worth, against one in the passage itself."""
FADING = 0.7
"""How much less every passage further back adds to a vector."""
WORDS_WEIGHT, MEANING_WEIGHT, RANK = 4.0, 1.0, 10
CANDIDATES = 50
COMMON = 0.02
"""A word in more than this share of all passages is looked for only when there is no other."""
FEW = 2000
"""Below so many passages no word is common."""
BATCH = 512

_COLUMNS = "key, conversation, number, text, said, source"


class Memory:
    """What was said and what stands in documents, in an SQLite file.

    `path` is the database (by default a private one that is gone with this object; a session's is that of its store).
    `embedder` is an Embedder, `"auto"` for the small model of the extra `memory`, or None to search by words alone.
    Vectors of another embedder are made again when the memory is opened. Raises MissingExtra without the extra,
    MemoryFault when the file cannot be used.
    """

    def __init__(self, path: Path | str | None = None, *, embedder: Embedder | Literal["auto"] | None = "auto") -> None:
        self._embedder: Embedder | None = StaticEmbedder() if isinstance(embedder, str) else embedder
        self._clean_up: weakref.finalize[Any, Any] | None = None
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="headwater-")) / FILE
            self._clean_up = weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)
        self.path = Path(path).absolute()
        self._vectors: Vectors | None = None
        self._loaded = 0
        self._groups: dict[str, int] = {}
        with self._telling():
            self._rows = open_database(self.path)
            self._embed_again()

    # Keeping.

    def remember(self, passages: Sequence[Passage]) -> None:
        """Keep the passages; those whose key is known stay as they are. All are kept, or none."""
        with self._telling(), transaction(self._rows):
            for start in range(0, len(passages), BATCH):
                self._keep(passages[start : start + BATCH])

    def _keep(self, passages: Sequence[Passage]) -> None:
        """A batch: each with what came before it, from the batch itself or from what is stored."""
        texts = [clean(passage.text) for passage in passages]
        befores: list[list[str]] = []
        for place, passage in enumerate(passages):
            near = [
                texts[other]
                for other in range(max(0, place - BEFORE), place)
                if (passages[other].conversation, passages[other].source) == (passage.conversation, passage.source)
            ]
            befores.append([*self._stored_before(passage, BEFORE - len(near)), *near])
        vectors = self._embed(texts, befores)
        name = "" if self._embedder is None else self._embedder.name
        for place, passage in enumerate(passages):
            self._rows.execute(
                "INSERT INTO passages (key, conversation, source, number, text, context, said, embedder, vector) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
                (
                    *(clean(passage.key), clean(passage.conversation), clean(passage.source), passage.number),
                    *(texts[place], "\n".join(befores[place])[-CONTEXT_CHARACTERS:], passage.when, name),
                    None if vectors is None else vectors[place].astype("<f2").tobytes(),
                ),
            )

    def _stored_before(self, passage: Passage, count: int) -> list[str]:
        """The texts of up to `count` passages just before one, oldest first."""
        rows = self._rows.execute(
            "SELECT text FROM passages WHERE conversation = ? AND source = ? AND number < ? "
            "ORDER BY number DESC LIMIT ?",
            (passage.conversation, passage.source, passage.number, count),
        ).fetchall()
        return [text for (text,) in reversed(rows)]

    def _embed(self, texts: Sequence[str], befores: Sequence[Sequence[str]]) -> Float32[np.ndarray, "texts dim"] | None:
        """Vectors of the texts, with a fading share of what came before each."""
        if self._embedder is None:
            return None
        everything = list(dict.fromkeys([*texts, *(text for before in befores for text in before)]))
        made = dict(zip(everything, self._embedder.embed(everything), strict=True))
        out = np.stack([made[text] for text in texts])
        for row, before in enumerate(befores):
            for back, text in enumerate(reversed(before)):
                out[row] += CONTEXT_WEIGHT * FADING**back * made[text]
        return unit(out)

    def _embed_again(self) -> None:
        """Make vectors for what was kept with another embedder, or with none."""
        if self._embedder is None:
            return
        while True:
            rows = self._rows.execute(
                f"SELECT id, {_COLUMNS} FROM passages WHERE embedder <> ? ORDER BY id LIMIT ?",
                (self._embedder.name, BATCH),
            ).fetchall()
            if not rows:
                return
            befores = [self._stored_before(_passage(row[1:]), BEFORE) for row in rows]
            vectors = self._embed([row[4] for row in rows], befores)
            with transaction(self._rows):
                for row, vector in zip(rows, vectors if vectors is not None else (), strict=True):
                    self._rows.execute(
                        "UPDATE passages SET embedder = ?, vector = ? WHERE id = ?",
                        (self._embedder.name, vector.astype("<f2").tobytes(), row[0]),
                    )

    # Finding.

    def recall(self, text: str, *, conversation: str, limit: int = 5, skip: Collection[str] = ()) -> list[Recalled]:
        """What has to do with the text, best first: of the conversation, and of all documents. `skip` holds keys that
        are not wanted. Raises MemoryFault when the file cannot be read or is damaged."""
        text = clean(text)
        with self._telling():
            scores: dict[int, float] = defaultdict(float)
            count = CANDIDATES + len(skip)
            for place, found in enumerate(self._by_words(text, conversation, count)):
                scores[found] += WORDS_WEIGHT / (RANK + place)
            for place, found in enumerate(self._by_meaning(text, conversation, count)):
                scores[found] += MEANING_WEIGHT / (RANK + place)
            out: list[Recalled] = []
            for found in sorted(scores, key=lambda each: (-scores[each], each)):
                row = self._rows.execute(f"SELECT {_COLUMNS} FROM passages WHERE id = ?", (found,)).fetchone()
                if row is not None and row[0] not in skip:
                    out.append(Recalled(passage=_passage(row), score=scores[found]))
                if len(out) == limit:
                    break
            return out

    def _by_words(self, text: str, conversation: str, count: int) -> list[int]:
        """Ids by BM25 of the words, best first."""
        words = words_of(text)
        if not words:
            return []
        query = " OR ".join(map(quoted, self._telling_words(words)))
        rows = self._rows.execute(
            "SELECT passages.id FROM passage_words JOIN passages ON passages.id = passage_words.rowid "
            "WHERE passage_words MATCH ? AND (conversation = ? OR source <> '') "
            "ORDER BY bm25(passage_words, 1.0, ?), passages.id LIMIT ?",
            (query, conversation, CONTEXT_WEIGHT, count),
        )
        return [found for (found,) in rows]

    def _telling_words(self, words: list[str]) -> list[str]:
        """Without the words that a large part of all passages has, unless there are no others: they tell little, and
        every passage that has one would have to be looked at."""
        (last,) = self._rows.execute("SELECT coalesce(max(id), 0) FROM passages").fetchone()
        most = max(FEW, int(COMMON * last))
        if last <= most:
            return words
        counts = {
            word: self._rows.execute(
                "SELECT count(*) FROM (SELECT 1 FROM passage_words WHERE passage_words MATCH ? LIMIT ?)",
                (quoted(word), most),
            ).fetchone()[0]
            for word in words
        }
        rare = [word for word in words if counts[word] < most]
        return rare or words[:1]

    def _by_meaning(self, text: str, conversation: str, count: int) -> list[int]:
        """Ids by the cosine of the vectors, nearest first."""
        if self._embedder is None:
            return []
        vectors = self._load_vectors(self._embedder)
        groups = [self._groups[name] for name in ("", conversation) if name in self._groups]
        nearest, _ = vectors.nearest(self._embedder.embed([text])[0], count, np.array(groups, dtype=np.int64))
        return nearest.tolist()

    def _load_vectors(self, embedder: Embedder) -> Vectors:
        """All vectors, those that came since the last time among them. A document's are in the group of no name."""
        if self._vectors is None:
            self._vectors, self._loaded = Vectors(embedder.dim), 0
        while rows := self._rows.execute(
            "SELECT id, CASE source WHEN '' THEN conversation ELSE '' END, vector FROM passages "
            "WHERE id > ? AND embedder = ? ORDER BY id LIMIT 20000",
            (self._loaded, embedder.name),
        ).fetchall():
            for found, _, vector in rows:
                if vector is None or len(vector) != 2 * embedder.dim:
                    raise MemoryFault(
                        f"{self.path}: the vector of passage {found} is damaged; forget it, or move the file away"
                    )
            full = np.frombuffer(b"".join(row[2] for row in rows), dtype="<f2").reshape(len(rows), embedder.dim)
            groups = [self._groups.setdefault(row[1], len(self._groups)) for row in rows]
            self._vectors.add(np.array([row[0] for row in rows]), np.array(groups), full)
            self._loaded = rows[-1][0]
        return self._vectors

    # Documents.

    def add_document(self, path: Path | str, *, name: str | None = None) -> int:
        """Index a text file under its name, in the place of an earlier one of that name; returns its pieces.

        Raises InputFileError for a file that is no text.
        """
        path = Path(path)
        called = path.name if name is None else name
        parts = pieces(read_document(path))
        with self._telling(), transaction(self._rows):
            self._delete(called)
            passages = [
                Passage(key=f"document:{called}:{number}", conversation="", number=number, text=part, source=called)
                for number, part in enumerate(parts, start=1)
            ]
            for start in range(0, len(passages), BATCH):
                self._keep(passages[start : start + BATCH])
        return len(parts)

    def documents(self) -> list[tuple[str, int]]:
        """The names of all documents with their pieces."""
        with self._telling():
            return self._rows.execute(
                "SELECT source, count(*) FROM passages WHERE source <> '' GROUP BY source ORDER BY source"
            ).fetchall()

    def forget(self, name: str) -> int:
        """Drop a document; returns its pieces, 0 where there is none of that name."""
        with self._telling(), transaction(self._rows):
            return self._delete(name)

    def forget_conversation(self, conversation: str) -> int:
        """Drop all that was said in a conversation; returns its passages."""
        with self._telling(), transaction(self._rows):
            gone = self._rows.execute(
                "DELETE FROM passages WHERE conversation = ? AND source = ''", (conversation,)
            ).rowcount
        return gone

    def _delete(self, name: str) -> int:
        return self._rows.execute("DELETE FROM passages WHERE source = ? AND source <> ''", (name,)).rowcount

    def close(self) -> None:
        """Give the file back; a private one is deleted."""
        self._rows.close()
        if self._clean_up is not None:
            self._clean_up()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell what SQLite or the system says as a MemoryFault."""
        try:
            yield
        except (StoreError, sqlite3.Error, OSError) as error:
            raise MemoryFault(f"memory in {self.path} cannot be used: {error}") from error


def _passage(row: Sequence[Any]) -> Passage:
    key, conversation, number, text, said, source = row
    return Passage(key=key, conversation=conversation, number=number, text=text, when=said, source=source)
