"""A trace of many heads that is cheap to make: what the replay is timed on.

Knows how to look like attention where it matters for speed: heavy tails, positions that stay important, a sink, a local
span, rows that add up to 1. Makes one chunk at a time, always in the same array, and keeps account of the time that
takes, so that it can be told from the time of the replay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from headwater.traces import Chunk, Head, Trace
from headwater.traces.trace import CHUNK_BYTES, steps_per_chunk

POOL = 1 << 22
LOCAL = 48


class ManyRows(Trace):
    """`layers` times `heads` rows over `tokens` tokens; the same seed gives the same weights for the same chunks."""

    def __init__(self, *, layers: int = 30, heads: int = 9, tokens: int = 2048, seed: int = 0) -> None:
        self.name, self.tokens, self.seed = f"{layers * heads} rows, seed {seed}", tokens, seed
        self.heads = tuple(Head(layer=layer, head=head) for layer in range(layers) for head in range(heads))
        random = np.random.default_rng(seed)
        self._pool = random.lognormal(0, 1.5, POOL).astype(np.float32)
        self._worth = random.lognormal(0, 1.5, (self.rows, tokens)).astype(np.float32)
        self._worth[:, 0] *= 300
        self.seconds = 0.0
        """What the making of the latest reading took."""

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        count = steps_per_chunk(chunk_bytes, rows=self.rows, tokens=self.tokens)
        space = np.empty((self.rows, count, self.tokens), dtype=np.float32)
        random = np.random.default_rng(self.seed)
        self.seconds = 0.0
        for first in range(1, self.tokens, count):
            start = time.perf_counter()
            stop = min(first + count, self.tokens)
            chunk = Chunk(first=first, weights=space[:, : stop - first])
            for row, weights in enumerate(chunk.weights):
                offset = random.integers(POOL - weights.size)
                fresh = self._pool[offset : offset + weights.size].reshape(weights.shape)
                np.multiply(fresh, self._worth[row], out=weights)
                weights[:, max(0, first - LOCAL) :] *= 8
                weights[:, :stop] /= weights[:, :stop].sum(axis=1, keepdims=True)
            self.seconds += time.perf_counter() - start
            yield chunk

    @property
    def weight_bytes(self) -> int:
        """What a replay must read at least once: every weight of the lower triangle, in float32."""
        return 4 * self.rows * self.tokens * (self.tokens + 1) // 2
