"""The first-in-first-out rule with a pinned head, as arithmetic.

Knows how many tokens leave, and when. Does not know what a token is, nor where its K and V lie. Every layout that keeps
"pins, then the most recent tokens" (the ring, the fake engine, the slow twins) asks this one value.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import BudgetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How much of a stream stays: the first `pins` tokens, and the most recent ones up to `budget` in all.

    `budget` is the most tokens held after a step, pins included. `block` is how many tokens leave at a time: 1 is the
    rule of the papers; larger blocks evict at fixed places of the stream (when `budget + 1`, `budget + 1 + block`, ...
    tokens were fed), so the held set never depends on how the text was cut into calls.

    Raises BudgetError when the numbers do not fit together.
    """

    budget: int
    pins: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        for name, value in (("budget", self.budget), ("pins", self.pins), ("block", self.block)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise BudgetError(f"{name} must be an integer, got {value!r}")
        if self.budget < 1:
            raise BudgetError(f"budget must be at least 1 token, got {self.budget}")
        if self.pins < 0:
            raise BudgetError(f"pins must be at least 0, got {self.pins}")
        if self.pins >= self.budget:
            raise BudgetError(
                f"budget must be at least pins + 1 = {self.pins + 1} tokens to leave room for a window, got "
                f"{self.budget}; raise the budget or pin less"
            )
        if not 1 <= self.block <= self.recent:
            raise BudgetError(f"block must be between 1 and the window of {self.recent} tokens, got {self.block}")

    @classmethod
    def of(cls, budget: int, pins: int = 0, block: int | None = None) -> Window:
        """A window with the default block: a sixteenth of what the pins leave, at least 1."""
        if block is None and isinstance(budget, int) and isinstance(pins, int):
            block = max(1, (budget - pins) // 16)
        return cls(budget=budget, pins=pins, block=1 if block is None else block)

    @property
    def recent(self) -> int:
        """Tokens of the budget that the pins leave to the window."""
        return self.budget - self.pins

    def excess(self, held: int) -> int:
        """How many of the oldest unpinned tokens leave when a step ends with `held` tokens in the cache."""
        over = held - self.budget
        return 0 if over <= 0 else -(-over // self.block) * self.block
