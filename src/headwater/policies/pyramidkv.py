"""The policy that gives deep layers less of the budget than shallow ones.

Z. Cai, Y. Zhang, B. Gao, Y. Liu, T. Liu, K. Lu, W. Xiong, Y. Dong, B. Chang, J. Hu, W. Xiao, "PyramidKV: Dynamic KV
Cache Compression based on Pyramidal Information Funneling", arXiv 2406.02069 (2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from headwater.errors import BudgetError
from headwater.policies.base import Slots
from headwater.policies.pooled_history import PooledHistory
from headwater.policies.protection import WithSinks
from headwater.policies.signals import Rings
from headwater.policies.snapkv import SnapKV


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKV(PooledHistory):
    """Keeps as snapkv does, down to the share of one layer; `budget` is the average over all `num_layers`.

    Shares fall in equal steps from the first layer to the last, which gets `1 / pyramid_ratio` of the first one's. An
    eviction goes down to the share even when more would fit, and never above what was asked for.
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "as snapkv, with less of the budget the deeper the layer"
    source: ClassVar[str] = "Cai et al., 2024, arXiv 2406.02069"
    reports: ClassVar[frozenset[str]] = PooledHistory.reports | {"effective_budget"}

    layer: int = 0
    num_layers: int = 1
    pyramid_ratio: int = 4

    def __post_init__(self) -> None:
        WithSinks.__post_init__(self)
        self.check_integer("num_layers", self.num_layers, least=1)
        self.check_integer("layer", self.layer, least=0)
        if self.layer >= self.num_layers:
            raise BudgetError(
                f"{self.name}: layer must be below num_layers={self.num_layers}, counted from 0, got layer={self.layer}"
            )
        self.check_integer("pyramid_ratio", self.pyramid_ratio, least=1)
        self.check_recent_window()
        self.check_pooling()

    @property
    def effective(self) -> int:
        """The share of this layer, raised where it would leave no position to choose beside sinks and window."""
        share, gaps, ratio = self.budget, self.num_layers - 1, self.pyramid_ratio
        if gaps:
            share = 2 * self.budget * (ratio * gaps - self.layer * (ratio - 1)) // ((ratio + 1) * gaps)
        return max(share, self.sinks + self.recent_window + 1)

    @property
    def capacity(self) -> int:
        return max(self.budget, self.effective) + 1

    def target(self, budget: int) -> int:
        return min(budget, self.effective)

    def at_layer(self, depth: int, layers: int) -> SnapKV | PyramidKV:
        """Of a model of several layers, snapkv with that layer's share as its budget: the total is shared out.

        A policy that was made for a layer of its own already stays as it is.
        """
        if layers == 1 or self.num_layers != 1:
            return self
        return SnapKV(
            budget=replace(self, layer=depth, num_layers=layers).effective,
            sinks=self.sinks,
            recent_window=self.recent_window,
            obs_window=self.obs_window,
            pool_kernel=self.pool_kernel,
        )

    def effective_budget(self, slots: Slots[Rings]) -> Int64[np.ndarray, " rows"]:
        """The share of this layer, the same in each row."""
        xp = slots.positions.__array_namespace__()
        return xp.full(slots.positions.shape[0], self.effective, dtype=xp.int64)
