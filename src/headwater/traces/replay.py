"""Replaying policies over a trace: what each would have kept, and how much attention that was worth.

Knows which way of computing suits a policy, and that many policies share one pass over the trace. Does not know where
the weights come from, nor any rule.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from headwater.policies import Policy, policy
from headwater.traces import heavy as plain
from headwater.traces.incremental_run import IncrementalPolicy, IncrementalRun
from headwater.traces.result import HEAVY_HITTERS, Replay
from headwater.traces.rule_run import RuleRun
from headwater.traces.run import Heavy, Run, pieces
from headwater.traces.trace import CHUNK_BYTES, Chunk, Trace
from headwater.traces.window_run import WindowRun, spans_of

__all__ = ["Replay", "replay", "replay_all", "replay_incremental"]

FindHeavy = Callable[[np.ndarray, int, np.ndarray], tuple[int, int]]
Item = TypeVar("Item")
OpenKernel = Callable[[Trace, Policy[Any]], Run | None]


def replay(trace: Trace, choice: str | Policy[Any], *, chunk_bytes: int = CHUNK_BYTES, **parameters: Any) -> Replay:
    """Replay one policy, by name with parameters such as `budget=512`, or ready made.

    Raises what `policy` raises for a name or value that cannot be used, BudgetError for `full` without room for the
    whole trace, InputFileError for weights that are negative, NaN or infinite, PolicyFault for a policy that breaks the
    contract.
    """
    return replay_all(trace, [policy(choice, **parameters)], chunk_bytes=chunk_bytes)[0]


def replay_all(
    trace: Trace, policies: Sequence[Policy[Any]], *, chunk_bytes: int = CHUNK_BYTES, by_rule: bool = False
) -> list[Replay]:
    """Replay every policy in one pass over the trace, in the order given.

    The work is shared among as many threads as there are processors. `by_rule` takes every policy by its own rule,
    however slow, to compare the other ways with. Raises as `replay` does.
    """
    spans = [spans_of(trace, each) for each in policies]
    find, open_kernel = (plain.find_heavy, _no_kernel) if by_rule else _compiled()
    closed = [] if by_rule else [index for index, each in enumerate(spans) if each is not None]
    runs = dict[tuple[int, ...], Run]()
    for index, each in enumerate(policies):
        if index not in closed:
            runs[(index,)] = open_kernel(trace, each) or RuleRun(trace, each)
    if closed:
        runs[tuple(closed)] = WindowRun(
            trace, [policies[index] for index in closed], [spans[index] or [] for index in closed]
        )
    _drive(trace, list(runs.values()), find, chunk_bytes)
    results = dict[int, Replay]()
    for indices, run in runs.items():
        results.update(zip(indices, run.results(), strict=True))
    return [results[index] for index in range(len(policies))]


def replay_incremental(
    trace: Trace,
    make: Callable[[], IncrementalPolicy],
    *,
    budget: int,
    name: str = "incremental",
    chunk_bytes: int = CHUNK_BYTES,
) -> Replay:
    """Replay objects of the incremental contract: `make` is called once for each row of the trace.

    `budget` is what they are asked to evict to, whenever more is held. Raises BudgetError for a budget that is none,
    InputFileError as `replay` does, PolicyFault for a victim that is no position, not held or given twice, a missed
    budget, or a wrong count.
    """
    run = IncrementalRun(trace, make, budget=budget, name=name)
    _drive(trace, [run], _compiled()[0], chunk_bytes)
    return run.results()[0]


def _compiled() -> tuple[FindHeavy, OpenKernel]:
    """The compiled ways, or what stands in for them without numba."""
    try:
        from headwater.traces.kernel_run import open_kernel_run
        from headwater.traces.kernels import find_heavy
    except ModuleNotFoundError as missing:
        if missing.name != "numba":
            raise
        return plain.find_heavy, _no_kernel
    return find_heavy, open_kernel_run


def _no_kernel(trace: Trace, choice: Policy[Any]) -> None:
    return None


def _drive(trace: Trace, runs: Sequence[Run], find: FindHeavy, chunk_bytes: int) -> None:
    """Take the runs through the trace, chunk by chunk."""
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        for chunk in trace.chunks(chunk_bytes):
            _advance(trace, runs, chunk, find, pool)
            # If it were still named while the next one is read, it would be in memory with it.
            del chunk


def _advance(trace: Trace, runs: Sequence[Run], given: Chunk, find: FindHeavy, pool: ThreadPoolExecutor) -> None:
    """Take the runs through one chunk, as many parts at the same time as there are threads."""
    chunk = Chunk(first=given.first, weights=np.ascontiguousarray(given.weights, dtype=np.float32))
    heavy: Heavy = np.empty((*chunk.weights.shape[:2], HEAVY_HITTERS), dtype=np.int32)
    bad = list[tuple[int, int]]()

    def look(rows: slice) -> None:
        row, index = find(chunk.weights[rows], chunk.first, heavy[rows])
        if index >= 0:
            bad.append((rows.start + row, index))

    def advance(job: tuple[Run, int]) -> None:
        run, part = job
        run.advance(part, chunk, heavy)

    _share(look, pieces(trace, by_layer=False), pool)
    if bad:
        raise plain.not_a_weight(trace.name, chunk, *min(bad))
    _share(advance, [(run, part) for run in runs for part in range(len(run.parts))], pool)


def _share(work: Callable[[Item], None], items: Iterable[Item], pool: ThreadPoolExecutor) -> None:
    """Work on every item. Threads take the next one by themselves: to wake them for each would take as long as many.

    The caller works too. If it only waited, the system would often put all that it woke on one processor.
    """
    waiting = deque(items)

    def take_turns() -> None:
        while waiting:
            try:
                item = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            work(item)

    helpers = [pool.submit(take_turns) for _ in range(min(processors(), len(waiting)) - 1)]
    try:
        take_turns()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
