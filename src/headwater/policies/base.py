"""What a policy is: an immutable value with parameters, and a rule over what is held and what a signal remembers.

Knows budgets and how victims are selected. Does not know where attention comes from, nor where K and V lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
from jaxtyping import Bool, Float64, Int64, Num

from headwater.errors import BudgetError, UnsupportedCall, UsageError
from headwater.policies.signals import Signal, State
from headwater.policies.window import Window

POSITION_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(Generic[State]):
    """What a rule looks at: the positions held in every row, ascending, and the signal's state for them."""

    positions: Int64[np.ndarray, "rows slots"]
    state: State

    def value_at(self, position: int, values: Num[np.ndarray, "rows slots"]) -> Num[np.ndarray, " rows"]:
        """What each row has for a position among the values of its slots; -1 in a row that does not hold it."""
        xp = self.positions.__array_namespace__()
        found = self.positions == position
        return xp.where(xp.any(found, axis=1), xp.sum(xp.where(found, values, 0), axis=1), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC, Generic[State]):
    """Decides which positions leave a bounded cache.

    A policy says which slots it protects and how it ranks the others; `victims` does the rest, the same for all. The
    fields of the dataclass are its parameters. Raises BudgetError when the numbers do not fit together.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """What it keeps, in a few words."""
    source: ClassVar[str]
    """Where the method comes from."""
    windowed: ClassVar[bool] = False
    """Whether `window` says all there is to say; else every head keeps its own."""
    reports: ClassVar[frozenset[str]] = frozenset()
    """Methods that report a figure per row: `method(slots, ...) -> [rows]`."""

    budget: int = 512

    def __post_init__(self) -> None:
        self.check_integer("budget", self.budget, least=1)

    @property
    @abstractmethod
    def signal(self) -> Signal[State]:
        """What it has to remember of the attention."""

    @abstractmethod
    def protected(self, slots: Slots[State]) -> Bool[np.ndarray, "rows slots"]:
        """The slots that never go now, whatever the budget."""

    def scores(self, slots: Slots[State]) -> Float64[np.ndarray, "rows slots"]:
        """The lowest goes first, and of equals the lowest position; where a policy does not rank, the oldest.

        Finite numbers; those of protected slots are not read.
        """
        xp = slots.positions.__array_namespace__()
        return xp.astype(slots.positions, xp.float64)

    def victims(self, slots: Slots[State], budget: int) -> Bool[np.ndarray, "rows slots"]:
        """The slots that must go so that `target(budget)` stay in each row, as far as they are not protected."""
        xp = slots.positions.__array_namespace__()
        held = slots.positions.shape[1]
        needed = held - self.target(budget)
        if needed <= 0:
            return xp.zeros(slots.positions.shape, dtype=xp.bool)
        protected = self.protected(slots)
        scores = xp.where(protected, xp.inf, self.scores(slots))
        if needed == 1:  # the usual case, and several times as fast without a sort
            chosen = xp.arange(held) == xp.argmin(scores, axis=1, keepdims=True)
        else:
            chosen = xp.argsort(xp.argsort(scores, axis=1, stable=True), axis=1, stable=True) < needed
        return chosen & ~protected

    def target(self, budget: int) -> int:
        """How many positions an eviction to `budget` should leave: as many, unless the policy keeps still fewer."""
        return budget

    def live(self, prefix_tokens: int = 0, block: int | None = None) -> Window | Policy[Any] | None:
        """What a live stream keeps under it: a window, or what the policy itself picks in every head; None for all.

        `prefix_tokens` and `block` are as for `window`. Raises BudgetError when they do not fit, UsageError for a block
        where tokens leave one by one.
        """
        if self.windowed:
            return self.window(prefix_tokens, block)
        if block not in (None, 1):
            raise UsageError(f"under {self.name} one token leaves for each that comes; leave block={block} out")
        return self.pinning(prefix_tokens)

    def pinning(self, prefix_tokens: int) -> Policy[Any]:
        """The policy that pins a prefix of this length; itself, where it pins nothing."""
        return self

    def window(self, prefix_tokens: int = 0, block: int | None = None) -> Window | None:
        """The window that does the same on a live cache, or None when nothing is ever evicted.

        `prefix_tokens` is the length of a prefix to pin, such as the system prompt, for policies that pin; `block` is
        how many tokens leave at a time. Raises BudgetError when they do not fit, UnsupportedCall when no window can do
        what the policy does.
        """
        raise UnsupportedCall(f"{self.name} keeps no window of the stream; sliding-window and streaming-llm do")

    def at_layer(self, depth: int, layers: int) -> Policy[Any]:
        """The policy of one of a model's layers, counted from 0: itself, unless the layers get different budgets."""
        return self

    @property
    def prompt_steps(self) -> int:
        """From how many of its last tokens it can pick what to keep of a whole prompt at once; 0 if it is not defined
        so."""
        return 0

    @property
    def needs(self) -> frozenset[str]:
        """What an engine must supply for it."""
        return self.signal.needs

    @property
    def capacity(self) -> int:
        """The most positions ever held: one more than the budget, between a step and its eviction."""
        return self.budget + 1

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes that a compact implementation holds per slot and row, beside the cache itself."""
        return POSITION_BYTES + self.signal.bytes_per_slot

    def check_integer(self, parameter: str, value: object, *, least: int) -> None:
        """Raises BudgetError unless the value is an integer, which a bool is not, and at least `least`."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise BudgetError(f"{self.name}: {parameter} must be an integer, got {parameter}={value!r}")
        if value < least:
            raise BudgetError(f"{self.name}: {parameter} must be at least {least}, got {parameter}={value}")
