"""An attention-aware policy small enough to check by eye: it proves that the seam carries a signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from headwater.policies.base import Policy, Slots
from headwater.policies.signals import ATTENTION, Signal, compact

Weights = Float64[np.ndarray, "rows slots"]
UNOBSERVED = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest(Signal[Weights]):
    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})

    @property
    def bytes_per_slot(self) -> int:
        return 9

    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> Weights:
        return np.full(positions.shape, UNOBSERVED)

    def observe(self, state: Weights, weights: Float32[np.ndarray, "rows weights"]) -> Weights:
        count = min(state.shape[1], weights.shape[1])
        return np.concatenate([weights[:, :count].astype(np.float64), state[:, count:]], axis=1)

    def append(self, state: Weights) -> Weights:
        return np.concatenate([state, np.full((len(state), 1), UNOBSERVED)], axis=1)

    def keep(self, state: Weights, kept: Bool[np.ndarray, "rows slots"]) -> Weights:
        return compact(state, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestWeight(Policy[Weights]):
    """Drops what had the lowest weight at the latest step; what was never observed stays."""

    name: ClassVar[str] = "latest-weight"
    summary: ClassVar[str] = "the highest weights of the latest step"
    source: ClassVar[str] = "a test"
    reports: ClassVar[frozenset[str]] = frozenset({"last_weight_of"})

    @property
    def signal(self) -> Latest:
        return Latest()

    def protected(self, slots: Slots[Weights]) -> Bool[np.ndarray, "rows slots"]:
        return slots.state == UNOBSERVED

    def scores(self, slots: Slots[Weights]) -> Float64[np.ndarray, "rows slots"]:
        return slots.state

    def last_weight_of(self, slots: Slots[Weights], position: int) -> Float64[np.ndarray, " rows"]:
        return np.where(slots.positions == position, slots.state, UNOBSERVED).max(axis=1)
