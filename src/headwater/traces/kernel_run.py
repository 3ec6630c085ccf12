"""A replay by a compiled kernel, for the policies of this library that rank positions.

Knows what each policy comes down to in the words of `kernels`. A policy is known by its exact class: one that was
derived from it goes by its own rule. Needs numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headwater.errors import PolicyFault
from headwater.policies import H2O, Policy, PyramidKV, Random, Scissorhands, SnapKV, Tova
from headwater.policies.pooled_history import PooledHistory
from headwater.policies.protection import WithSinks
from headwater.traces import kernels
from headwater.traces.result import COMPILED, Replay, Tally
from headwater.traces.run import Heavy, Run, layer_of, pieces
from headwater.traces.trace import Chunk, Trace


class KernelRun(Run):
    """A policy that has a kernel, many small parts."""

    def __init__(self, trace: Trace, choice: Policy[Any], rules: list[kernels.Rule]) -> None:
        self.parts = pieces(trace, by_layer=len(set(rules)) > 1)
        self._policy, self._tally = choice, Tally(trace)
        self._rules = [rules[layer_of(trace, rows)] for rows in self.parts]
        self._held = [
            _nothing_held(rule, rows, trace.tokens) for rule, rows in zip(self._rules, self.parts, strict=True)
        ]

    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        rows, tally, rule = self.parts[part], self._tally, self._rules[part]
        figures = kernels.Figures(tally.mass[rows], tally.hits[rows], tally.evictions[rows], tally.left[rows])
        fault = kernels.advance(rule, self._held[part], figures, chunk.weights[rows], chunk.first, heavy[rows])
        if fault:
            raise PolicyFault(f"{self._policy.name}: the budget of {rule.budget} was missed at step {fault}")

    def results(self) -> list[Replay]:
        return [self._tally.replay(self._policy, COMPILED)]


def open_kernel_run(trace: Trace, choice: Policy[Any]) -> KernelRun | None:
    """The run of the policy, or None when it has no kernel at one of the trace's layers."""
    layers = [choice.at_layer(depth, len(trace.layers)) for depth in range(len(trace.layers))]
    if any(type(each) not in _RULES for each in layers):
        return None
    return KernelRun(trace, choice, [_RULES[type(each)](each) for each in layers])


def _nothing_held(rule: kernels.Rule, rows: slice, tokens: int) -> kernels.Held:
    """Every row holds position 0, and has room for what is held between a step and its eviction."""
    count, slots = rows.stop - rows.start, min(rule.budget, tokens) + 1
    return kernels.Held(
        counts=np.ones(count, dtype=np.int64),
        positions=np.zeros((count, slots), dtype=np.int32),
        scores=np.zeros((count, slots)),
        rings=np.zeros((count, min(rule.steps, tokens), slots), dtype=np.float32),
    )


def _rule(
    score: int, choice: WithSinks[Any], *, recent: int = 0, steps: int = 0, reach: int = 0, seed: int = 0
) -> kernels.Rule:
    return kernels.Rule(
        score=score,
        budget=choice.budget,
        target=choice.target(choice.budget),
        sinks=choice.sinks,
        recent=recent,
        steps=steps,
        reach=reach,
        seed=np.uint64(seed),
    )


def _pooled(choice: PooledHistory) -> kernels.Rule:
    return _rule(
        kernels.POOLED,
        choice,
        recent=choice.recent_window,
        steps=choice.obs_window,
        reach=choice.pool_kernel // 2,
    )


_RULES: dict[type[Policy[Any]], Callable[[Any], kernels.Rule]] = {
    H2O: lambda choice: _rule(kernels.SUMS, choice, recent=choice.recent_window),
    Scissorhands: lambda choice: _rule(kernels.VOTES, choice, recent=choice.recent_window),
    # Every step of a trace shows its weights, so the newest position is the one that was never observed.
    Tova: lambda choice: _rule(kernels.LATEST, choice, recent=1),
    SnapKV: _pooled,
    PyramidKV: _pooled,
    Random: lambda choice: _rule(kernels.HASH, choice, seed=choice.seed),
}
