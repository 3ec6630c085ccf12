"""The slow twin of the canonical trace: one step after the other, one component after the other.

The fast path (`headwater.traces.canonical`)      This path
1. blocks of steps as one array                    1. one array per step
2. the drawn positions from a generator class      2. the generator as plain functions over a list of four words

Written from the specification alone. Verified by the 424 published values of the generator, the published bits of the
first ten steps and the published hash of all of them (`tests/traces/test_twin.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

WORD = 2**32 - 1
SINKS = [0.06, 0.045, 0.03, 0.015]


def mix(z: int) -> int:
    z ^= z >> 16
    z = z * 0x21F0AAAD & WORD
    z ^= z >> 15
    z = z * 0x735A2D97 & WORD
    return z ^ z >> 15


def seeded(seed: int) -> list[int]:
    state = [mix(seed + count * 0x9E3779B9 & WORD) for count in (1, 2, 3, 4)]
    return state if any(state) else [1, 0, 0, 0]


def rotl(word: int, by: int) -> int:
    return (word << by | word >> 32 - by) & WORD


def next_u32(s: list[int]) -> int:
    result = rotl(s[1] * 5 & WORD, 7) * 9 & WORD
    u = s[1] << 9 & WORD
    s[2] ^= s[0]
    s[3] ^= s[1]
    s[1] ^= s[2]
    s[0] ^= s[3]
    s[2] ^= u
    s[3] = rotl(s[3], 11)
    return result


def next_int(s: list[int], bound: int) -> int:
    low = (2**32 - bound) % bound
    while (value := next_u32(s)) < low:
        pass
    return value % bound


def heavy_set(s: list[int], t: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < 32:
        p = next_int(s, t - 68) + 4
        if p not in drawn:
            drawn.append(p)
    return drawn


def decode_trace(tokens: int = 4096, seed: int = 7) -> Iterator[NDArray[np.float32]]:
    """The weights of steps `1..tokens - 1`; step `t` pays to positions `0..t-1`."""
    state = seeded(seed)
    heavy: list[int] = []
    shares = [1 / k for k in range(1, 33)]
    for t in range(1, tokens):
        w = np.zeros(t)
        count = min(4, t)
        w[:count] += [share * 0.15 / sum(SINKS[:count]) for share in SINKS[:count]]
        span = min(64, t)
        mass = 0.55 + 0.25 if t < 128 else 0.55
        w[t - span :] += np.arange(65 - span, 65) * mass / sum(65 - d for d in range(1, span + 1))
        if t == 128 or t % 512 == 0:
            heavy = heavy_set(state, t)
        if t >= 128:
            w[heavy] += [0.25 / k / sum(shares) for k in range(1, 33)]
        w += 0.05 / t
        yield (w / np.cumsum(w)[-1]).astype(np.float32)
