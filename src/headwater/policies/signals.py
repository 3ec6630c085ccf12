"""What a policy remembers of the attention it was shown: a signal, apart from the rule that reads it.

Knows arrays with a leading `rows` axis (one row is one attention head; layers x heads x batch for a whole model). Does
not know budgets, rules or models. A signal is an immutable value with its parameters; what it remembers is a state that
is passed in and returned, one entry per slot held, oldest slot first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, Shaped

from headwater.errors import UsageError

State = TypeVar("State")

ATTENTION = "attention"
"""The need of every signal that reads attention weights."""

UNOBSERVED = -1.0
"""Stands for the weight of a slot that was never shown one."""

SCRATCH_BYTES = 1
"""What a compact implementation sets aside per slot to mark victims, where they are chosen by score."""


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

    @abstractmethod
    def select(self, state: State, rows: Int64[np.ndarray, " selected"]) -> State:
        """The state of these rows, in this order; a row may be taken more than once."""

    @abstractmethod
    def join(self, states: Sequence[State]) -> State:
        """The state of all rows of these, one after another; they have seen equally many steps."""

    @abstractmethod
    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """The state as arrays by name, for keeping."""

    @abstractmethod
    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The state that was kept so."""


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

    def select(self, state: None, rows: Int64[np.ndarray, " selected"]) -> None:
        return None

    def join(self, states: Sequence[None]) -> None:
        return None

    def arrays(self, state: None) -> dict[str, np.ndarray]:
        return {}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneNumber(Signal[np.ndarray]):
    """A signal of one number for each slot, `initial` for one that was never observed."""

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})
    initial: ClassVar[float] = 0.0
    dtype: ClassVar[str] = "float64"

    @property
    def bytes_per_slot(self) -> int:
        return np.dtype(self.dtype).itemsize + SCRATCH_BYTES

    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> Shaped[np.ndarray, "rows slots"]:
        xp = positions.__array_namespace__()
        return xp.full(positions.shape, self.initial, dtype=getattr(xp, self.dtype))

    def append(self, state: Shaped[np.ndarray, "rows slots"]) -> Shaped[np.ndarray, "rows slots+1"]:
        return extend(state, self.initial)

    def keep(
        self, state: Shaped[np.ndarray, "rows slots"], kept: Bool[np.ndarray, "rows slots"]
    ) -> Shaped[np.ndarray, "rows kept"]:
        return compact(state, kept)

    def select(
        self, state: Shaped[np.ndarray, "rows slots"], rows: Int64[np.ndarray, " selected"]
    ) -> Shaped[np.ndarray, "selected slots"]:
        return state[rows]

    def join(self, states: Sequence[Shaped[np.ndarray, "rows slots"]]) -> Shaped[np.ndarray, "all_rows slots"]:
        return states[0].__array_namespace__().concat(list(states), axis=0)

    def arrays(self, state: Shaped[np.ndarray, "rows slots"]) -> dict[str, np.ndarray]:
        return {"each": state}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Shaped[np.ndarray, "rows slots"]:
        return arrays["each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cumulative(OneNumber):
    """The sum of all weights a slot ever had."""

    def observe(
        self, state: Float64[np.ndarray, "rows slots"], weights: Float32[np.ndarray, "rows weights"]
    ) -> Float64[np.ndarray, "rows slots"]:
        count = min(state.shape[1], weights.shape[1])
        return overlay(state, state[:, :count] + weights[:, :count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes(OneNumber):
    """At how many steps a slot had more than the even share, which is one over the number of weights that apply."""

    dtype: ClassVar[str] = "int32"

    def observe(
        self, state: Int32[np.ndarray, "rows slots"], weights: Float32[np.ndarray, "rows weights"]
    ) -> Int32[np.ndarray, "rows slots"]:
        xp = state.__array_namespace__()
        count = min(state.shape[1], weights.shape[1])
        if not count:
            return state
        # Widened first: rounded to float32, the share can equal a weight that is above it.
        above = xp.astype(weights[:, :count], xp.float64) > 1 / count
        return overlay(state, state[:, :count] + xp.astype(above, xp.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest(OneNumber):
    """The weight a slot had at the latest step that showed it one; UNOBSERVED before the first."""

    initial: ClassVar[float] = UNOBSERVED

    def observe(
        self, state: Float64[np.ndarray, "rows slots"], weights: Float32[np.ndarray, "rows weights"]
    ) -> Float64[np.ndarray, "rows slots"]:
        xp = state.__array_namespace__()
        return overlay(state, xp.astype(weights, xp.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """The last weights of every slot, and where all of them write next."""

    weights: Float32[np.ndarray, "rows slots steps"]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Signal[Rings]):
    """The weights a slot had at the last `obs_window` steps that showed some; 0 for steps before it was there."""

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})

    obs_window: int

    @property
    def bytes_per_slot(self) -> int:
        """The ring, and two float64 for its sum and the pooled sum."""
        return 4 * self.obs_window + 16 + SCRATCH_BYTES

    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> Rings:
        xp = positions.__array_namespace__()
        return Rings(weights=xp.zeros((*positions.shape, self.obs_window), dtype=xp.float32), index=0)

    def observe(self, state: Rings, weights: Float32[np.ndarray, "rows weights"]) -> Rings:
        xp = state.weights.__array_namespace__()
        rings = xp.asarray(state.weights, copy=True)
        rings[:, :, state.index] = overlay(rings[:, :, state.index], weights)
        return Rings(weights=rings, index=(state.index + 1) % self.obs_window)

    def append(self, state: Rings) -> Rings:
        return replace(state, weights=extend(state.weights, 0))

    def keep(self, state: Rings, kept: Bool[np.ndarray, "rows slots"]) -> Rings:
        return replace(state, weights=compact(state.weights, kept))

    def select(self, state: Rings, rows: Int64[np.ndarray, " selected"]) -> Rings:
        return replace(state, weights=state.weights[rows])

    def join(self, states: Sequence[Rings]) -> Rings:
        xp = states[0].weights.__array_namespace__()
        return replace(states[0], weights=xp.concat([state.weights for state in states], axis=0))

    def arrays(self, state: Rings) -> dict[str, np.ndarray]:
        return {"weights": state.weights, "index": np.array([state.index], dtype=np.int64)}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Rings:
        return Rings(weights=arrays["weights"], index=int(arrays["index"][0]))


def overlay(
    old: Shaped[np.ndarray, "rows slots"], new: Shaped[np.ndarray, "rows weights"]
) -> Shaped[np.ndarray, "rows slots"]:
    """The new values for the slots they reach, the old ones for the rest; of too many, the first ones count."""
    held, given = old.shape[1], new.shape[1]
    if given >= held:
        return new[:, :held]
    return old.__array_namespace__().concat([new, old[:, given:]], axis=1)


def extend(array: Shaped[np.ndarray, "rows slots ..."], value: int | float) -> Shaped[np.ndarray, "rows slots+1 ..."]:
    """The array with one more slot at the end, filled with the value."""
    xp = array.__array_namespace__()
    new = xp.full((array.shape[0], 1, *array.shape[2:]), value, dtype=array.dtype)
    return xp.concat([array, new], axis=1)


def compact(
    array: Shaped[np.ndarray, "rows slots ..."], kept: Bool[np.ndarray, "rows slots"]
) -> Shaped[np.ndarray, "rows kept ..."]:
    """The kept entries of every row, in their order.

    Raises UsageError when the rows keep different numbers of slots: they would no longer be one array.
    """
    xp = array.__array_namespace__()
    counts = xp.sum(kept, axis=1, dtype=xp.int64)
    if xp.any(counts != counts[0]):
        raise UsageError(
            f"every row must keep the same number of slots, got {sorted(set(counts.tolist()))} in one step"
        )
    return xp.reshape(array[kept], (array.shape[0], int(counts[0]), *array.shape[2:]))
