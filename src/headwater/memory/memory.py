"""Passages in the user's database, found by their words and by their meaning.

Knows how two rankings become one, and what of a passage is looked at. Does not know chats, nor how a text becomes a
vector.

The two rankings are fused by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009): a passage at place `r` of a
ranking gets `weight / (RANK + r)`. The numbers below were chosen on one half of the questions of `bench/memory.py` and
are reported on the other.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float16
from numpy.typing import NDArray

from headwater.database import FILE, open_database, transaction
from headwater.errors import MemoryFault, StoreError, UnknownName, UsageError
from headwater.memory.base import Passage, Recalled
from headwater.memory.documents import pieces, read_document
from headwater.memory.embedder import Embedder, StaticEmbedder, unit
from headwater.memory.held import Held
from headwater.memory.ranking import by_vectors, by_words
from headwater.memory.words import Stems, clean, words_of

BEFORE = 3
"""How many passages before one are in its vector."""
CONTEXT_WEIGHT = 0.5
"""What they weigh there, against the passage itself."""
FADING = 0.7
"""How much less every one further back."""
WORDS_WEIGHT, MEANING_WEIGHT, RANK = 4.0, 1.0, 10
CANDIDATES = 50
MOST_OCCURRENCES = 60_000
"""How often the words that are looked for may occur in all passages together, but for the rarest of them."""
BATCH = 512

UNFIT = "no vectors, or those of another embedder"

_COLUMNS = "key, conversation, number, text, said, source"


class Memory:
    """What was said and what stands in documents, in an SQLite file.

    `path` is the database (by default a private one that is gone with this object; a session's is that of its store).
    `embedder` is an Embedder, `"auto"` for the small model of the extra `memory`, or None to search by words alone.
    Vectors of another embedder are made again when the memory is opened, damaged ones when they are found; `notices`
    says so. Threads may share one. Raises MissingExtra without the extra, MemoryFault when the file cannot be used.
    """

    def __init__(self, path: Path | str | None = None, *, embedder: Embedder | Literal["auto"] | None = "auto") -> None:
        if isinstance(embedder, str) and embedder != "auto":
            raise UnknownName("embedder", embedder, ["auto"], also="an Embedder, or None for words alone")
        self._embedder: Embedder | None = StaticEmbedder() if isinstance(embedder, str) else embedder
        self._clean_up: weakref.finalize[Any, Any] | None = None
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="headwater-")) / FILE
            self._clean_up = weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)
        self.path = Path(path).absolute()
        self.notices: list[str] = []
        self._stems = Stems()
        self._held: Held | None = None
        self._loaded = 0
        self._groups: dict[tuple[str, str], int] = {}
        self._lock = threading.RLock()
        with self._telling():
            self._rows = open_database(self.path)
        try:
            with self._telling():
                self._embed_again(UNFIT)
        except BaseException:
            self.close()
            raise

    # Keeping.

    def remember(self, passages: Sequence[Passage]) -> None:
        """Keep the passages; those whose key is known stay as they are. All are kept, or none."""
        with self._telling():
            rows = self._prepared(passages)
            with transaction(self._rows):
                self._insert(rows)

    def _prepared(self, passages: Sequence[Passage]) -> list[tuple[Any, ...]]:
        """Rows to insert: each passage with what came before it, in this list or in what is stored."""
        lately: dict[tuple[str, str], deque[str]] = {}
        name = "" if self._embedder is None else self._embedder.name
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(passages), BATCH):
            batch = [_cleaned(passage) for passage in passages[start : start + BATCH]]
            befores: list[list[str]] = []
            for each in batch:
                group = each.conversation, each.source
                if group not in lately:
                    lately[group] = deque(self._stored_before(each, BEFORE), maxlen=BEFORE)
                befores.append(list(lately[group]))
                lately[group].append(each.text)
            blobs = self._embed([each.text for each in batch], befores)
            for each, blob in zip(batch, blobs, strict=True):
                rows.append((each.key, each.conversation, each.source, each.number, each.text, each.when, name, blob))
        return rows

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._rows.executemany(
            "INSERT INTO passages (key, conversation, source, number, text, said, embedder, vector) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
            rows,
        )

    def _stored_before(self, passage: Passage, count: int) -> list[str]:
        """The texts of up to `count` passages just before one, oldest first."""
        rows = self._rows.execute(
            "SELECT text FROM passages WHERE conversation = ? AND source = ? AND number < ? "
            "ORDER BY number DESC LIMIT ?",
            (passage.conversation, passage.source, passage.number, count),
        ).fetchall()
        return [text for (text,) in reversed(rows)]

    def _embed(self, texts: Sequence[str], befores: Sequence[Sequence[str]]) -> list[bytes | None]:
        """Vectors of the texts as they are stored, with a fading share of what came before each."""
        if self._embedder is None:
            return [None] * len(texts)
        everything = list(dict.fromkeys([*texts, *(text for before in befores for text in before)]))
        given = self._embedder.embed(everything)
        if given.shape != (len(everything), self._embedder.dim) or not np.isfinite(given).all():
            raise MemoryFault(
                f"embedder {self._embedder.name} gave an array of {given.shape} for {len(everything)} texts, or some "
                f"not finite; {self._embedder.dim} finite numbers for each are needed"
            )
        made = dict(zip(everything, given, strict=True))
        out = np.stack([made[text] for text in texts]).astype(np.float32)
        for row, before in enumerate(befores):
            for back, text in enumerate(reversed(before)):
                out[row] += CONTEXT_WEIGHT * FADING**back * made[text]
        return [vector.tobytes() for vector in unit(out).astype("<f2")]

    def _embed_again(self, had: str) -> None:
        """Make vectors for what has none of this embedder's."""
        if self._embedder is None:
            return
        (count,) = self._rows.execute(
            "SELECT count(*) FROM passages WHERE embedder <> ?", (self._embedder.name,)
        ).fetchone()
        if count:
            self.notices.append(f"passages with {had}: {count:,}; made again from the texts")
        while True:
            rows = self._rows.execute(
                f"SELECT id, {_COLUMNS} FROM passages WHERE embedder <> ? ORDER BY id LIMIT ?",
                (self._embedder.name, BATCH),
            ).fetchall()
            if not rows:
                return
            befores = [self._stored_before(_passage(row[1:]), BEFORE) for row in rows]
            blobs = self._embed([row[4] for row in rows], befores)
            with transaction(self._rows):
                self._rows.executemany(
                    "UPDATE passages SET embedder = ?, vector = ? WHERE id = ?",
                    [(self._embedder.name, blob, row[0]) for row, blob in zip(rows, blobs, strict=True)],
                )

    # Finding.

    def recall(self, text: str, *, conversation: str, limit: int = 5, skip: Collection[str] = ()) -> list[Recalled]:
        """What has to do with the text, best first: of the conversation, and of all documents. `skip` holds keys that
        are not wanted. Raises MemoryFault when the file cannot be read or is damaged."""
        if limit < 0:
            raise UsageError(f"limit is {limit}; it is how many passages to bring, 0 or more")
        text, conversation, skip = clean(text), clean(conversation), {clean(key) for key in skip}
        count = max(CANDIDATES, limit) + len(skip)
        out: list[Recalled] = []
        with self._telling():
            scores: dict[int, float] = defaultdict(float)
            for place, found in enumerate(self._by_words(text, conversation, count)):
                scores[found] += WORDS_WEIGHT / (RANK + place)
            for place, found in enumerate(self._by_meaning(text, conversation, count)):
                scores[found] += MEANING_WEIGHT / (RANK + place)
            for found in sorted(scores, key=lambda each: (-scores[each], each)):
                if len(out) == limit:
                    break
                row = self._rows.execute(f"SELECT {_COLUMNS} FROM passages WHERE id = ?", (found,)).fetchone()
                if row is not None and row[0] not in skip:
                    out.append(Recalled(passage=_passage(row), score=scores[found]))
        return out

    def _by_words(self, text: str, conversation: str, count: int) -> list[int]:
        """Ids by BM25 of the words, best first."""
        held = self._load()
        found = [self._occurrences(term) for term in self._rarest(self._stems.of(words_of(text)))]
        return by_words(held, found, count, self._asked(conversation)).tolist()

    def _rarest(self, terms: Sequence[str]) -> list[str]:
        """The rarest terms, as many as can be looked for in little time: one that a large part of all passages has
        tells little."""
        often: dict[str, int] = {}
        for term in terms:
            row = self._rows.execute("SELECT cnt FROM passage_terms WHERE term = ?", (term,)).fetchone()
            if row is not None:
                often[term] = row[0]
        total, rare = 0, set[str]()
        for term in sorted(often, key=lambda term: often[term]):
            total += often[term]
            if not rare or total <= MOST_OCCURRENCES:
                rare.add(term)
        return [term for term in terms if term in rare]

    def _occurrences(self, term: str) -> NDArray[np.int64]:
        """The passage of every occurrence of a term. As one text: a row each would take ten times as long."""
        query = "SELECT group_concat(doc) FROM passage_occurrences WHERE term = ?"
        (told,) = self._rows.execute(query, (term,)).fetchone()
        return np.fromstring(told or "", dtype=np.int64, sep=",")

    def _by_meaning(self, text: str, conversation: str, count: int) -> list[int]:
        """Ids by the cosine of the vectors, nearest first."""
        if self._embedder is None:
            return []
        held = self._load()
        nearest, _ = by_vectors(held, self._embedder.embed([text])[0], count, self._asked(conversation))
        return nearest.tolist()

    def _asked(self, conversation: str) -> NDArray[np.int64]:
        """The groups that a question in this conversation is about: itself, and all documents."""
        return np.array([group for (name, source), group in self._groups.items() if source or name == conversation])

    def _load(self) -> Held:
        """All passages, those that came since the last time among them, and none that went."""
        dim, name = (0, "") if self._embedder is None else (self._embedder.dim, self._embedder.name)
        if self._held is None:
            self._held, self._loaded = Held(dim), 0
        held = self._held
        while rows := self._rows.execute(
            "SELECT id, conversation, source, number, length(text), embedder, vector FROM passages "
            "WHERE id > ? ORDER BY id LIMIT 20000",
            (self._loaded,),
        ).fetchall():
            ids, conversations, sources, numbers, lengths, embedders, blobs = zip(*rows, strict=True)
            if dim and set(embedders) != {name}:
                self._embed_again(UNFIT)
                continue
            full = _vectors_of(blobs, dim)
            if not (sound := _sound(full)).all():
                self._make_again([found for found, ok in zip(ids, sound, strict=True) if not ok])
                continue
            places = zip(conversations, sources, strict=True)
            groups = [self._groups.setdefault(place, len(self._groups)) for place in places]
            held.add(np.array(ids), np.array(groups), np.array(numbers), np.array(lengths), full)
            self._loaded = ids[-1]
        (there,) = self._rows.execute("SELECT count(*) FROM passages").fetchone()
        if there != len(held):
            held.keep(np.array([found for (found,) in self._rows.execute("SELECT id FROM passages")], dtype=np.int64))
        return held

    def _make_again(self, damaged: Sequence[int]) -> None:
        """Vectors that cannot be what was stored; the texts are there."""
        with transaction(self._rows):
            for found in damaged:
                self._rows.execute("UPDATE passages SET embedder = '' WHERE id = ?", (found,))
        self._embed_again("damaged vectors")

    # Documents.

    def add_document(self, path: Path | str, *, name: str | None = None) -> int:
        """Index a text file under its name, in the place of an earlier one of that name; returns its pieces.

        Raises InputFileError for a file that is no text.
        """
        path = Path(path)
        called = clean(path.name if name is None else name)
        if not called:
            raise UsageError("a document needs a name")
        parts = pieces(read_document(path))
        with self._telling():
            rows = self._prepared(
                [
                    Passage(key=f"document:{called}:{number}", conversation="", number=number, text=part, source=called)
                    for number, part in enumerate(parts, start=1)
                ]
            )
            with transaction(self._rows):
                self._delete(called)
                self._insert(rows)
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
            return self._delete(clean(name))

    def forget_conversation(self, conversation: str) -> int:
        """Drop all that was said in a conversation; returns its passages."""
        with self._telling(), transaction(self._rows):
            gone = self._rows.execute(
                "DELETE FROM passages WHERE conversation = ? AND source = ''", (clean(conversation),)
            ).rowcount
        return gone

    def _delete(self, name: str) -> int:
        return self._rows.execute("DELETE FROM passages WHERE source = ? AND source <> ''", (name,)).rowcount

    def close(self) -> None:
        """Give the file back; a private one is deleted."""
        with self._lock:
            self._rows.close()
            self._stems.close()
        if self._clean_up is not None:
            self._clean_up()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """One thread at a time; what SQLite or the system says is told as a MemoryFault."""
        try:
            with self._lock:
                yield
        except (StoreError, sqlite3.Error, OSError) as error:
            raise MemoryFault(f"memory in {self.path} cannot be used: {error}") from error


def _cleaned(passage: Passage) -> Passage:
    return Passage(
        key=clean(passage.key),
        conversation=clean(passage.conversation),
        number=passage.number,
        text=clean(passage.text),
        when=clean(passage.when),
        source=clean(passage.source),
    )


def _vectors_of(blobs: Sequence[bytes | None], dim: int) -> Float16[np.ndarray, "rows dim"]:
    """Stored vectors; not numbers for one that has another size."""
    if not dim:
        return np.empty((len(blobs), 0), dtype="<f2")
    damaged = np.full(dim, np.nan, dtype="<f2").tobytes()
    whole = b"".join(blob if blob is not None and len(blob) == 2 * dim else damaged for blob in blobs)
    return np.frombuffer(whole, dtype="<f2").reshape(len(blobs), dim)


def _sound(full: Float16[np.ndarray, "rows dim"]) -> Bool[np.ndarray, " rows"]:
    """Which of these have length 1, or are zeros, as all that are stored."""
    wide = full.astype(np.float32)
    squares = np.einsum("rd,rd->r", wide, wide)
    return (np.abs(squares - 1) < 0.01) | ~wide.any(axis=1)


def _passage(row: Sequence[Any]) -> Passage:
    key, conversation, number, text, said, source = row
    return Passage(key=key, conversation=conversation, number=number, text=text, when=said, source=source)
