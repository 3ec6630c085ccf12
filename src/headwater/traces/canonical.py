"""The synthetic trace that published figures refer to: sinks, a local span, heavy hitters that move, and noise.

Knows how its weights are made, to the last bit, and nothing of who asks for them. It is made while it is read, a few
megabytes at a time, and is the same however it is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Int64
from numpy.lib.stride_tricks import as_strided

from headwater.errors import UsageError
from headwater.traces.generator import Generator
from headwater.traces.trace import CHUNK_BYTES, Chunk, Head, Trace, steps_per_chunk

_SINKS = np.array([0.06, 0.045, 0.03, 0.015])
_LOCAL = 64
_HEAVY = 32
_HEAVY_FROM = 128
_REDRAW = 512
_CHUNK_BYTES = 4 << 20
"""It is made, not read, so larger chunks would gain nothing."""
_BLOCK = 64
"""Steps made at a time; draws fall on multiples of it."""


class CanonicalTrace(Trace):
    """One head over `tokens` tokens. Chunks take at most 4 MiB. No token pays anything to itself.

    Raises UsageError for a length below 1 or a seed that is no integer.
    """

    def __init__(self, *, tokens: int = 4096, seed: int = 7) -> None:
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise UsageError(f"a trace has at least 1 token, got tokens={tokens!r}")
        self.tokens, self.seed = tokens, seed
        self.name = f"decode-{tokens}" if seed == 7 else f"decode-{tokens}, seed {seed}"
        self.heads = (Head(layer=0, head=0),)
        self._drawn = _draws(tokens, seed)
        self._shares = 0.25 / np.arange(1, _HEAVY + 1) / _ordered_sum(1 / np.arange(1, _HEAVY + 1))

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        count = steps_per_chunk(min(chunk_bytes, _CHUNK_BYTES), rows=1, tokens=self.tokens)
        space, sums = np.empty((2, min(count, _BLOCK) * self.tokens))
        for first in range(1, self.tokens, count):
            stop = min(first + count, self.tokens)
            weights = np.zeros((1, stop - first, stop), dtype=np.float32)
            for start, end in _blocks(first, stop):
                shape, cells = (end - start, end - 1), (end - start) * (end - 1)
                exact = self._exact(start, end, space[:cells].reshape(shape))
                totals = np.cumsum(exact, axis=1, out=sums[:cells].reshape(shape))[:, -1:]
                np.divide(exact, totals, out=weights[0, start - first : end - first, : end - 1], casting="same_kind")
            yield Chunk(first=first, weights=weights)

    def heavy(self, step: int) -> Int64[np.ndarray, " drawn"]:
        """The positions that are heavy at that step, heaviest first; none before step 128."""
        drawn = [start for start in self._drawn if start <= step]
        return self._drawn[drawn[-1]] if drawn else np.zeros(0, dtype=np.int64)

    def _exact(
        self, first: int, stop: int, exact: Float64[np.ndarray, "steps positions"]
    ) -> Float64[np.ndarray, "steps positions"]:
        """Weights of a block before they are divided by their total; every one is added in the order specified."""
        steps = np.arange(first, stop)[:, None]
        exact.fill(0)
        sinks = _SINKS[:first]
        exact[:, : len(sinks)] += sinks * 0.15 / _ordered_sum(sinks)
        span = min(_LOCAL, first)
        nearness = np.arange(_LOCAL + 1 - span, _LOCAL + 1)
        # Every step's span is one position further on than the span of the step before.
        row, item = exact.strides
        band = as_strided(exact[:, first - span :], shape=(stop - first, span), strides=(row + item, item))
        band += nearness * (0.55 if first >= _HEAVY_FROM else 0.55 + 0.25) / nearness.sum()
        if first >= _HEAVY_FROM:
            exact[:, self.heavy(first)] += self._shares
        exact += 0.05 / steps
        exact[:, first:][np.arange(first, stop - 1) >= steps] = 0
        return exact


def canonical_trace(*, tokens: int = 4096, seed: int = 7) -> CanonicalTrace:
    """The trace `decode-4096` of the published figures; another length or seed gives one of the same make.

    Raises UsageError for a length below 1 or a seed that is no integer.
    """
    return CanonicalTrace(tokens=tokens, seed=seed)


def _blocks(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Steps whose weights are made alike: one by one while the trace grows into its components, then many."""
    while first < stop:
        end = first + 1 if first < _HEAVY_FROM else min(stop, (first // _BLOCK + 1) * _BLOCK)
        yield first, end
        first = end


def _draws(tokens: int, seed: int) -> dict[int, Int64[np.ndarray, " drawn"]]:
    """The heavy positions, in the order drawn, by the step from which they count."""
    generator, drawn = Generator(seed), {}
    for step in (_HEAVY_FROM, *range(_REDRAW, tokens, _REDRAW)):
        if step < tokens:
            positions = dict[int, None]()
            while len(positions) < _HEAVY:
                positions[generator.next_int(step - _LOCAL - 4) + 4] = None
            drawn[step] = np.array(list(positions))
    return drawn


def _ordered_sum(values: np.ndarray) -> float:
    return float(np.cumsum(values)[-1])
