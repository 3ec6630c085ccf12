"""Replaying policies over a trace: what each would have kept, and how much attention that was worth.

Knows the harness of the specification: measure, then let the policy act, and check what it did. Does not know where
the weights come from, nor any rule. Many policies share one pass over the trace; each is a `Run` that is shown every
chunk once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from headwater.errors import BudgetError, InputFileError, PolicyFault
from headwater.policies import Policy, policy
from headwater.policies.incremental import drop, start, step
from headwater.traces.trace import CHUNK_BYTES, Chunk, Trace

HEAVY_HITTERS = 32
"""How many of a step's largest weights count as heavy hitters."""


def round6(value: float) -> float:
    """To six decimals, half up."""
    return math.floor(value * 1e6 + 0.5) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one policy did with a trace. Figures are over all rows unless they say otherwise.

    `mass` is the attention that fell on kept positions, the step's own included; `hits` counts the heavy hitters that
    were kept. `left[row, p]` is the step after which position `p` was evicted, or `tokens` if it never was: the kept
    set of every step is in it. `way` says how it was computed: by the policy's own `rule`, `compiled`, or in `closed
    form`; the figures are the same.
    """

    policy: Policy[Any]
    trace: str
    tokens: int
    mass: Float64[np.ndarray, "rows steps"]
    hits: Int32[np.ndarray, "rows steps"]
    evictions: Int64[np.ndarray, " rows"]
    left: Int32[np.ndarray, "rows positions"]
    way: str = "rule"

    @property
    def possible_hits(self) -> Int64[np.ndarray, " steps"]:
        """How many heavy hitters each step has: 32, or all positions where there are fewer."""
        return np.minimum(HEAVY_HITTERS, np.arange(1, self.tokens))

    @property
    def retained_attention_mass(self) -> float:
        """The share of the attention that fell on what was kept, mean over steps and rows, to six decimals."""
        return round6(float(self.mass.sum()) / self.mass.size) if self.mass.size else 0.0

    @property
    def heavy_hitter_recall(self) -> float:
        """The share of the heavy hitters that were kept, to six decimals."""
        possible = int(self.possible_hits.sum()) * len(self.hits)
        return round6(float(self.hits.sum(dtype=np.int64)) / possible) if possible else 0.0

    @property
    def eviction_calls(self) -> int:
        """How often a policy was asked to evict, summed over rows."""
        return int(self.evictions.sum())

    @property
    def mass_by_row(self) -> Float64[np.ndarray, " rows"]:
        """Retained attention mass of each row, unrounded."""
        return self.mass.mean(axis=1)

    @property
    def recall_by_row(self) -> Float64[np.ndarray, " rows"]:
        """Heavy-hitter recall of each row, unrounded."""
        return self.hits.sum(axis=1, dtype=np.int64) / self.possible_hits.sum()

    def kept(self, step: int, row: int = 0) -> Int64[np.ndarray, " held"]:
        """The positions that a row holds after that step, ascending; after step 0 it is position 0 alone."""
        positions = np.arange(self.tokens)
        return positions[(positions <= step) & (self.left[row] > step)]


def replay(trace: Trace, choice: str | Policy[Any], *, chunk_bytes: int = CHUNK_BYTES, **parameters: Any) -> Replay:
    """Replay one policy, by name with parameters such as `budget=512`, or ready made.

    Raises what `policy` raises for a name or value that cannot be used, InputFileError for weights that are no
    weights, PolicyFault for a policy that breaks the contract.
    """
    return replay_all(trace, [policy(choice, **parameters)], chunk_bytes=chunk_bytes)[0]


def replay_all(trace: Trace, policies: Sequence[Policy[Any]], *, chunk_bytes: int = CHUNK_BYTES) -> list[Replay]:
    """Replay every policy in one pass over the trace, in the order given."""
    runs = [open_run(trace, each) for each in policies]
    for chunk in trace.chunks(chunk_bytes):
        check(trace, chunk)
        heavy = heavy_hitters(chunk)
        for run in runs:
            run.advance(chunk, heavy)
    return [run.result() for run in runs]


def check(trace: Trace, chunk: Chunk) -> None:
    """Raises InputFileError for a weight that is negative, NaN or infinite, naming row and step."""
    for step_ in chunk.steps:
        weights = chunk.weights[:, step_ - chunk.first, : step_ + 1]
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            row, position = (int(index) for index in np.argwhere(bad)[0])
            raise InputFileError(
                f"{trace.name}: the weight of position {position} is {weights[row, position]} at row {row}, step "
                f"{step_}; attention weights are finite and not negative"
            )


def heavy_hitters(chunk: Chunk) -> Int32[np.ndarray, "rows steps heavy"]:
    """The positions of each step's largest weights, its own left out, of equals the lowest; -1 past the end."""
    rows, steps, _ = chunk.weights.shape
    top = np.full((rows, steps, HEAVY_HITTERS), -1, dtype=np.int32)
    for index, step_ in enumerate(chunk.steps):
        count = min(HEAVY_HITTERS, step_)
        top[:, index, :count] = np.argsort(-chunk.weights[:, index, :step_], axis=1, kind="stable")[:, :count]
    return top


class Run(ABC):
    """One policy on its way through a trace."""

    @abstractmethod
    def advance(self, chunk: Chunk, heavy: Int32[np.ndarray, "rows steps heavy"]) -> None:
        """Take the next steps; `heavy` as `heavy_hitters` gives it."""

    @abstractmethod
    def result(self) -> Replay:
        """What came out, after the last chunk."""


def open_run(trace: Trace, choice: Policy[Any]) -> Run:
    """The run that suits the policy."""
    return RuleRun(trace, choice)


class RuleRun(Run):
    """Any policy, by its rule: all rows of a layer in step with one another. Slow and general."""

    def __init__(self, trace: Trace, choice: Policy[Any]) -> None:
        self._trace, self._policy = trace, choice
        shape = (trace.rows, trace.steps)
        self._mass, self._hits = np.zeros(shape), np.zeros(shape, dtype=np.int32)
        self._evictions = np.zeros(trace.rows, dtype=np.int64)
        self._left = np.full((trace.rows, trace.tokens), trace.tokens, dtype=np.int32)
        layers = trace.layers
        self._parts = [
            _Part(choice.at_layer(depth, len(layers)), [i for i, head in enumerate(trace.heads) if head.layer == layer])
            for depth, layer in enumerate(layers)
        ]

    def advance(self, chunk: Chunk, heavy: Int32[np.ndarray, "rows steps heavy"]) -> None:
        for part in self._parts:
            for index, step_ in enumerate(chunk.steps):
                weights, top = chunk.weights[part.rows, index], heavy[part.rows, index]
                self._step(part, step_, weights, top)

    def _step(self, part: _Part, now: int, weights: np.ndarray, top: np.ndarray) -> None:
        rows, positions = part.rows, part.slots.positions
        shown = np.take_along_axis(weights, positions, axis=1)
        self._mass[rows, now - 1] = shown.sum(axis=1, dtype=np.float64) + weights[:, now]
        held = (self._left[rows] == self._trace.tokens) & (np.arange(self._trace.tokens) < now)
        self._hits[rows, now - 1] = (np.take_along_axis(held, np.maximum(top, 0), axis=1) & (top >= 0)).sum(axis=1)
        part.slots = step(part.policy.signal, part.slots, now, shown)
        if part.slots.positions.shape[1] <= part.policy.budget:
            return
        self._evictions[rows] += 1
        victims = part.policy.victims(part.slots, part.policy.budget)
        self._check(part, now, victims)
        before = part.slots.positions
        part.slots = drop(part.policy.signal, part.slots, victims)
        for row, gone in zip(rows, victims, strict=True):
            self._left[row, before[rows.index(row)][gone]] = now

    def _check(self, part: _Part, now: int, victims: Bool[np.ndarray, "rows slots"]) -> None:
        left = victims.shape[1] - int(victims.sum(axis=1).min())
        if left > part.policy.budget:
            raise PolicyFault(
                f"{part.policy.name}: {left} positions are held after the eviction of step {now}, the budget is "
                f"{part.policy.budget}"
            )

    def result(self) -> Replay:
        return Replay(
            policy=self._policy,
            trace=self._trace.name,
            tokens=self._trace.tokens,
            mass=self._mass,
            hits=self._hits,
            evictions=self._evictions,
            left=self._left,
        )


class _Part:
    """The rows of one layer, which share a policy and their number of slots."""

    def __init__(self, choice: Policy[Any], rows: list[int]) -> None:
        if choice.budget < 1:
            raise BudgetError(f"{choice.name}: budget must be at least 1 token, got {choice.budget}")
        self.policy, self.rows = choice, rows
        self.slots = start(choice.signal, len(rows))
