"""The policy that keeps what the last steps looked at, with its surroundings.

Y. Li, Y. Huang, B. Yang, B. Venkitesh, A. Locatelli, H. Ye, T. Cai, P. Lewis, D. Chen, "SnapKV: LLM Knows What You are
Looking for Before Generation", NeurIPS 2024, arXiv 2404.14469. The paper selects once, at the end of the prompt; here
the same scoring runs at every eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.policies.pooled_history import PooledHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(PooledHistory):
    """Keeps the highest pooled sums of the last `obs_window` steps, and the last `recent_window` positions held."""

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "the highest pooled attention of the last steps, and the most recent tokens"
    source: ClassVar[str] = "Li et al., NeurIPS 2024, arXiv 2404.14469"
