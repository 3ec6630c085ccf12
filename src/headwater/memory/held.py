"""Where every passage stands, in arrays: what both rankings go by.

Knows ids, places and vectors. Does not know texts, nor where they are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray

FAR = 1 << 40
"""More than any number of a passage: what lies between the places of two groups."""


class Held:
    """Passages by their row: `ids` ascending, each with the group that it belongs to, its number in it, its length in
    characters and its vector of `dim` numbers; grows at its end."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._count = 0
        self._room: dict[str, NDArray[Any]] = {
            "ids": np.empty(0, dtype=np.int64),
            "groups": np.empty(0, dtype=np.int64),
            "numbers": np.empty(0, dtype=np.int64),
            "lengths": np.empty(0, dtype=np.float64),
            "signs": np.empty((0, -(-dim // 64)), dtype=np.uint64),
            "full": np.empty((0, dim), dtype=np.float16),
        }
        self._order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._room[name][: self._count]

    def add(
        self,
        ids: Int64[np.ndarray, " rows"],
        groups: Int64[np.ndarray, " rows"],
        numbers: Int64[np.ndarray, " rows"],
        lengths: Int64[np.ndarray, " rows"],
        full: Float[np.ndarray, "rows dim"],
    ) -> None:
        """Put more passages behind those that are there."""
        stop = self._count + len(ids)
        if stop > len(self._room["ids"]):
            room = max(stop, 2 * self._count, 1024)
            for name, old in self._room.items():
                new = np.empty((room, *old.shape[1:]), dtype=old.dtype)
                new[: self._count] = old[: self._count]
                self._room[name] = new
        rows = slice(self._count, stop)
        given = {"ids": ids, "groups": groups, "numbers": numbers, "lengths": lengths, "full": full}
        for name, values in {**given, "signs": signs(full)}.items():
            self._room[name][rows] = values
        self._count, self._order = stop, None

    def keep(self, ids: Int64[np.ndarray, " rows"]) -> None:
        """Drop all passages but these."""
        rows = np.flatnonzero(np.isin(self["ids"], ids))
        self._room = {name: values[rows] for name, values in self._room.items()}
        self._count, self._order = len(rows), None

    def of(self, groups: NDArray[np.int64]) -> Bool[np.ndarray, " rows"]:
        """Which rows belong to these groups."""
        return np.isin(self["groups"], groups)

    def in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All rows, group by group in the order of their numbers, and where each of them stands: the places of two
        passages of a group differ as their numbers do, those of two groups by more than any number."""
        if self._order is None:
            places = self["groups"] * FAR + self["numbers"]
            rows = np.argsort(places, kind="stable")
            self._order = rows, places[rows]
        return self._order


def signs(vectors: Float[np.ndarray, "rows dim"]) -> NDArray[np.uint64]:
    """The signs of the numbers, a bit each."""
    bits = np.packbits(vectors > 0, axis=1)
    padded = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : bits.shape[1]] = bits
    return padded.view(np.uint64)
