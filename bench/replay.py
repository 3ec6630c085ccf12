"""Speed and memory of the replay, as ratios measured in one run: `python -m bench.replay`.

The canonical grid alternates with its slow twin, one budget with a sweep of 64, and every policy of the many rows with
the others; figures are medians. The bound stands beside the measurement. What recording costs comes from
`bench.recording`. The result goes to `docs/results/replay.json`, and its figures are the last line printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.clock import peak_bytes, take, timed
from bench.many_rows import ManyRows
from headwater.bench.machine import hardware, now, versions
from headwater.policies import Policy, policy
from headwater.traces import Replay, canonical_trace, kernels, replay_all
from headwater.traces.replay import processors
from headwater.traces.trace import CHUNK_BYTES
from tests.reference import replay_harness as twin

NAMES = tuple(twin.POLICIES)
SWEEP = 64
TIMED = ("tova", "h2o")
BUDGET = 256


def grid(rounds: int) -> dict[str, Any]:
    """Seconds of the seven policies at three budgets, trace and metrics included, and of the straightforward loop."""
    made = [policy(name, budget=budget) for name in NAMES for budget in twin.BUDGETS]
    ours, theirs = list[float](), list[float]()
    agree(replay_all(canonical_trace(), made), twin.grid())
    for index in range(rounds):
        ours += [timed(lambda: replay_all(canonical_trace(), made)) for _ in range(3)]
        if index % 2 == 0:
            theirs.append(timed(twin.grid))
    return {
        "grid_seconds": statistics.median(ours),
        "reference_seconds": statistics.median(theirs),
        "reference_over_grid": statistics.median(theirs) / statistics.median(ours),
        "grid_steps_per_s": len(made) * 4095 / statistics.median(ours),
        "grid_runs": [len(ours), len(theirs)],
    }


def agree(ours: Sequence[Replay], theirs: dict[str, dict[int, twin.Outcome]]) -> None:
    """Raises RuntimeError unless both sides of the comparison kept the same."""
    for out in ours:
        if out.left[0].tolist() != theirs[out.policy.name][out.policy.budget].left:
            raise RuntimeError(f"{out.policy.name} at {out.policy.budget} is not what the slow twin keeps")


def sweep(rounds: int) -> dict[str, Any]:
    """Seconds of 64 budgets of streaming-llm over those of one, in turn."""
    budgets = np.linspace(64, 4032, SWEEP).astype(int).tolist()
    one: list[Policy[Any]] = [policy("streaming-llm", budget=BUDGET)]
    many: list[Policy[Any]] = [policy("streaming-llm", budget=budget) for budget in budgets]
    seconds: dict[str, list[float]] = {"one": [], "many": []}
    for _ in range(rounds):
        seconds["one"].append(timed(lambda: replay_all(canonical_trace(), one)))
        seconds["many"].append(timed(lambda: replay_all(canonical_trace(), many)))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "sweep_64_over_1": median["many"] / median["one"],
        "sweep_seconds": median,
    }


def rows(rounds: int, tokens: int) -> dict[str, Any]:
    """Row-steps a second at budget 256 over 30 layers of 9 heads, with heavy-hitter recall and the check of weights.

    The time that the trace took to be made is left out.
    """
    trace = ManyRows(tokens=tokens)
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for _ in range(rounds):
        for name in TIMED:
            start = time.perf_counter()
            out = replay_all(trace, [policy(name, budget=BUDGET)])[0]
            seconds[name].append(time.perf_counter() - start - trace.seconds)
            if out.way != "compiled":
                raise RuntimeError(f"{name} went by {out.way}")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    speed = read_bytes_per_s()
    return {
        "row_steps_per_s": {name: trace.rows * trace.steps / value for name, value in median.items()},
        "rows_seconds": median,
        "rows": trace.rows,
        "rows_tokens": trace.tokens,
        "rows_budget": BUDGET,
        "bound_bytes": trace.weight_bytes,
        "read_bytes_per_s": speed,
        "bound_row_steps_per_s": trace.rows * trace.steps * speed / trace.weight_bytes,
        "bound_fraction": {name: trace.weight_bytes / speed / value for name, value in median.items()},
        "bound_says": "every weight of the lower triangle is read once, at the speed at which all processors together "
        "read memory that is in no cache",
    }


def read_bytes_per_s() -> float:
    """Bytes a second that all processors read together, each its own large array."""
    arrays = [np.arange(1 << 26, dtype=np.uint32) for _ in range(processors())]

    def read(array: np.ndarray) -> int:
        return int(kernels.count_from(array, np.uint32(1)))

    with ThreadPoolExecutor(max_workers=len(arrays)) as pool:
        seconds = [timed(lambda: list(pool.map(read, arrays))) for _ in range(6)]
    return sum(array.nbytes for array in arrays) / statistics.median(seconds[1:])


def memory(tokens: int) -> dict[str, Any]:
    """The most memory that a replay of the rows takes, over its chunk, each in a process of its own."""
    peaks = {
        name: int(
            subprocess.run(
                [sys.executable, "-m", "bench.replay", "--memory", name, "--tokens", str(tokens)],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
            ).stdout
        )
        for name in TIMED
    }
    return {
        "memory_over_chunk": {name: peak / CHUNK_BYTES for name, peak in peaks.items()},
        "memory_peak_bytes": peaks,
        "memory_chunk_bytes": CHUNK_BYTES,
        "memory_says": "resident bytes above those of the process with the code loaded; the chunk and all results "
        "are in them",
    }


def grow(name: str, tokens: int) -> int:
    """The peak of this process while it replays that policy, above what it takes with everything loaded."""
    trace = ManyRows(tokens=tokens)
    replay_all(ManyRows(layers=2, tokens=300), [policy(name, budget=BUDGET)])
    return peak_bytes(lambda: replay_all(trace, [policy(name, budget=BUDGET)]))


def main() -> None:
    """Measure everything, print it as it comes, and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/replay.json"))
    parser.add_argument("--model", default="smollm2", help="what recording is measured on")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the many rows")
    parser.add_argument("--quick", action="store_true", help="few rounds, and no recording; for trying the script out")
    parser.add_argument("--memory", metavar="POLICY", help="only the peak of memory, in this process")
    options = parser.parse_args()
    if options.memory:
        print(grow(options.memory, options.tokens))
        return
    rounds = 1 if options.quick else 7
    started, figures = now(), dict[str, Any]()
    print(f"{hardware()}\n{versions()}, seed 0, {processors()} threads")
    take(figures, grid(rounds))
    take(figures, sweep(2 * rounds))
    take(figures, rows(rounds, options.tokens))
    take(figures, memory(options.tokens))
    if not options.quick:
        from bench import recording  # loads torch, which the figures above are better without

        take(figures, recording.measure(model=options.model))
    report = {
        "started": started,
        "finished": now(),
        "hardware": hardware(),
        "versions": versions(),
        "seed": 0,
        "threads": processors(),
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    told = ("row_steps_per_s", "memory_over_chunk", "bound_fraction")
    print(json.dumps({name: value for name, value in report.items() if isinstance(value, float) or name in told}))


if __name__ == "__main__":
    main()
