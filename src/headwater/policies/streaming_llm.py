"""The policy that pins the head of the stream and keeps the most recent tokens.

G. Xiao, Y. Tian, B. Chen, S. Han, M. Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from headwater.errors import BudgetError
from headwater.policies.base import Slots
from headwater.policies.protection import WithSinks
from headwater.policies.signals import NoSignal
from headwater.policies.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM(WithSinks[None]):
    """Keeps the first `sinks` positions for ever, and the most recent others up to `budget` in all."""

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "the first tokens (sinks) and the most recent ones"
    source: ClassVar[str] = "Xiao et al., ICLR 2024, arXiv 2309.17453"
    windowed: ClassVar[bool] = True
    reports: ClassVar[frozenset[str]] = frozenset({"sink_count"})

    sinks: int = 4

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    def sink_count(self, slots: Slots[None]) -> Int64[np.ndarray, " rows"]:
        """Sinks held so far, in each row."""
        xp = slots.positions.__array_namespace__()
        return xp.sum(self.protected(slots), axis=1, dtype=xp.int64)

    def window(self, prefix_tokens: int = 0, block: int | None = None) -> Window:
        """A window that pins the sinks, and the whole prefix where it is longer."""
        if prefix_tokens < 0:
            raise BudgetError(f"a pinned prefix must be at least 0 tokens, got {prefix_tokens}")
        if prefix_tokens >= self.budget:
            raise BudgetError(
                f"the system prompt takes {prefix_tokens} tokens and the budget is {self.budget}; "
                f"raise the budget above {prefix_tokens} or shorten the prompt"
            )
        return Window.of(self.budget, max(self.sinks, prefix_tokens), block)
