"""The slow twin of memory's search: every passage looked at, one after another.

    1. every passage gets its context, the passages before it in the same conversation
    2. SQLite ranks all of them by BM25 of the words, in a table made for this one question
    3. the query's vector is compared with every passage's, as it is stored (in half precision), in float64
    4. the first `CANDIDATES` (or `limit`, if that is more) of both rankings are fused by reciprocal rank

Checked against by `tests/memory/test_memory.py`; verified by the hand-made rankings there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np

from headwater.memory import memory
from headwater.memory.base import Passage
from headwater.memory.embedder import Embedder
from headwater.memory.words import quoted, words_of


def recall(
    passages: Sequence[Passage], embedder: Embedder | None, text: str, conversation: str, limit: int = 100
) -> list[str]:
    """Keys, best first."""
    count = max(memory.CANDIDATES, limit)
    befores = []
    for place, passage in enumerate(passages):
        same = [
            other.text
            for other in passages[:place]
            if (other.conversation, other.source) == (passage.conversation, passage.source)
        ]
        befores.append(same[-memory.BEFORE :])
    asked = [place for place, each in enumerate(passages) if each.conversation == conversation or each.source]

    table = sqlite3.connect(":memory:")
    table.execute("CREATE VIRTUAL TABLE t USING fts5(text, context, tokenize = 'porter unicode61')")
    for place, passage in enumerate(passages):
        context = "\n".join(befores[place])[-memory.CONTEXT_CHARACTERS :]
        table.execute("INSERT INTO t (rowid, text, context) VALUES (?, ?, ?)", (place, passage.text, context))
    words = " OR ".join(map(quoted, words_of(text)))
    ranked = table.execute(
        "SELECT rowid FROM t WHERE t MATCH ? ORDER BY bm25(t, 1.0, ?), rowid", (words, memory.CONTEXT_WEIGHT)
    )
    by_words = [place for (place,) in ranked if place in asked][:count] if words else []
    table.close()

    by_meaning: list[int] = []
    if embedder is not None and (query := embedder.embed([text])[0].astype(np.float64)).any():
        cosines = {}
        for place in asked:
            vector = embedder.embed([passages[place].text])[0].astype(np.float64)
            for back, before in enumerate(reversed(befores[place])):
                vector += memory.CONTEXT_WEIGHT * memory.FADING**back * embedder.embed([before])[0]
            length = np.linalg.norm(vector)
            stored = (vector / length if length else vector).astype(np.float16)
            cosines[place] = float(stored.astype(np.float64) @ query)
        by_meaning = sorted(asked, key=lambda place: (-cosines[place], place))[:count]

    scores: dict[int, float] = {}
    for weight, ranking in ((memory.WORDS_WEIGHT, by_words), (memory.MEANING_WEIGHT, by_meaning)):
        for rank, place in enumerate(ranking):
            scores[place] = scores.get(place, 0.0) + weight / (memory.RANK + rank)
    return [passages[place].key for place in sorted(scores, key=lambda place: (-scores[place], place))][:limit]
