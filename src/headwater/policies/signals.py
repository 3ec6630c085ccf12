"""What a policy remembers of the attention it was shown: a signal, apart from the rule that reads it.

Knows arrays with a leading `rows` axis (one row is one attention head; layers x heads x batch for a whole model). Does
not know budgets, rules or models. A signal is an immutable value with its parameters; what it remembers is a state that
is passed in and returned, one entry per slot held, oldest slot first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from headwater.errors import UsageError

State = TypeVar("State")

ATTENTION = "attention"
"""The need of every signal that reads attention weights."""


class Signal(ABC, Generic[State]):
    """What is remembered per slot, and how it changes. Arrays inside `State` begin with the axes `rows slots`."""

    needs: ClassVar[frozenset[str]]
    """What an engine must supply for it: empty, or `attention`."""

    @property
    @abstractmethod
    def bytes_per_slot(self) -> int:
        """Bytes that a compact implementation holds per slot, the scratch for choosing victims included."""

    @abstractmethod
    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> State:
        """The state of slots that were never observed."""

    @abstractmethod
    def observe(self, state: State, weights: Float32[np.ndarray, "rows weights"]) -> State:
        """The state after one step's attention, `weights[:, i]` being the weight of slot `i`.

        Weights are not renormalised, so a row need not add up to 1. Of too many or too few, the first ones count. A
        step without attention does not come here.
        """

    @abstractmethod
    def append(self, state: State) -> State:
        """The state with one new, never observed slot at the end."""

    @abstractmethod
    def keep(self, state: State, kept: Bool[np.ndarray, "rows slots"]) -> State:
        """The state of the kept slots alone, in their order; see `compact`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSignal(Signal[None]):
    """Remembers nothing, for rules that go by position."""

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def bytes_per_slot(self) -> int:
        return 0

    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> None:
        return None

    def observe(self, state: None, weights: Float32[np.ndarray, "rows weights"]) -> None:
        return None

    def append(self, state: None) -> None:
        return None

    def keep(self, state: None, kept: Bool[np.ndarray, "rows slots"]) -> None:
        return None


def compact(
    array: Shaped[np.ndarray, "rows slots ..."], kept: Bool[np.ndarray, "rows slots"]
) -> Shaped[np.ndarray, "rows kept ..."]:
    """The kept entries of every row, in their order.

    Raises UsageError when the rows keep different numbers of slots: they would no longer be one array.
    """
    rows = array.shape[0]
    counts = {int(row.sum()) for row in kept}
    if len(counts) > 1:
        raise UsageError(f"every row must keep the same number of slots, got {sorted(counts)} in one step")
    return array[kept].reshape(rows, counts.pop(), *array.shape[2:])
