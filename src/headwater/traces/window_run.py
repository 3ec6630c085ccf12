"""A replay in closed form, for policies that keep the head of the stream and its most recent tokens.

Knows that their kept sets follow from the step alone, so that the mass is a difference of two running sums. All such
policies of one pass share the running sums, which makes a sweep over many budgets cost little more than one. The kept
sets, hits and evictions are exactly those of the rule. The mass is the same sum in another order, so it can differ by
rounding, about 1e-15 of the step's total; on the canonical trace, where every sum is exact, it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from headwater.errors import BudgetError, UnsupportedCall
from headwater.policies import Policy
from headwater.traces.result import CLOSED_FORM, HEAVY_HITTERS, Replay, Tally
from headwater.traces.run import Heavy, Run, layer_of, pieces
from headwater.traces.trace import Chunk, Trace

_IN_MEMORY = 1 << 18
"""How many running sums, and comparisons with heavy hitters, are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is kept before step `t`: positions below `pins`, and those from `t - recent` on."""

    pins: int
    recent: int


def spans_of(trace: Trace, choice: Policy[Any]) -> list[Span] | None:
    """What the policy keeps at each layer, or None when at one of them that is no matter of position alone.

    Raises BudgetError for a policy that keeps everything and has no room for the whole trace.
    """
    depths = range(len(trace.layers))
    spans = [_span(trace, choice.at_layer(depth, len(depths))) for depth in depths]
    return None if None in spans else [span for span in spans if span is not None]


def _span(trace: Trace, choice: Policy[Any]) -> Span | None:
    if choice.needs:
        return None
    try:
        if choice.window() is not None:
            window = choice.window(block=1)
            return None if window is None else Span(pins=window.pins, recent=window.recent)
    except UnsupportedCall:
        return None
    if choice.budget < trace.tokens:
        raise BudgetError(
            f"{choice.name} keeps every token, so its budget must be at least the {trace.tokens} tokens of "
            f"{trace.name}, got {choice.budget}"
        )
    return Span(pins=0, recent=trace.tokens)


class WindowRun(Run):
    """Any number of such policies at once, many small parts."""

    def __init__(self, trace: Trace, policies: Sequence[Policy[Any]], spans: Sequence[Sequence[Span]]) -> None:
        self.parts = pieces(trace, by_layer=any(len(set(layers)) > 1 for layers in spans))
        self._policies, self._tallies = policies, [Tally(trace) for _ in policies]
        self._pins: list[Int64[np.ndarray, "policies 1"]] = []
        self._recent: list[Int64[np.ndarray, "policies 1"]] = []
        positions = np.arange(trace.tokens)
        for rows in self.parts:
            here = [layers[layer_of(trace, rows)] for layers in spans]
            self._pins.append(np.array([[span.pins] for span in here]))
            self._recent.append(np.array([[span.recent] for span in here]))
            for span, tally in zip(here, self._tallies, strict=True):
                tally.left[rows, span.pins :] = np.minimum(positions[span.pins :] + span.recent, trace.tokens)
                tally.evictions[rows] = max(0, trace.tokens - span.pins - span.recent)

    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        count = max(1, _IN_MEMORY // max(chunk.weights.shape[2], len(self._policies) * HEAVY_HITTERS))
        for row in range(self.parts[part].start, self.parts[part].stop):
            for start in range(0, len(chunk.steps), count):
                block = slice(start, start + count)
                steps, weights, top = chunk.steps[block], chunk.weights[row, block], heavy[row, block]
                mass, hits = _measure(steps, weights, top, self._pins[part], self._recent[part])
                for index, tally in enumerate(self._tallies):
                    tally.mass[row, steps.start - 1 : steps.stop - 1] = mass[index]
                    tally.hits[row, steps.start - 1 : steps.stop - 1] = hits[index]

    def results(self) -> list[Replay]:
        return [tally.replay(policy, CLOSED_FORM) for policy, tally in zip(self._policies, self._tallies, strict=True)]


def _measure(
    steps: range,
    weights: Float32[np.ndarray, "steps positions"],
    heavy: Int32[np.ndarray, "steps heavy"],
    pins: Int64[np.ndarray, "policies 1"],
    recent: Int64[np.ndarray, "policies 1"],
) -> tuple[Float64[np.ndarray, "policies steps"], Int64[np.ndarray, "policies steps"]]:
    """Mass and hits of consecutive steps of one row. What lies between the pins and the window was evicted."""
    running = np.zeros((weights.shape[0], weights.shape[1] + 1))
    # Beyond a step's own position there may be anything, which is summed and then not read.
    with np.errstate(all="ignore"):
        np.cumsum(weights, axis=1, dtype=np.float64, out=running[:, 1:])
    now, index = np.array(steps), np.arange(len(steps))
    first = np.minimum(pins, now)
    window = np.maximum(now - recent, first)
    mass = running[index, now + 1] - (running[index, window] - running[index, first])
    top = np.ascontiguousarray(heavy.T)
    gone = (top >= first[:, None]) & (top < window[:, None])
    return mass, np.minimum(HEAVY_HITTERS, now) - gone.sum(axis=1, dtype=np.int32)
