"""A replay by a policy's own rule: general, and the measure of every faster way.

Knows the harness of the specification: measure, then let the policy act, and check what it did. All rows of a layer go
in step with one another. Does not know any rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from headwater.errors import BudgetError, PolicyFault
from headwater.policies import Policy, Slots
from headwater.policies.incremental import drop, start, step
from headwater.traces.result import RULE, Replay, Tally
from headwater.traces.run import Heavy, Run
from headwater.traces.trace import Chunk, Trace


class RuleRun(Run):
    """Any policy, one part for each layer."""

    def __init__(self, trace: Trace, choice: Policy[Any]) -> None:
        self.parts = trace.layer_rows
        self._policy, self._tally = choice, Tally(trace)
        self._layers = [
            _Layer(choice.at_layer(depth, len(self.parts)), rows, self._tally) for depth, rows in enumerate(self.parts)
        ]

    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        rows = self.parts[part]
        for index, now in enumerate(chunk.steps):
            self._layers[part].step(now, chunk.weights[rows, index], heavy[rows, index])

    def slots(self, part: int) -> Slots[Any]:
        """What the rows of a part hold now, and what is remembered of it."""
        return self._layers[part].slots

    def results(self) -> list[Replay]:
        return [self._tally.replay(self._policy, RULE)]


class _Layer:
    """The rows of one layer, which share a policy and their number of slots."""

    def __init__(self, choice: Policy[Any], rows: slice, tally: Tally) -> None:
        if choice.budget < 1:
            raise BudgetError(f"{choice.name}: budget must be at least 1 token, got {choice.budget}")
        self.policy = choice
        self.slots = start(choice.signal, rows.stop - rows.start)
        self.mass, self.hits, self.left = tally.mass[rows], tally.hits[rows], tally.left[rows]
        self.evictions = tally.evictions[rows]

    def step(
        self, now: int, weights: Float32[np.ndarray, "rows positions"], heavy: Int32[np.ndarray, "rows heavy"]
    ) -> None:
        policy, positions = self.policy, self.slots.positions
        shown = np.take_along_axis(weights, positions, axis=1)
        # A running sum adds in ascending position order; `sum` may take another.
        self.mass[:, now - 1] = np.cumsum(shown, axis=1, dtype=np.float64)[:, -1] + weights[:, now]
        never = np.take_along_axis(self.left, np.maximum(heavy, 0).astype(np.int64), axis=1) == self.left.shape[1]
        self.hits[:, now - 1] = (never & (heavy >= 0)).sum(axis=1)
        self.slots = step(policy.signal, self.slots, now, shown)
        if self.slots.positions.shape[1] <= policy.budget:
            return
        self.evictions += 1
        victims = policy.victims(self.slots, policy.budget)
        self._check(now, victims)
        gone = self.slots.positions[victims].reshape(len(victims), -1)
        np.put_along_axis(self.left, gone, np.int32(now), axis=1)
        self.slots = drop(policy.signal, self.slots, victims)

    def _check(self, now: int, victims: Bool[np.ndarray, "rows slots"]) -> None:
        """Raises PolicyFault for victims that are no mask of the slots, or leave the budget or the rows uneven."""
        name, shape = self.policy.name, self.slots.positions.shape
        if not isinstance(victims, np.ndarray) or victims.dtype != np.bool_ or victims.shape != shape:
            given = f"{victims.dtype} {list(victims.shape)}" if isinstance(victims, np.ndarray) else f"{victims!r}"
            raise PolicyFault(
                f"{name}: victims are a mask of the slots held, bool {list(shape)}, got {given} at step {now}"
            )
        counts = victims.sum(axis=1)
        if (counts != counts[0]).any():
            row = int((counts != counts[0]).argmax())
            raise PolicyFault(
                f"{name}: all rows of a layer lose the same number of positions, but at step {now} row 0 loses "
                f"{counts[0]} and row {row} loses {counts[row]}, the first of them position "
                f"{self._first_victim(row, victims)}"
            )
        check_budget(self.policy, now, shape[1] - int(counts[0]))

    def _first_victim(self, row: int, victims: Bool[np.ndarray, "rows slots"]) -> str:
        gone = self.slots.positions[row, victims[row]]
        return str(gone[0]) if len(gone) else "none"


def check_budget(choice: Policy[Any], now: int, held: int) -> None:
    """Raises PolicyFault when more than the budget is held after an eviction."""
    if held > choice.budget:
        raise PolicyFault(
            f"{choice.name}: {held} positions are held after the eviction of step {now}, the budget is {choice.budget}"
        )
