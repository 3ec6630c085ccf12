"""What the fake model pays: weights made of whole numbers, shaped like attention.

Knows token ids and positions. Every head mixes four habits in its own proportions: the first tokens (sinks), what came
just before, earlier places that held the same token, and a little of everything. Numerators are integers and are summed
as such, so a weight is the same in every block, on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LAYERS, HEADS = 4, 3
SINKS = 4
_SHARE = 1 << 20


def paid(ids: NDArray[np.int64], now: int, layers: Sequence[int], heads: Sequence[int]) -> NDArray[np.float64]:
    """The weights that token `now` pays to the positions `0..now`, `[layers, heads, now + 1]`."""
    positions = np.arange(now + 1)
    distance = now - positions
    layer = np.asarray(layers, dtype=np.int64)[:, None, None]
    head = np.asarray(heads, dtype=np.int64)[None, :, None]
    sinks = _SHARE * (1 + layer) // (1 + positions) * (positions < SINKS)
    recent = _SHARE // (1 + distance) * (1 + head)
    same = _SHARE // 2 * (ids[: now + 1] == ids[now]) * (distance > 0) * ((layer + head) % 3)
    noise = _mixed(ids[: now + 1], positions, layer * HEADS + head) % (_SHARE >> 6)
    total = sinks + recent + same + noise
    return total / total.sum(axis=-1, keepdims=True)


def _mixed(ids: NDArray[np.int64], positions: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number of 32 bits for every position and row, which looks random and depends on what the position holds."""
    value = (ids * 0x9E37 + positions * 0x79B9 + row * 0x7F4A) & 0xFFFFFFFF
    for factor in (0x21F0AAAD, 0x735A2D97):
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 15)
