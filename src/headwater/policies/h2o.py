"""The policy that keeps the heavy hitters: what gathered the most attention.

Z. Zhang, Y. Sheng, T. Zhou, T. Chen, L. Zheng, R. Cai, Z. Song, Y. Tian, C. Ré, C. Barrett, Z. Wang, B. Chen, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023, arXiv 2306.14048.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from headwater.policies.base import Slots
from headwater.policies.protection import WithRecentWindow
from headwater.policies.signals import Cumulative


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O(WithRecentWindow[np.ndarray]):
    """Keeps the highest sums of attention, never decayed, and the last `recent_window` positions held."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "the highest cumulative attention, and the most recent tokens"
    source: ClassVar[str] = "Zhang et al., NeurIPS 2023, arXiv 2306.14048"
    reports: ClassVar[frozenset[str]] = frozenset({"score_of"})

    @property
    def signal(self) -> Cumulative:
        return Cumulative()

    def scores(self, slots: Slots[np.ndarray]) -> Float64[np.ndarray, "rows slots"]:
        return slots.state

    def score_of(self, slots: Slots[np.ndarray], position: int) -> Float64[np.ndarray, " rows"]:
        """The sum of a position in each row; -1 where it is not held."""
        return slots.value_at(position, slots.state)
