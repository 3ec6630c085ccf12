"""Which passages have most to do with a question: by their words, and by their vectors.

Knows arrays. Does not know texts, nor where anything is kept.

By words: BM25 (Robertson and Zaragoza, 2009), with one change. An answer rarely repeats what it is about, so a word of
a passage counts in the few passages after it, too, fading with each; where a passage has the word itself and stands
near others that have it, the most that one of them gives is what counts.

By vectors, in two passes: the signs first (an eighth of a byte a dimension, so 200,000 vectors are six megabytes), then
the best few hundred in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

from headwater.memory.held import Held, signs

K1, B = 1.2, 0.75
REACH = 4
"""In how many passages after it a word still counts."""
FADING = 0.8
"""How much less in each further one."""
SHORTLIST = 512
"""How many vectors are compared in full, at least."""


def by_words(
    held: Held, occurrences: Sequence[NDArray[np.int64]], count: int, groups: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Ids of the `count` passages of these groups that the words of a question fit best, best first; of equals the one
    with the lower id. `occurrences` holds, for each word, the id of a passage for every time that it occurs there."""
    rows, places = held.in_order()
    ids, asked = held["ids"], held.of(groups)
    many = int(asked.sum())
    if not many:
        return np.empty(0, dtype=np.int64)
    lengths = K1 * (1 - B + B * held["lengths"] / max(held["lengths"][asked].mean(), 1.0))
    standing = np.empty_like(rows)
    standing[rows] = np.arange(len(rows))
    scores = np.zeros(len(rows))
    for each in occurrences:
        found, times = np.unique(each, return_counts=True)
        at = np.minimum(np.searchsorted(ids, found), len(ids) - 1)
        there = (ids[at] == found) & asked[at]
        at, times = at[there], times[there]
        rarity = np.log(1 + (many - len(at) + 0.5) / (len(at) + 0.5))
        own = rarity * times * (K1 + 1) / (times + lengths[at])
        scores += _spread(standing[at], own, places)
    scores[~asked[rows]] = 0
    above = np.flatnonzero(scores)
    if len(above) > count:
        above = above[scores[above] >= np.partition(scores[above], -count)[-count]]
    best = above[np.lexsort((ids[rows[above]], -scores[above]))][:count]
    return ids[rows[best]]


def _spread(at: NDArray[np.int64], own: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """What a word gives every passage: its own share, or a faded one of a passage before it."""
    out = np.zeros(len(places))
    out[at] = own
    for ahead in range(1, REACH + 1):
        inside = at + ahead < len(places)
        later, given = at[inside] + ahead, own[inside]
        apart = places[later] - places[at[inside]]
        near = apart <= REACH
        later, given = later[near], given[near] * FADING ** apart[near]
        out[later] = np.maximum(out[later], given)
    return out


def by_vectors(
    held: Held, query: Float32[np.ndarray, " dim"], count: int, groups: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids of the `count` passages of these groups whose vectors are nearest to the query, nearest first, and their
    cosines; of equals the one with the lower id."""
    there = np.flatnonzero(held.of(groups))
    if not len(there) or not query.any():
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    short = max(SHORTLIST, 4 * count)
    if len(there) > short:
        known = held["signs"] if len(there) == len(held) else held["signs"][there]
        far = np.bitwise_count(known ^ signs(query[None])[0]).sum(axis=1, dtype=np.int16)
        there = np.sort(there[np.argpartition(far, short)[:short]])
    cosines = held["full"][there].astype(np.float32) @ query
    best = np.argsort(-cosines, kind="stable")[:count]
    return held["ids"][there[best]], cosines[best]
