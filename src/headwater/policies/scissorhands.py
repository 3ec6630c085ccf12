"""The policy that keeps what is important again and again: votes instead of sums.

Z. Liu, A. Desai, F. Liao, W. Wang, V. Xie, Z. Xu, A. Kyrillidis, A. Shrivastava, "Scissorhands: Exploiting the
Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time", NeurIPS 2023, arXiv 2305.17118.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64, Int64

from headwater.policies.base import Slots
from headwater.policies.protection import WithRecentWindow
from headwater.policies.signals import Votes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scissorhands(WithRecentWindow[np.ndarray]):
    """Keeps what most often had more than the even share, and the last `recent_window` positions held.

    Equal votes are the normal case, so the rule that the lowest position goes decides most evictions.
    """

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "what most often beats the even share, and the most recent tokens"
    source: ClassVar[str] = "Liu et al., NeurIPS 2023, arXiv 2305.17118"
    reports: ClassVar[frozenset[str]] = frozenset({"votes_of"})

    @property
    def signal(self) -> Votes:
        return Votes()

    def scores(self, slots: Slots[np.ndarray]) -> Float64[np.ndarray, "rows slots"]:
        xp = slots.state.__array_namespace__()
        return xp.astype(slots.state, xp.float64)

    def votes_of(self, slots: Slots[np.ndarray], position: int) -> Int64[np.ndarray, " rows"]:
        """The votes of a position in each row; -1 where it is not held."""
        return slots.value_at(position, slots.state)
