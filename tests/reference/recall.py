"""The slow twin of memory's search: every passage looked at, one after another.

    1. every passage is cut into stems by a table of SQLite's full-text search, one after another
    2. BM25 of the words, where a word of one of the passages numbered up to `REACH` before counts, too, fading
    3. every passage's vector, with its share of the passages before it, is compared with the query's, as it is stored
       (in half precision), in float64
    4. the first `CANDIDATES` (or `limit`, if that is more) of both rankings are fused by reciprocal rank

Checked against by `tests/memory/test_memory.py`; verified by the hand-made rankings there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache

import numpy as np

from headwater.memory import memory
from headwater.memory.base import Passage
from headwater.memory.embedder import Embedder
from headwater.memory.ranking import FADING, K1, REACH, B
from headwater.memory.words import words_of


def recall(
    passages: Sequence[Passage], embedder: Embedder | None, text: str, conversation: str, limit: int = 100
) -> list[str]:
    """Keys, best first."""
    count = max(memory.CANDIDATES, limit)
    asked = [place for place, each in enumerate(passages) if each.conversation == conversation or each.source]
    by_words = best_by_words(passages, asked, text)[:count]
    by_meaning: list[int] = []
    if embedder is not None and (query := embedder.embed([text])[0].astype(np.float64)).any():
        cosines = {place: float(stored_vector(passages, place, embedder) @ query) for place in asked}
        by_meaning = sorted(asked, key=lambda place: (-cosines[place], place))[:count]
    scores: dict[int, float] = {}
    for weight, found in ((memory.WORDS_WEIGHT, by_words), (memory.MEANING_WEIGHT, by_meaning)):
        for rank, place in enumerate(found):
            scores[place] = scores.get(place, 0.0) + weight / (memory.RANK + rank)
    return [passages[place].key for place in sorted(scores, key=lambda place: (-scores[place], place))][:limit]


def best_by_words(passages: Sequence[Passage], asked: Sequence[int], text: str) -> list[int]:
    """Places, best first."""
    terms = list(dict.fromkeys(stem for word in words_of(text) for stem in stems(word)))
    texts = {place: stems(passages[place].text) for place in asked}
    mean = sum(len(passages[place].text) for place in asked) / len(asked) if asked else 0
    scores = dict.fromkeys(asked, 0.0)
    for term in terms:
        having = [place for place in asked if term in texts[place]]
        rarity = np.log(1 + (len(asked) - len(having) + 0.5) / (len(having) + 0.5))
        own = {}
        for place in having:
            times, length = texts[place].count(term), len(passages[place].text)
            own[place] = rarity * times * (K1 + 1) / (times + K1 * (1 - B + B * length / mean))
        for place in asked:
            given = [own[place]] if place in own else []
            for other in having:
                apart = passages[place].number - passages[other].number
                same = place_of(passages[place]) == place_of(passages[other])
                if same and 1 <= apart <= REACH:
                    given.append(own[other] * FADING**apart)
            scores[place] += max(given, default=0.0)
    return sorted((place for place in asked if scores[place]), key=lambda place: (-scores[place], place))


def stored_vector(passages: Sequence[Passage], place: int, embedder: Embedder) -> np.ndarray:
    same = [other.text for other in passages[:place] if place_of(other) == place_of(passages[place])]
    vector = embedder.embed([passages[place].text])[0].astype(np.float64)
    for back, before in enumerate(reversed(same[-memory.BEFORE :])):
        vector += memory.CONTEXT_WEIGHT * memory.FADING**back * embedder.embed([before])[0]
    length = np.linalg.norm(vector)
    return (vector / length if length else vector).astype(np.float16).astype(np.float64)


def place_of(passage: Passage) -> tuple[str, str]:
    return passage.conversation, passage.source


@cache
def stems(text: str) -> list[str]:
    table = sqlite3.connect(":memory:")
    table.execute("CREATE VIRTUAL TABLE t USING fts5(text, tokenize = 'porter unicode61')")
    table.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, instance)")
    table.execute("INSERT INTO t (text) VALUES (?)", (text,))
    found = [term for (term,) in table.execute("SELECT term FROM v ORDER BY offset")]
    table.close()
    return found
