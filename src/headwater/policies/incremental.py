"""Driving a policy one token at a time.

Knows the order of events: attention is applied to what is held, then the new position joins, then an eviction may
follow. `start`, `step` and `drop` do it for any number of rows in step with one another, as functions from value to
value; `Incremental` is the one-row contract over them. Does not know any rule or signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

import numpy as np
from jaxtyping import Bool, Float32

from headwater.errors import OverCapacity, UnknownName, UsageError
from headwater.policies.base import Policy, Slots
from headwater.policies.signals import Signal, State, compact


def start(signal: Signal[State], rows: int) -> Slots[State]:
    """Every row holds position 0: the first token is in the cache before the first decode step."""
    positions = np.zeros((rows, 1), dtype=np.int64)
    return Slots(positions=positions, state=signal.fresh(positions))


def step(
    signal: Signal[State], slots: Slots[State], position: int, weights: Float32[np.ndarray, "rows weights"] | None
) -> Slots[State]:
    """One decode step: apply the attention, if there was any, then add `position` to every row."""
    xp = slots.positions.__array_namespace__()
    state = slots.state if weights is None else signal.observe(slots.state, weights)
    new = xp.full((slots.positions.shape[0], 1), position, dtype=slots.positions.dtype)
    return Slots(positions=xp.concat([slots.positions, new], axis=1), state=signal.append(state))


def drop(signal: Signal[State], slots: Slots[State], victims: Bool[np.ndarray, "rows slots"]) -> Slots[State]:
    """What is left without the victims. Raises UsageError when the rows lose different numbers of slots."""
    kept = ~victims
    return replace(slots, positions=compact(slots.positions, kept), state=signal.keep(slots.state, kept))


class Incremental(Generic[State]):
    """One row under a policy: a decode step at a time, evictions when asked for."""

    def __init__(self, policy: Policy[State]) -> None:
        self.policy = policy
        self.slots = start(policy.signal, 1)
        self._next = 1

    def on_decode_step(self, position: int, weights: Sequence[float] | None) -> None:
        """Apply the weights of the positions held, ascending, then add `position`, which counts up from 1.

        None stands for a step without attention. Raises OverCapacity, which is a RuntimeError, with nothing changed
        when the policy has no room for one more.
        """
        if position != self._next:
            raise UsageError(f"decode steps count up by one: expected position {self._next}, got {position}")
        if self.kept_count() + 1 > self.policy.capacity:
            raise OverCapacity(
                f"{self.policy.name} was built for a budget of {self.policy.budget} tokens and holds "
                f"{self.kept_count()}; evict before the next step, or build it with a larger budget"
            )
        row = None if weights is None else np.asarray(weights, dtype=np.float32)[None, :]
        self.slots = step(self.policy.signal, self.slots, position, row)
        self._next += 1

    def evict(self, budget: int) -> list[int]:
        """Remove positions until at most `budget` are held, as far as the policy allows; return them, ascending."""
        if isinstance(budget, bool) or budget < 0:
            raise UsageError(f"evict needs a budget of at least 0 tokens, got {budget!r}")
        victims = self.policy.victims(self.slots, budget)
        removed = self.slots.positions[victims].tolist()
        self.slots = drop(self.policy.signal, self.slots, victims)
        return removed

    def kept_count(self) -> int:
        """How many positions are held."""
        return self.slots.positions.shape[1]

    def report(self, name: str, *arguments: int) -> int | float:
        """A figure of the policy's own, such as `sink_count`. Raises UnknownName for one it does not have."""
        if name not in self.policy.reports:
            raise UnknownName(f"report of {self.policy.name}", name, self.policy.reports)
        return getattr(self.policy, name)(self.slots, *arguments)[0].item()
