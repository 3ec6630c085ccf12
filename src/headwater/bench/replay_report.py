"""The table and the page of a replay, from its stored results alone.

Knows what is said and in which order; every figure comes from the results. Does not know how a plot is drawn.
"""

from __future__ import annotations

import sys
from typing import IO

from headwater.bench import page as html
from headwater.bench import replay_plots as plots
from headwater.bench.replay_findings import findings
from headwater.bench.replay_results import FULL, ORACLE, ReplayResults, Row
from headwater.bench.table import NOTHING, grid, machine_facts, size

MEASURED = (
    "At every step of the trace one token pays attention to all before it. First it is measured how much of that falls "
    "on what the policy holds; then the policy is shown the weights of what it holds, the token joins, and what is "
    "over the budget goes. The weights are those of full attention and are not renormalised: what a policy retains is "
    "how much of what the model looked at would still be there.",
    "Retained attention mass is the share of the attention that fell on held positions, a token's own weight included, "
    "mean over steps and heads. Heavy-hitter recall is the share of the 32 largest weights of every step whose "
    "positions were held. Eviction calls are counted over all heads. State is what a compact implementation of the "
    "policy remembers beside the cache itself.",
)


def header(results: ReplayResults) -> str:
    """What is about to run, and every choice made for the user."""
    settings, trace = results.settings, results.trace
    lines = [
        f"Trace:    {trace.name}, {trace.tokens:,} tokens, {_heads(results)}",
        *(f"{name + ':':<9} {value}" for name, value in trace.facts.items()),
        f"Policies: {', '.join(settings.policies)}",
        f"Budgets:  {', '.join(f'{budget:,}' for budget in settings.budgets)} tokens",
        *(f"Choice:   {choice}" for choice in results.choices),
    ]
    return "\n".join(lines)


def show(results: ReplayResults, out: IO[str] | None = None) -> None:
    """Print the table, and which way each policy was replayed."""
    target: IO[str] = out or sys.stdout
    rows, starts = _ordered(results)
    grid(columns(results), [_cells(row, results) for row in rows], target, groups=starts)
    print(file=target)
    for way, names in ways(results).items():
        print(f"{way}: {', '.join(names)}", file=target)


def page(results: ReplayResults) -> str:
    """The whole page. Raises MissingExtra without matplotlib."""
    settings, trace = results.settings, results.trace
    rows, starts = _ordered(results)
    many, shown = len(trace.heads) > 1, settings.shown_budget
    lead = (
        f"{len(settings.policies)} policies over {trace.name}: {trace.tokens:,} tokens, {_heads(results)}, at budgets "
        f"of {_list(settings.budgets)} tokens."
    )
    sections = [
        html.bullets(findings(results)),
        html.heading("Results"),
        html.table(columns(results), [_cells(row, results) for row in rows], starts),
        html.heading("Attention mass by budget"),
        html.figure(plots.mass_plot(results), "Share of the attention that fell on what was held."),
        html.heading("Heavy-hitter recall by budget"),
        html.figure(plots.recall_plot(results), "Share of each step's 32 largest weights whose positions were held."),
    ]
    if any(row.left is not None for row in results.rows):
        sections += [
            html.heading("What was kept"),
            html.figure(
                plots.kept_plot(results),
                f"Positions held along the trace at a budget of {shown:,} tokens, {trace.head(settings.shown_row)}. A "
                f"cell is {-(-trace.tokens // plots.CELLS)} positions high, darker the more of them are held. The line "
                "is the newest position. Beside each name stands its retained mass.",
            ),
        ]
    if many and results.at(shown):
        sections += _by_head(results)
    sections += [
        html.heading("How it was measured"),
        *(html.paragraph(text) for text in MEASURED),
        html.heading("Settings and machine"),
        html.facts(_facts(results)),
    ]
    return html.document("What each policy keeps of the attention", lead, [part for part in sections if part])


def _by_head(results: ReplayResults) -> list[str]:
    shown = f"at a budget of {results.settings.shown_budget:,} tokens"
    parts = [
        html.heading("Heads"),
        html.figure(
            plots.spread_plot(results),
            f"Retained mass {shown}: the mean, bars from the tenth to the ninetieth percentile, lines over all heads.",
        ),
        html.figure(plots.heads_plot(results), f"Attention lost by every head {shown}; beside each name the mass."),
    ]
    if len(results.trace.layers) > 1:
        parts += [
            html.heading("Layers"),
            html.figure(plots.layers_plot(results), f"Retained mass, mean over the heads of each layer, {shown}."),
        ]
    return parts


def columns(results: ReplayResults) -> tuple[str, ...]:
    """The heads of the table; the spread over heads where there is more than one."""
    spread = ("10th to 90th percentile of heads",) if len(results.trace.heads) > 1 else ()
    return (
        "policy",
        "budget",
        "retained mass",
        *spread,
        "heavy-hitter recall",
        "eviction calls",
        "state, bytes per slot",
        "state in all",
    )


def _cells(row: Row, results: ReplayResults) -> tuple[str, ...]:
    low, high = row.spread()
    spread = (f"{low:.3f} to {high:.3f}",) if len(results.trace.heads) > 1 else ()
    stateless = row.policy in (FULL, ORACLE)
    return (
        row.policy,
        f"{row.budget:,}",
        f"{row.retained_attention_mass:.6f}",
        *spread,
        f"{row.heavy_hitter_recall:.6f}",
        NOTHING if row.policy == ORACLE else f"{row.eviction_calls:,}",
        NOTHING if stateless else str(row.state_bytes_per_slot),
        NOTHING if stateless else size(row.state_bytes),
    )


def _ordered(results: ReplayResults) -> tuple[list[Row], list[int]]:
    """By budget, and within a budget what retains most first; and where each further budget begins."""
    rows = [row for budget in sorted({row.budget for row in results.rows}) for row in results.at(budget)]
    return rows, [index for index in range(1, len(rows)) if rows[index].budget != rows[index - 1].budget]


def ways(results: ReplayResults) -> dict[str, list[str]]:
    """The policies by how they were replayed."""
    found = dict[str, list[str]]()
    for row in results.rows:
        if row.policy not in found.setdefault(row.way, []):
            found[row.way].append(row.policy)
    return found


def _heads(results: ReplayResults) -> str:
    rows, layers = len(results.trace.heads), len(results.trace.layers)
    return "1 head" if rows == 1 else f"{rows} heads in {layers} layer{'' if layers == 1 else 's'}"


def _list(values: tuple[int, ...]) -> str:
    *most, last = (f"{value:,}" for value in values)
    return f"{', '.join(most)} and {last}" if most else last


def _facts(results: ReplayResults) -> list[tuple[str, str]]:
    settings, trace = results.settings, results.trace
    made = {row.policy: row.parameters for row in results.rows}
    numbers = "; ".join(
        f"{name} {', '.join(f'{parameter}={value}' for parameter, value in parameters.items())}"
        for name, parameters in made.items()
        if parameters
    )
    pairs = [
        ("Trace", f"{trace.name}: {trace.tokens:,} tokens, {_heads(results)}"),
        *trace.facts.items(),
        ("Budgets", f"{_list(settings.budgets)} tokens"),
        ("Parameters", numbers),
        ("Replayed", "; ".join(f"{way}: {', '.join(names)}" for way, names in ways(results).items())),
        ("Choices", "; ".join(results.choices)),
        *machine_facts(results.hardware, results.versions),
        ("Started", results.started),
        ("Duration", f"{results.duration_s:,.1f} s"),
    ]
    return [(name, value) for name, value in pairs if value]
