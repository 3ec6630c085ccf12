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

from headwater.errors import BudgetError, UnsupportedCall
from headwater.policies import Policy
from headwater.traces.result import CLOSED_FORM, Replay, Tally
from headwater.traces.run import Heavy, Run, small_parts
from headwater.traces.trace import Chunk, Trace

_BLOCK_WEIGHTS = 1 << 18
"""How many running sums are in memory at a time."""


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
        self.parts = small_parts(trace)
        self._policies, self._tallies = policies, [Tally(trace) for _ in policies]
        positions = np.arange(trace.tokens)
        self._of_part: list[list[Span]] = []
        for rows in self.parts:
            depth = trace.layers.index(trace.heads[rows.start].layer)
            self._of_part.append([layers[depth] for layers in spans])
            for span, tally in zip(self._of_part[-1], self._tallies, strict=True):
                tally.left[rows, span.pins :] = np.minimum(positions[span.pins :] + span.recent, trace.tokens)
                tally.evictions[rows] = max(0, trace.tokens - span.pins - span.recent)

    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        steps = max(1, _BLOCK_WEIGHTS // chunk.weights.shape[2])
        for row in range(self.parts[part].start, self.parts[part].stop):
            for start in range(0, len(chunk.steps), steps):
                block = slice(start, start + steps)
                now = np.array(chunk.steps[block])
                self._advance(part, row, now, _running(chunk.weights[row, block]), heavy[row, block])

    def _advance(self, part: int, row: int, now: np.ndarray, running: np.ndarray, heavy: np.ndarray) -> None:
        index = np.arange(len(now))
        everything, hits = running[index, now + 1], np.minimum(heavy.shape[1], now)
        for span, tally in zip(self._of_part[part], self._tallies, strict=True):
            pins = np.minimum(span.pins, now)
            # What lies between the pins and the window was evicted.
            window = np.maximum(now - span.recent, pins)
            gone = (heavy >= pins[:, None]) & (heavy < window[:, None])
            tally.mass[row, now - 1] = everything - (running[index, window] - running[index, pins])
            tally.hits[row, now - 1] = hits - gone.sum(axis=1)

    def results(self) -> list[Replay]:
        return [tally.replay(policy, CLOSED_FORM) for policy, tally in zip(self._policies, self._tallies, strict=True)]


def _running(weights: np.ndarray) -> np.ndarray:
    """`running[i, p]` is the sum of the first `p` weights of step `i`."""
    running = np.zeros((weights.shape[0], weights.shape[1] + 1))
    # What lies beyond a step's own position may be anything, and is not read afterwards.
    with np.errstate(all="ignore"):
        np.cumsum(weights, axis=1, dtype=np.float64, out=running[:, 1:])
    return running
