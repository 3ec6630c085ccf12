"""The slow twin of the policies: the seven of the specification as one object each, one row, one step at a time.

The fast paths (`headwater.policies`, `headwater.traces`)   This path
1. a rule over a signal, all rows at once                   1. one object that remembers and decides for one row
2. state passed in and returned, or packed for kernels      2. NumPy arrays that grow by append, shrink by delete
3. victims by a mask, or the first of the lowest            3. a stable sort of the candidates, argmin for one victim

Written from the specification alone, in its incremental contract. Verified by the published conformance cases, and by
the published figures of the grid (`tests/traces/test_twin.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Attention = Sequence[float] | NDArray[np.float32] | None


class SlidingWindow:
    def __init__(self, budget: int = 512) -> None:
        self.name, self.budget, self.capacity = "sliding-window", budget, budget + 1
        self.positions = [0]

    def on_decode_step(self, pos: int, attn: Attention) -> None:
        make_room(self, len(self.positions))
        self.positions.append(pos)

    def evict(self, budget: int) -> list[int]:
        gone = self.positions[: max(0, len(self.positions) - budget)]
        del self.positions[: len(gone)]
        return gone

    def kept_count(self) -> int:
        return len(self.positions)


class StreamingLLM:
    def __init__(self, budget: int = 512, sinks: int = 4) -> None:
        self.name, self.budget, self.capacity, self.sinks = "streaming-llm", budget, budget + 1, sinks
        self.pinned, self.window = ([0], []) if sinks > 0 else ([], [0])

    def on_decode_step(self, pos: int, attn: Attention) -> None:
        make_room(self, self.kept_count())
        (self.pinned if pos < self.sinks else self.window).append(pos)

    def evict(self, budget: int) -> list[int]:
        gone = self.window[: max(0, self.kept_count() - budget)]
        del self.window[: len(gone)]
        return gone

    def kept_count(self) -> int:
        return len(self.pinned) + len(self.window)

    def sink_count(self) -> int:
        return len(self.pinned)


class Scoring:
    """What the scoring policies share: parallel arrays in ascending position order, and the choice of the lowest.

    `sinks` is no part of the specification: positions below it are no candidates. Off by default, as everywhere.
    """

    def __init__(self, name: str, budget: int, sinks: int, recent_window: int) -> None:
        self.name, self.budget, self.capacity = name, budget, budget + 1
        self.sinks, self.recent_window = sinks, recent_window
        self.positions: NDArray[np.int64] = np.array([0])

    def on_decode_step(self, pos: int, attn: Attention) -> None:
        make_room(self, len(self.positions))
        if attn is not None:
            weights = np.asarray(attn, dtype=np.float32)[: len(self.positions)]
            self.observe(weights)
        self.positions = np.append(self.positions, pos)
        self.append()

    def evict(self, budget: int) -> list[int]:
        needed = len(self.positions) - budget
        candidates = np.flatnonzero(self.candidates() & (self.positions >= self.sinks))
        if needed <= 0 or not len(candidates):
            return []
        scores = self.scores()[candidates]
        chosen = [np.argmin(scores)] if needed == 1 else np.argsort(scores, kind="stable")[:needed]
        victims = np.sort(candidates[chosen])
        gone = self.positions[victims].tolist()
        self.positions = np.delete(self.positions, victims)
        self.drop(victims)
        return gone

    def candidates(self) -> NDArray[np.bool_]:
        held = len(self.positions)
        return np.arange(held) < held - min(self.recent_window, held)

    def kept_count(self) -> int:
        return len(self.positions)

    def slot(self, pos: int) -> int | None:
        found = np.flatnonzero(self.positions == pos)
        return int(found[0]) if len(found) else None

    def observe(self, weights: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def append(self) -> None:
        raise NotImplementedError

    def drop(self, victims: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def scores(self) -> NDArray[np.float64]:
        raise NotImplementedError


class H2O(Scoring):
    def __init__(self, budget: int = 512, recent_window: int = 32, sinks: int = 0) -> None:
        super().__init__("h2o", budget, sinks, recent_window)
        self.score = np.zeros(1)

    def observe(self, weights: NDArray[np.float32]) -> None:
        self.score[: len(weights)] += weights

    def append(self) -> None:
        self.score = np.append(self.score, 0.0)

    def drop(self, victims: NDArray[np.int64]) -> None:
        self.score = np.delete(self.score, victims)

    def scores(self) -> NDArray[np.float64]:
        return self.score

    def score_of(self, pos: int) -> float:
        slot = self.slot(pos)
        return -1 if slot is None else float(self.score[slot])


class Scissorhands(Scoring):
    def __init__(self, budget: int = 512, recent_window: int = 32, sinks: int = 0) -> None:
        super().__init__("scissorhands", budget, sinks, recent_window)
        self.votes = np.zeros(1, dtype=np.int64)

    def observe(self, weights: NDArray[np.float32]) -> None:
        if len(weights):
            self.votes[: len(weights)] += weights.astype(np.float64) > 1 / len(weights)

    def append(self) -> None:
        self.votes = np.append(self.votes, 0)

    def drop(self, victims: NDArray[np.int64]) -> None:
        self.votes = np.delete(self.votes, victims)

    def scores(self) -> NDArray[np.float64]:
        return self.votes.astype(np.float64)

    def votes_of(self, pos: int) -> int:
        slot = self.slot(pos)
        return -1 if slot is None else int(self.votes[slot])


class Tova(Scoring):
    def __init__(self, budget: int = 512, sinks: int = 0) -> None:
        super().__init__("tova", budget, sinks, 0)
        self.last = np.full(1, -1.0)

    def observe(self, weights: NDArray[np.float32]) -> None:
        self.last[: len(weights)] = weights

    def append(self) -> None:
        self.last = np.append(self.last, -1.0)

    def drop(self, victims: NDArray[np.int64]) -> None:
        self.last = np.delete(self.last, victims)

    def candidates(self) -> NDArray[np.bool_]:
        return self.last != -1

    def scores(self) -> NDArray[np.float64]:
        return self.last

    def last_attention_of(self, pos: int) -> float:
        slot = self.slot(pos)
        return -1 if slot is None else float(self.last[slot])


class SnapKV(Scoring):
    def __init__(
        self,
        budget: int = 512,
        recent_window: int = 32,
        obs_window: int = 16,
        pool_kernel: int = 7,
        sinks: int = 0,
        name: str = "snapkv",
    ) -> None:
        super().__init__(name, budget, sinks, recent_window)
        self.obs_window, self.reach = obs_window, (pool_kernel - 1) // 2
        self.ring = np.zeros((obs_window, 1), dtype=np.float32)
        self.index = 0

    def observe(self, weights: NDArray[np.float32]) -> None:
        self.ring[self.index, : len(weights)] = weights
        self.index = (self.index + 1) % self.obs_window

    def append(self) -> None:
        self.ring = np.append(self.ring, np.zeros((self.obs_window, 1), dtype=np.float32), axis=1)

    def drop(self, victims: NDArray[np.int64]) -> None:
        self.ring = np.delete(self.ring, victims, axis=1)

    def sums(self) -> NDArray[np.float64]:
        # Along the first axis NumPy adds one ring slot after the other, which is the order asked for.
        return self.ring.sum(axis=0, dtype=np.float64)

    def scores(self) -> NDArray[np.float64]:
        padded = np.full(len(self.positions) + 2 * self.reach, -np.inf)
        padded[self.reach : self.reach + len(self.positions)] = self.sums()
        return np.lib.stride_tricks.sliding_window_view(padded, 2 * self.reach + 1).max(axis=1)

    def window_score_of(self, pos: int) -> float:
        slot = self.slot(pos)
        return -1 if slot is None else float(self.sums()[slot])


class PyramidKV(SnapKV):
    def __init__(
        self,
        budget: int = 512,
        layer: int = 0,
        num_layers: int = 1,
        pyramid_ratio: int = 4,
        recent_window: int = 32,
        obs_window: int = 16,
        pool_kernel: int = 7,
        sinks: int = 0,
    ) -> None:
        super().__init__(budget, recent_window, obs_window, pool_kernel, sinks, name="pyramidkv")
        gaps, ratio = num_layers - 1, pyramid_ratio
        share = budget
        if num_layers > 1:
            share = (2 * budget * (ratio * gaps - layer * (ratio - 1))) // ((ratio + 1) * gaps)
        self.effective = max(share, sinks + recent_window + 1)
        self.capacity = max(budget, self.effective) + 1

    def evict(self, budget: int) -> list[int]:
        return super().evict(min(budget, self.effective))

    def effective_budget(self) -> int:
        return self.effective


Policy = SlidingWindow | StreamingLLM | Scoring

POLICIES: dict[str, type[SlidingWindow | StreamingLLM | H2O | Scissorhands | Tova | SnapKV | PyramidKV]] = {
    "sliding-window": SlidingWindow,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "tova": Tova,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
}


def make_room(policy: Policy, held: int) -> None:
    """Raises RuntimeError when the policy has no room for one more."""
    if held + 1 > policy.capacity:
        raise RuntimeError(f"{policy.name} was built for a budget of {policy.budget}")
