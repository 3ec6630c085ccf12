"""What policies never evict: the first positions of the stream, and the most recent ones.

Knows the parameters `sinks` and `recent_window`, their refusals, and which slots they protect. Does not know what the
slots in between are worth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool

from headwater.errors import BudgetError
from headwater.policies.base import Policy, Slots
from headwater.policies.signals import State


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSinks(Policy[State]):
    """A policy that can pin the head of the stream: positions below `sinks` stay for ever.

    The papers of most policies pin nothing, so the default is 0. The budget includes the sinks.
    """

    sinks: int = 0

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        self.check_integer("sinks", self.sinks, least=0)
        if self.sinks >= self.budget:
            raise BudgetError(
                f"{self.name}: sinks must be below the budget of {self.budget} tokens, got sinks={self.sinks}; "
                f"raise the budget above {self.sinks} or take fewer sinks"
            )

    def pinning(self, prefix_tokens: int) -> WithSinks[State]:
        if prefix_tokens <= self.sinks:
            return self
        try:
            return replace(self, sinks=prefix_tokens)
        except BudgetError as error:
            raise BudgetError(
                f"the system prompt takes {prefix_tokens} tokens, which {self.name} would pin as its sinks: {error}"
            ) from error

    def protected(self, slots: Slots[State]) -> Bool[np.ndarray, "rows slots"]:
        return slots.positions < self.sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class WithRecentWindow(WithSinks[State]):
    """A policy that also protects the last `recent_window` positions held, the one just added among them."""

    recent_window: int = 32

    def __post_init__(self) -> None:
        WithSinks.__post_init__(self)
        self.check_recent_window()

    def check_recent_window(self) -> None:
        """Raises BudgetError unless at least one position is left to choose from beside sinks and window."""
        self.check_integer("recent_window", self.recent_window, least=0)
        if self.recent_window >= self.budget - self.sinks:
            room = f"the budget of {self.budget} tokens" + (f" less {self.sinks} sinks" if self.sinks else "")
            raise BudgetError(
                f"{self.name}: recent_window must be below {room}, got recent_window={self.recent_window}; "
                f"raise the budget above {self.recent_window + self.sinks} or take a smaller window"
            )

    def protected(self, slots: Slots[State]) -> Bool[np.ndarray, "rows slots"]:
        xp = slots.positions.__array_namespace__()
        held = slots.positions.shape[1]
        return (slots.positions < self.sinks) | (xp.arange(held) >= held - self.recent_window)
