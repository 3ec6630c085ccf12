"""The nearest of many vectors, in two passes: by their signs, then in full.

Knows arrays. Does not know texts, nor where vectors are kept. The first pass counts the bits in which the signs differ
(an eighth of a byte a dimension, so 200,000 vectors are six megabytes); the best few hundred are then compared in full.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, Int64
from numpy.typing import NDArray

SHORTLIST = 512
"""How many vectors are compared in full, at least."""


class Vectors:
    """Vectors by the id of their passage, each with the group that it belongs to; grows at its end."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._count = 0
        self._ids = np.empty(0, dtype=np.int64)
        self._groups = np.empty(0, dtype=np.int64)
        self._signs = np.empty((0, -(-dim // 64)), dtype=np.uint64)
        self._full = np.empty((0, dim), dtype=np.float16)

    def __len__(self) -> int:
        return self._count

    def add(
        self, ids: Int64[np.ndarray, " rows"], groups: Int64[np.ndarray, " rows"], full: Float[np.ndarray, "rows dim"]
    ) -> None:
        """Put more vectors behind those that are there."""
        stop = self._count + len(ids)
        if stop > len(self._ids):
            room = max(stop, 2 * len(self._ids), 1024)
            for name in ("_ids", "_groups", "_signs", "_full"):
                old = getattr(self, name)
                new = np.empty((room, *old.shape[1:]), dtype=old.dtype)
                new[: self._count] = old[: self._count]
                setattr(self, name, new)
        rows = slice(self._count, stop)
        self._ids[rows], self._groups[rows], self._full[rows] = ids, groups, full
        self._signs[rows] = _signs(full)
        self._count = stop

    def keep(self, ids: Int64[np.ndarray, " rows"]) -> None:
        """Drop all vectors but those of these passages."""
        rows = np.flatnonzero(np.isin(self._ids[: self._count], ids))
        for name in ("_ids", "_groups", "_signs", "_full"):
            setattr(self, name, getattr(self, name)[rows])
        self._count = len(rows)

    def nearest(
        self, query: Float32[np.ndarray, " dim"], count: int, groups: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids of the `count` vectors of these groups that are nearest to the query, nearest first, and their cosines;
        of equals the one that was added first."""
        there = np.flatnonzero(np.isin(self._groups[: self._count], groups))
        if not len(there) or not query.any():
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        short = max(SHORTLIST, 4 * count)
        if len(there) > short:
            signs = self._signs[: self._count] if len(there) == self._count else self._signs[there]
            far = np.bitwise_count(signs ^ _signs(query[None])[0]).sum(axis=1, dtype=np.int16)
            there = np.sort(there[np.argpartition(far, short)[:short]])
        cosines = self._full[there].astype(np.float32) @ query
        best = np.argsort(-cosines, kind="stable")[:count]
        return self._ids[there[best]], cosines[best]


def _signs(vectors: Float[np.ndarray, "rows dim"]) -> NDArray[np.uint64]:
    bits = np.packbits(vectors > 0, axis=1)
    padded = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : bits.shape[1]] = bits
    return padded.view(np.uint64)
