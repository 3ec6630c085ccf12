"""The policy that keeps the most recent tokens and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool

from headwater.policies.base import Policy, Slots
from headwater.policies.signals import NoSignal
from headwater.policies.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Policy[None]):
    """Keeps the `budget` most recent positions; position 0 is the first to go."""

    name: ClassVar[str] = "sliding-window"
    summary: ClassVar[str] = "the most recent tokens"
    source: ClassVar[str] = "folklore"
    windowed: ClassVar[bool] = True

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    def protected(self, slots: Slots[None]) -> Bool[np.ndarray, "rows slots"]:
        return slots.positions < 0

    def window(self, prefix_tokens: int = 0, block: int | None = None) -> Window:
        """A window without pins: a prefix flows out of it like any other text."""
        return Window.of(self.budget, 0, block)
