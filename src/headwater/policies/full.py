"""The policy that keeps everything, and is over when its budget is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool

from headwater.errors import UsageError
from headwater.policies.base import Policy, Slots
from headwater.policies.signals import NoSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Policy[None]):
    """Evicts nothing. Its budget is the length at which it ends; there is no room for one more."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "everything, and stops at the budget"
    source: ClassVar[str] = "the plain cache"
    windowed: ClassVar[bool] = True

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    @property
    def capacity(self) -> int:
        return self.budget

    @property
    def state_bytes_per_slot(self) -> int:
        """Nothing: what is held is what was seen."""
        return 0

    def protected(self, slots: Slots[None]) -> Bool[np.ndarray, "rows slots"]:
        return slots.positions >= 0

    def window(self, prefix_tokens: int = 0, block: int | None = None) -> None:
        """None: nothing is ever evicted. Raises UsageError for a block, which it could not honour."""
        if block is not None:
            raise UsageError(f"full never evicts, so it has no block, got block={block}; leave it out")
