"""What attention was paid, step by step: the seam between where it comes from and what is asked of it.

Knows the shape of a trace and how it comes in pieces. Does not know policies, models or file formats.

Step `t` (from 1) is the query of the token at position `t`: it pays a weight to every position `0..t-1` and to itself.
Its own weight is no policy's business, since a token cannot leave before it was there; it counts as kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Float32

from headwater.errors import UsageError

CHUNK_BYTES = 64 << 20
"""How much of a trace is in memory at a time, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a row of a trace is: one attention head of one layer, both counted from 0."""

    layer: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive steps of all rows.

    `weights[row, i, p]` is what step `first + i` pays to position `p`, for `p` up to and including the step's own
    position `first + i`; what lies beyond is never read. The array may be reused for the next chunk. An array that is
    contiguous is read where it lies, any other is copied.
    """

    first: int
    weights: Float32[np.ndarray, "rows steps positions"]

    @property
    def steps(self) -> range:
        """The steps in this chunk."""
        return range(self.first, self.first + self.weights.shape[1])


class Trace(ABC):
    """Attention weights of one or more heads over a sequence of tokens, read from the front, in chunks.

    A trace can be read any number of times. `tokens` is the length of the sequence, so that the steps are
    `1..tokens - 1`; `heads` names the rows.
    """

    name: str
    """What it is called in tables and files."""

    tokens: int
    """Length of the sequence that was seen."""

    heads: tuple[Head, ...]
    """What each row is, layers ascending."""

    @abstractmethod
    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """All steps in order, in arrays of at most `chunk_bytes`, or of one step where that is larger."""

    @property
    def rows(self) -> int:
        """How many heads are in it."""
        return len(self.heads)

    @property
    def steps(self) -> int:
        """How many steps are in it."""
        return self.tokens - 1

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have rows, ascending."""
        return tuple(sorted({head.layer for head in self.heads}))

    @property
    def layer_rows(self) -> tuple[slice, ...]:
        """The rows of each of the `layers`. Raises as `check_heads` does."""
        self.check_heads()
        of = [head.layer for head in self.heads]
        ends = [of.index(layer) for layer in self.layers] + [len(of)]
        return tuple(slice(first, stop) for first, stop in pairwise(ends))

    def check_heads(self) -> None:
        """Raises UsageError when the rows are not sorted by layer."""
        of = [head.layer for head in self.heads]
        if of != sorted(of):
            raise UsageError(f"{self.name}: rows come layer by layer, ascending, got layers {of}")

    def whole(self) -> Float32[np.ndarray, "rows steps positions"]:
        """All of it at once: `rows * steps * tokens * 4` bytes, with 0 after each step's own position."""
        weights = np.zeros((self.rows, self.steps, self.tokens), dtype=np.float32)
        for chunk in self.chunks():
            for step in chunk.steps:
                weights[:, step - 1, : step + 1] = chunk.weights[:, step - chunk.first, : step + 1]
        return weights


def steps_per_chunk(chunk_bytes: int, *, rows: int, tokens: int) -> int:
    """How many steps of the full width fit a chunk; at least one. Raises UsageError for a size that is no size."""
    if chunk_bytes < 1:
        raise UsageError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    return max(1, chunk_bytes // (4 * rows * tokens))


class ArrayTrace(Trace):
    """A trace from an array in memory.

    `weights` is `[rows, queries, keys]` or, for a single head, `[queries, keys]`, with as many queries as keys: row
    `t` is the attention of the token at position `t`, as models return it. Query 0 is no step, and what lies above
    the diagonal is never read. A trace whose tokens pay nothing to themselves has a diagonal of zeros.

    Raises UsageError for another shape or kind of number.
    """

    def __init__(
        self,
        weights: Float[np.ndarray, "..."],
        *,
        name: str = "array",
        heads: tuple[Head, ...] | None = None,
    ) -> None:
        given = np.asarray(weights)
        array = given[None] if given.ndim == 2 else given
        if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
            raise UsageError(f"a trace is [rows, tokens, tokens] or [tokens, tokens], got {list(given.shape)}")
        if not np.issubdtype(array.dtype, np.floating):
            raise UsageError(f"a trace holds floating-point weights, got {array.dtype}")
        self.name = name
        self.tokens = array.shape[1]
        self.heads = heads or tuple(Head(layer=0, head=index) for index in range(len(array)))
        if len(self.heads) != len(array):
            raise UsageError(f"{len(self.heads)} heads were named for {len(array)} rows")
        self.check_heads()
        self._weights = array

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        count = steps_per_chunk(chunk_bytes, rows=self.rows, tokens=self.tokens)
        for first in range(1, self.tokens, count):
            stop = min(first + count, self.tokens)
            yield Chunk(first=first, weights=np.ascontiguousarray(self._weights[:, first:stop, :stop], np.float32))
