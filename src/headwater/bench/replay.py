"""Policies over a trace: what each keeps at each budget, JSON first, then a table and a page from the JSON.

Knows the order of the work and what is told to the user. Does not know any rule, nor how a page is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwater.bench import replay_report
from headwater.bench.machine import hardware, now, versions
from headwater.bench.progress import Progress, Silent, progress
from headwater.bench.replay_plan import DEFAULT_POLICIES, Plan, expand, plan
from headwater.bench.replay_results import ReplayResults, Row, Settings, Source, read
from headwater.bench.replay_trace import CANONICAL, Watched, open_trace
from headwater.bench.results import prepare, to_json, write_json, write_text
from headwater.bench.style import require_plots
from headwater.policies import Policy
from headwater.traces import Replay, Trace, replay_all
from headwater.traces.oracle import oracle
from headwater.traces.window_run import spans_of

BUDGETS = (256, 512, 1024)
INTERRUPTED = 130

Clock = Callable[[], float]
Store = Callable[[ReplayResults], None]


def run(
    *,
    trace: str = CANONICAL,
    policies: tuple[str, ...] = DEFAULT_POLICIES,
    budgets: tuple[int, ...] = BUDGETS,
    sinks: int | None = None,
    recent_window: int | None = None,
    seed: int | None = None,
    tokens: int | None = None,
    layers: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    output: Path | None = Path("report/replay"),
    as_json: bool = False,
) -> int:
    """Replay policies at budgets over a trace; print the table, write `results.json` and `index.html` into `output`.

    Without `output` nothing is written; `as_json` prints the JSON in place of the table. Returns the exit code: 0, or
    130 after Ctrl-C. Raises UsageError and its kind for values that cannot be used, InputFileError for a folder that is
    no recorded trace, MissingExtra for the oracle without numba and for a page without matplotlib, all before the first
    step.
    """
    names = expand(policies)
    opened, source = open_trace(trace, tokens=tokens, layers=layers, heads=heads)
    parameters = {"sinks": sinks, "recent_window": recent_window, "seed": seed}
    planned = plan(names, budgets=budgets, tokens=opened.tokens, parameters=parameters)
    if output is not None:
        require_plots()
        prepare(output)
    settings = Settings(
        trace=trace,
        policies=names,
        budgets=tuple(sorted(budgets)),
        tokens=tokens,
        layers=layers,
        heads=heads,
        shown_budget=sorted(budgets)[len(budgets) // 2],
        shown_row=opened.rows // 2,
        **parameters,
    )
    stored = list[ReplayResults]()

    def store(measured: ReplayResults) -> None:
        stored.append(measured)
        if output is not None:
            write_json(output / "results.json", measured)

    try:
        with progress() as bars:
            experiment(opened, source, settings, planned, progress=bars, store=store, tell=_tell)
    except KeyboardInterrupt:
        _tell(f"Interrupted; {_left(stored, output)}")
        return INTERRUPTED
    _finish(stored[-1], output, as_json)
    return 0


def _finish(measured: ReplayResults, output: Path | None, as_json: bool) -> None:
    """Draw the page from the stored file, and print what was asked for."""
    if output is not None:
        measured = read(output / "results.json")
        write_text(output / "index.html", replay_report.page(measured))
    if as_json:
        print(to_json(measured))
    else:
        replay_report.show(measured)
    if output is not None:
        places = f"Results: {output / 'results.json'}\nReport:  {output / 'index.html'}"
        print(f"\n{places}", file=sys.stderr if as_json else sys.stdout)


def experiment(
    trace: Trace,
    source: Source,
    settings: Settings,
    planned: Plan,
    *,
    progress: Progress | None = None,
    store: Store | None = None,
    tell: Callable[[str], None] | None = None,
    clock: Clock = time.perf_counter,
) -> ReplayResults:
    """Replay everything in one pass, then seek the bound budget by budget, and return the results.

    `store` is called with what there is after the pass and after each bound. `tell` gets the header.
    """
    bars, begun = progress or Silent(), clock()
    measured = ReplayResults(
        started=now(),
        hardware=hardware(),
        versions={},
        settings=settings,
        trace=source,
        choices=(*planned.choices, *_without_numba(trace, planned.policies)),
    )
    if tell:
        tell(replay_report.header(measured))

    def add(rows: Sequence[Row], *, complete: bool) -> None:
        nonlocal measured
        measured = replace(
            measured,
            rows=(*measured.rows, *rows),
            versions=versions(),
            duration_s=clock() - begun,
            complete=complete,
        )
        if store:
            store(measured)

    replays = replay_all(Watched(trace, bars, "replay"), planned.policies)
    add([row(each, trace, settings) for each in replays], complete=not planned.oracle_budgets)
    for budget in planned.oracle_budgets:
        bars.start(f"oracle at {budget:,}", trace.rows)
        found = row(oracle(trace, budget, progress=bars.advance), trace, settings)
        bound = replace(found, state_bytes_per_slot=0, state_bytes=0)
        add([bound], complete=budget == planned.oracle_budgets[-1])
    return measured


def _without_numba(trace: Trace, policies: Sequence[Policy[Any]]) -> tuple[str, ...]:
    if find_spec("numba") is not None:
        return ()
    slow = dict.fromkeys(each.name for each in policies if spans_of(trace, each) is None)
    if not slow:
        return ()
    return (f"without numba these go by their rules, slowly: {', '.join(slow)}; run: pip install 'headwater[lab]'",)


def row(found: Replay, trace: Trace, settings: Settings) -> Row:
    """What is stored of a replay."""
    choice, shown = found.policy, found.policy.budget == settings.shown_budget
    return Row(
        policy=choice.name,
        budget=choice.budget,
        parameters={field.name: getattr(choice, field.name) for field in fields(choice) if field.name != "budget"},
        needs=tuple(sorted(choice.needs)),
        way=found.way,
        retained_attention_mass=found.retained_attention_mass,
        heavy_hitter_recall=found.heavy_hitter_recall,
        eviction_calls=found.eviction_calls,
        state_bytes_per_slot=choice.state_bytes_per_slot,
        state_bytes=state_bytes(choice, trace),
        mass_by_head=tuple(found.mass_by_row.tolist()),
        recall_by_head=tuple(found.recall_by_row.tolist()),
        left=tuple(found.left[settings.shown_row].tolist()) if shown else None,
    )


def state_bytes(choice: Policy[Any], trace: Trace) -> int:
    """Bytes that the policy remembers for all heads of the trace, as a compact implementation would hold them."""
    layers, total = trace.layers, 0
    for depth, layer in enumerate(layers):
        own = choice.at_layer(depth, len(layers))
        rows = sum(head.layer == layer for head in trace.heads)
        total += rows * own.capacity * own.state_bytes_per_slot
    return total


def _left(stored: list[ReplayResults], output: Path | None) -> str:
    """What there is after an interruption."""
    if not stored:
        return "nothing was replayed to its end"
    return (
        f"what was replayed is in {output / 'results.json'}; no page was drawn from it"
        if output
        else "nothing was written"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
