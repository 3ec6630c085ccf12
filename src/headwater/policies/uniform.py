"""The policy that drops any position: the floor that every other policy has to beat.

Knows how to rank positions by a hash, so that it needs neither a generator nor a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64, UInt64

from headwater.errors import BudgetError
from headwater.policies.base import Slots
from headwater.policies.protection import WithSinks
from headwater.policies.signals import NoSignal

SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(WithSinks[None]):
    """Every eviction takes a uniform choice of the positions held, independent of all others.

    The rank of a position is a hash of `seed`, the position, and the newest position held, which differs from one
    eviction to the next: the same seed gives the same run, in every row.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "a random choice: the floor to compare with"
    source: ClassVar[str] = "a yardstick"

    seed: int = 0

    def __post_init__(self) -> None:
        WithSinks.__post_init__(self)
        self.check_integer("seed", self.seed, least=0)
        if self.seed >= SEEDS:
            raise BudgetError(f"{self.name}: seed must be below 2^64, got seed={self.seed}")

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    def scores(self, slots: Slots[None]) -> Float64[np.ndarray, "rows slots"]:
        xp = slots.positions.__array_namespace__()
        positions = xp.astype(slots.positions, xp.uint64)
        key = mix(xp.full((1, 1), self.seed, dtype=xp.uint64))
        hashed = mix(mix(key + positions[:, -1:]) + positions)
        return xp.astype(hashed >> 11, xp.float64)  # the upper 53 bits, which float64 holds exactly


def mix(z: UInt64[np.ndarray, "rows slots"]) -> UInt64[np.ndarray, "rows slots"]:
    """Scatter the bits of each number: splitmix64, the increment included, modulo 2^64.

    G. L. Steele Jr., D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
