"""What came out of a replay, and the arrays it is gathered in.

Knows figures per row and step, and the metrics of the specification. Does not know how they were computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32, Int64

from headwater.policies import Policy
from headwater.traces.trace import Trace

HEAVY_HITTERS = 32
"""How many of a step's largest weights count as heavy hitters."""

RULE, COMPILED, CLOSED_FORM = "rule", "compiled", "closed form"
"""The ways of computing a replay: by the policy's own rule, by a kernel, by arithmetic on positions."""


def round6(value: float) -> float:
    """To six decimals, half up."""
    return math.floor(value * 1e6 + 0.5) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one policy did with a trace. Figures are over all rows unless they say otherwise.

    `mass` is the attention that fell on kept positions, the step's own included; `hits` counts the heavy hitters that
    were kept; both have a column per step, from step 1 on. `left[row, p]` is the step after which position `p` was
    evicted, or `tokens` if it never was: the kept set of every step is in it. `way` says how it was computed: by the
    policy's own `rule`, `compiled`, or in `closed form`; the figures are the same.
    """

    policy: Policy[Any]
    trace: str
    tokens: int
    mass: Float64[np.ndarray, "rows steps"]
    hits: Int32[np.ndarray, "rows steps"]
    evictions: Int64[np.ndarray, " rows"]
    left: Int32[np.ndarray, "rows positions"]
    way: str = RULE

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
        """Retained attention mass of each row, unrounded; zeros without a step."""
        return self.mass.sum(axis=1) / max(1, self.mass.shape[1])

    @property
    def recall_by_row(self) -> Float64[np.ndarray, " rows"]:
        """Heavy-hitter recall of each row, unrounded; zeros without a step."""
        return self.hits.sum(axis=1, dtype=np.int64) / max(1, int(self.possible_hits.sum()))

    def kept(self, step: int, row: int = 0) -> Int64[np.ndarray, " held"]:
        """The positions that a row holds after that step, ascending; after step 0 it is position 0 alone."""
        positions = np.arange(self.tokens)
        return positions[(positions <= step) & (self.left[row] > step)]


class Tally:
    """The arrays of a replay on its way, all rows and steps; nothing has left yet."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.tokens = trace.name, trace.tokens
        self.mass: Float64[np.ndarray, "rows steps"] = np.zeros((trace.rows, trace.steps))
        self.hits: Int32[np.ndarray, "rows steps"] = np.zeros((trace.rows, trace.steps), dtype=np.int32)
        self.evictions: Int64[np.ndarray, " rows"] = np.zeros(trace.rows, dtype=np.int64)
        self.left: Int32[np.ndarray, "rows positions"] = np.full(
            (trace.rows, trace.tokens), trace.tokens, dtype=np.int32
        )

    def replay(self, policy: Policy[Any], way: str) -> Replay:
        """What was gathered."""
        return Replay(
            policy=policy,
            trace=self.trace,
            tokens=self.tokens,
            mass=self.mass,
            hits=self.hits,
            evictions=self.evictions,
            left=self.left,
            way=way,
        )
