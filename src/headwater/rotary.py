"""Rotary position embeddings as arithmetic: the angles of a shift, and the rotation of keys by it.

Knows pairs, frequencies and layouts. Does not know any model or array library: `rotate` uses operators and slices only,
so it runs on NumPy, torch and MLX arrays alike. Angles are computed in float64, whatever the keys are.

Rotations add up, R(p + d) = R(d) R(p), so a key written at position p moves to p + d by one rotation by d. A scale that
some models multiply into their cosines and sines (YaRN, LongRoPE) is already in the key, and stays there: the rotation
here has scale 1.

Source: J. Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How one layer turns its keys: which dimensions form pairs, and how fast each pair turns.

    `frequencies` are radians per position, one a pair. `layout` says how pairs lie: "half" pairs dimension i with
    i + pairs, "interleaved" pairs 2i with 2i + 1. The pairs begin at dimension `start` of the head.
    """

    frequencies: tuple[float, ...]
    layout: Layout = "half"
    start: int = 0

    @property
    def pairs(self) -> int:
        return len(self.frequencies)

    def slices(self) -> tuple[slice, slice]:
        """The first and the second member of every pair, as slices of the head dimension."""
        start, pairs = self.start, self.pairs
        if self.layout == "half":
            return slice(start, start + pairs), slice(start + pairs, start + 2 * pairs)
        return slice(start, start + 2 * pairs, 2), slice(start + 1, start + 2 * pairs, 2)

    def angles(self, shift: ArrayLike) -> NDArray[np.float64]:
        """Angle of every pair for a move by `shift` positions: `[..., pairs]` for shifts `[...]`, in radians."""
        return np.asarray(shift, dtype=np.float64)[..., None] * np.asarray(self.frequencies, dtype=np.float64)


def rotate(keys: Any, cos: Any, sin: Any, rotation: Rotation) -> Any:
    """A copy of `keys` turned by the angles whose cosines and sines are given.

    `keys` is `[..., tokens, head_dim]`; `cos` and `sin` broadcast to `[..., tokens, pairs]` and come from the same
    array library, in the precision the rotation shall be done in.
    """
    first, second = rotation.slices()
    a, b = keys[..., first], keys[..., second]
    turned = keys * 1
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned
