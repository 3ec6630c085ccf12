"""The most attention that any eviction for good can retain, found by looking at the attention to come.

Knows a whole trace at once, which no policy does. Does not know policies: what comes out is a bound for them.

Once the budget is full, one position leaves with every step. A plan says which; letting position `p` go after step `t`
costs what `p` would still be paid after `t`. The best plan is the cheapest assignment of positions to steps (see
`assignment`), so it is exact, up to the rounding of sums in float64.

What is optimal is the attention mass that a row retains over all its steps, for at most `budget` positions held after
each of them, position `t` joining at step `t`, and nothing coming back. That bounds every policy that holds no more in
that row. It does not bound `pyramidkv` over several layers, which gives some of them more than the budget. It is no
bound of the heavy-hitter recall, and says nothing of what the model would have paid had those positions been missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from headwater.errors import MissingExtra, UnsupportedCall, UsageError
from headwater.policies import Policy, Slots
from headwater.policies.signals import NoSignal
from headwater.traces.heavy import are_weights, not_a_weight
from headwater.traces.replay import processors, replay_incremental
from headwater.traces.result import Replay
from headwater.traces.trace import CHUNK_BYTES, Chunk, Head, Trace

OFFLINE = "offline optimum"
"""How such a replay was computed."""

Left = Int32[np.ndarray, " positions"]
"""The step after which each position leaves; the number of positions for those that never do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Policy[None]):
    """Stands for the plan in a `Replay`, with its budget. It has no rule that could be asked without the future."""

    name: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "what keeps the most attention, known only afterwards: the bound"
    source: ClassVar[str] = "a yardstick"

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    @property
    def state_bytes_per_slot(self) -> int:
        """Nothing that a cache could hold."""
        return 0

    def protected(self, slots: Slots[None]) -> Bool[np.ndarray, "rows slots"]:
        raise UnsupportedCall(f"{self.name} sees the attention to come, so it decides nothing step by step")


def plan(weights: Float32[np.ndarray, "steps positions"], budget: int) -> Left:
    """When each position of one row has to leave so that the most attention is retained.

    `weights[t - 1, p]` is what step `t` pays to position `p`, for `p` up to `t`, as in `Trace.whole()[row]`; what lies
    beyond is never read. Takes `8 * (tokens - budget) * tokens` bytes of memory while it runs.

    Raises UsageError for another shape, InputFileError for weights that are negative, NaN or infinite, BudgetError for
    a budget that is none, MissingExtra without numba.
    """
    if weights.ndim != 2 or weights.shape[1] != weights.shape[0] + 1:
        raise UsageError(
            f"one row is [steps, steps + 1], a row for each step from step 1 on, got {list(weights.shape)}"
        )
    whole = Chunk(first=1, weights=weights[None])
    _check_weights("weights", whole)
    kept = _Kept("weights", weights.shape[1], (Head(layer=0, head=0),), [whole])
    return _plan(kept, 0, Oracle(budget=budget).budget)


def oracle(
    trace: Trace,
    budget: int,
    *,
    rows: Sequence[int] | None = None,
    progress: Callable[[int], object] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Replay:
    """The replay of the best plan of every row, or of the rows named, each with the budget for itself.

    The rows come in ascending order; their plans go through the harness like any policy, which checks them. They are in
    memory as a whole, about `2 * rows * tokens ** 2` bytes, and what `plan` takes for as many of them at a time as
    there are processors. A row of 2,048 tokens of real attention takes about a second. `progress` is called with 1
    after each row.

    Raises UsageError for a row that there is not, and what `plan` raises.
    """
    stands = Oracle(budget=budget)
    _solver()
    kept = _keep(trace, range(trace.rows) if rows is None else rows, chunk_bytes)
    plans = list[Left]()
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        for left in pool.map(lambda row: _plan(kept, row, budget), range(kept.rows)):
            plans.append(left)
            if progress:
                progress(1)
    make = map(_Planned, plans).__next__
    found = replay_incremental(kept, make, budget=budget, name=stands.name, chunk_bytes=chunk_bytes)
    return replace(found, policy=stands, way=OFFLINE)


class _Kept(Trace):
    """Rows of a trace that stay in memory, in the chunks in which they were read."""

    def __init__(self, name: str, tokens: int, heads: tuple[Head, ...], chunks: list[Chunk]) -> None:
        self.name, self.tokens, self.heads = name, tokens, heads
        self._chunks = chunks

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        yield from self._chunks

    def backwards(self, row: int) -> Iterator[tuple[int, Float32[np.ndarray, " positions"]]]:
        """The steps of a row from the last to the first, with what each pays, its own position included."""
        for chunk in reversed(self._chunks):
            for step in reversed(chunk.steps):
                yield step, chunk.weights[row, step - chunk.first, : step + 1]


class _Planned:
    """One row that lets go of what was planned, in the incremental contract."""

    def __init__(self, left: Left) -> None:
        self._due: list[list[int]] = [[] for _ in range(len(left) + 1)]
        for position, step in enumerate(left.tolist()):
            self._due[step].append(position)
        self._now, self._held = 0, 1

    def on_decode_step(self, position: int, weights: object) -> None:
        self._now, self._held = position, self._held + 1

    def evict(self, budget: int) -> list[int]:
        self._held -= len(self._due[self._now])
        return self._due[self._now]

    def kept_count(self) -> int:
        return self._held


def _keep(trace: Trace, rows: Sequence[int], chunk_bytes: int) -> _Kept:
    if not rows:
        raise UsageError(f"no row of {trace.name} is named; leave rows out for all of them")
    for row in rows:
        if not 0 <= row < trace.rows:
            raise UsageError(f"{trace.name} has no row {row}; its rows are 0 to {trace.rows - 1}")
    if len(set(rows)) != len(rows):
        raise UsageError(f"a row is named twice in {list(rows)}; name each once")
    order, chunks = sorted(rows), list[Chunk]()
    for chunk in trace.chunks(chunk_bytes):
        _check_weights(trace.name, chunk)
        stop = chunk.steps.stop
        chunks.append(Chunk(first=chunk.first, weights=chunk.weights[order, :, :stop].astype(np.float32)))
    return _Kept(trace.name, trace.tokens, tuple(trace.heads[row] for row in order), chunks)


def _check_weights(name: str, chunk: Chunk) -> None:
    """Raises InputFileError for a value that is no weight, before sums are made of it."""
    for index, step in enumerate(chunk.steps):
        fine = are_weights(chunk.weights[:, index, : step + 1]).all(axis=1)
        if not fine.all():
            raise not_a_weight(name, chunk, int(fine.argmin()), index)


def _plan(kept: _Kept, row: int, budget: int) -> Left:
    left = np.full(kept.tokens, kept.tokens, dtype=np.int32)
    if budget < kept.tokens:
        taken, _ = _solver()(_remaining(kept, row, budget), budget)
        left[taken] = np.arange(budget, kept.tokens)
    return left


def _remaining(kept: _Kept, row: int, budget: int) -> Float64[np.ndarray, "steps positions"]:
    """What each position is still paid after every step from step `budget` on, the first that is one too many."""
    remaining = np.zeros((kept.tokens - budget, kept.tokens))
    for step, weights in kept.backwards(row):
        if step <= budget:
            break
        after = step - budget
        np.add(remaining[after, :step], weights[:step], out=remaining[after - 1, :step])
    return remaining


def _solver() -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    """The compiled solver. Raises MissingExtra without numba."""
    try:
        from headwater.traces.assignment import assign
    except ModuleNotFoundError as missing:
        if missing.name != "numba":
            raise
        raise MissingExtra("numba", "lab") from missing
    return assign
