"""What snapkv and pyramidkv share: a score from the last steps, pooled over neighbours.

Knows the parameters `obs_window` and `pool_kernel` and how the score comes about. Does not know how much of the
budget a layer gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from headwater.errors import BudgetError
from headwater.policies.base import Slots
from headwater.policies.protection import WithRecentWindow
from headwater.policies.signals import History, Rings


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledHistory(WithRecentWindow[Rings]):
    """Ranks a slot by the largest sum of the last `obs_window` weights among itself and its neighbours.

    Neighbours are the `pool_kernel // 2` slots on either side, whatever gap lies between their positions, protected
    ones included.
    """

    reports: ClassVar[frozenset[str]] = frozenset({"window_score_of"})

    obs_window: int = 16
    pool_kernel: int = 7

    def __post_init__(self) -> None:
        WithRecentWindow.__post_init__(self)
        self.check_pooling()

    def check_pooling(self) -> None:
        """Raises BudgetError unless steps can be observed and the kernel has a middle."""
        self.check_integer("obs_window", self.obs_window, least=1)
        self.check_integer("pool_kernel", self.pool_kernel, least=1)
        if self.pool_kernel % 2 == 0:
            raise BudgetError(f"{self.name}: pool_kernel must be odd, got pool_kernel={self.pool_kernel}")

    @property
    def prompt_steps(self) -> int:
        return self.obs_window

    @property
    def signal(self) -> History:
        return History(obs_window=self.obs_window)

    def scores(self, slots: Slots[Rings]) -> Float64[np.ndarray, "rows slots"]:
        xp = slots.positions.__array_namespace__()
        rows, held = slots.positions.shape
        reach = min(self.pool_kernel // 2, held)
        edge = xp.full((rows, reach), -xp.inf)
        padded = xp.concat([edge, window_sums(slots.state), edge], axis=1)
        pooled = padded[:, :held]
        for shift in range(1, 2 * reach + 1):
            pooled = xp.maximum(pooled, padded[:, shift : shift + held])
        return pooled

    def window_score_of(self, slots: Slots[Rings], position: int) -> Float64[np.ndarray, " rows"]:
        """The sum of a position before pooling, in each row; -1 where it is not held."""
        return slots.value_at(position, window_sums(slots.state))


def window_sums(state: Rings) -> Float64[np.ndarray, "rows slots"]:
    """The sum of every ring in float64, from its first entry on; a sum of the library may take another order."""
    xp = state.weights.__array_namespace__()
    total = xp.astype(state.weights[:, :, 0], xp.float64)
    for entry in range(1, state.weights.shape[2]):
        total = total + state.weights[:, :, entry]
    return total
