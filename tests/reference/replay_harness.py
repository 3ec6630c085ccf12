"""The slow twin of the replay: the harness and the two metrics of the specification, one row, one step at a time.

The fast paths (`headwater.traces`)                   This path
1. chunks of all rows, one pass for all policies       1. a list of steps, one pass for each policy
2. heavy hitters by a threshold                        2. a stable sort of the whole step
3. kernels, closed forms, or rules over rows           3. the objects of `replay_policies`

This is the straightforward NumPy loop that `python -m bench.replay` compares with. Verified by all 63 published figures
of the grid (`tests/traces/test_twin.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference.replay_policies import POLICIES, Policy
from tests.reference.replay_trace import decode_trace

BUDGETS = (256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy did: figures of each step, and after which step each position left (`tokens` if never)."""

    mass: list[float]
    hits: list[int]
    evictions: int
    left: list[int]
    policy: Policy

    @property
    def retained_attention_mass(self) -> float:
        return round6(sum(self.mass) / len(self.mass)) if self.mass else 0.0

    @property
    def heavy_hitter_recall(self) -> float:
        possible = sum(min(32, t) for t in range(1, len(self.hits) + 1))
        return round6(sum(self.hits) / possible) if possible else 0.0


def round6(x: float) -> float:
    return math.floor(x * 1e6 + 0.5) / 1e6


def heavy_hitters(w: NDArray[np.float32]) -> NDArray[np.int64]:
    """The positions of the 32 largest weights, of equals the lowest."""
    return np.argsort(-w, kind="stable")[:32]


def replay(
    steps: Sequence[NDArray[np.float32]],
    heavy: Sequence[NDArray[np.int64]],
    policy: Policy,
    budget: int,
    own: Sequence[float] | None = None,
) -> Outcome:
    """`steps[t - 1]` holds the weights of positions `0..t-1`, `heavy` its heavy hitters, `own` what it pays itself."""
    tokens = len(steps) + 1
    kept = np.zeros(tokens, dtype=bool)
    kept[0] = True
    mass, hits, evictions, left = [], [], 0, [tokens] * tokens
    for t, (w, top) in enumerate(zip(steps, heavy, strict=True), start=1):
        attn = w[kept[:t]]
        mass.append(float(np.cumsum(attn, dtype=np.float64)[-1]) + (float(own[t - 1]) if own else 0.0))
        hits.append(int(np.count_nonzero(kept[top])))
        policy.on_decode_step(t, attn)
        kept[t] = True
        if policy.kept_count() > budget:
            evictions += 1
            for victim in policy.evict(budget):
                if not kept[victim]:
                    raise ValueError(f"{policy.name} gave back {victim} at step {t}, which it does not hold")
                kept[victim] = False
                left[victim] = t
            if policy.kept_count() > budget:
                raise ValueError(f"{policy.name} holds more than {budget} after step {t}")
    return Outcome(mass=mass, hits=hits, evictions=evictions, left=left, policy=policy)


def grid() -> dict[str, dict[int, Outcome]]:
    """The seven policies at the three canonical budgets over the canonical trace, which is made once."""
    steps = list(decode_trace())
    heavy = [heavy_hitters(w) for w in steps]
    return {
        name: {budget: replay(steps, heavy, kind(budget=budget), budget) for budget in BUDGETS}
        for name, kind in POLICIES.items()
    }
