"""The advice on a terminal and as a page, from its stored results alone.

Knows which tables there are and in which order things are shown. Does not know how anything was measured at run time,
nor how a plot is drawn.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import IO

from headwater.bench import advise_plots as plots
from headwater.bench import page as html
from headwater.bench.advise_choice import here
from headwater.bench.advise_results import CURVE, FULL, RANDOM, AdviseResults, Row
from headwater.bench.advise_words import command, paragraphs
from headwater.bench.replay_report import MEASURED
from headwater.bench.table import NOTHING, grid, machine_facts, size

LINE = 100
"""How wide the paragraphs are on a terminal."""

COLUMNS = (
    "policy",
    "budget",
    "recent window",
    "retained mass",
    "10th to 90th percentile of heads",
    "heavy-hitter recall",
    "keys and values",
    "policy's state",
    "together",
    "runs live",
)

ABOUT = (
    "The bend is the budget at which the best policy lies farthest above the straight line from the smallest budget to "
    "the whole conversation, budgets on a logarithmic scale: just before it a doubling buys more than that line, just "
    "after it less. Less than a hundredth above is no bend. It depends on both ends: a place to start from, no law. "
    "Of the policies within a thousandth of what keeps most there, the one that costs least is advised.",
    "The conversation went through the model with nothing evicted, while every policy watched. Each attention head "
    "evicts for itself, also where several heads share keys and values; a live cache would have to make those agree. A "
    "live window lets a sixteenth of itself go at a time, the replay one token. Retained mass is not perplexity: for "
    "the policies that run live, headwater compare measures that.",
    "Keys and values are those of one token more than the budget, which are held while a token joins, at what a stream "
    "of this model was seen to take for each. A policy's state is what a compact implementation holds for all heads.",
)


def show(results: AdviseResults, out: IO[str] | None = None) -> None:
    """Print the table and the advice."""
    target: IO[str] = out or sys.stdout
    grid(COLUMNS, [_cells(row) for row in _one_each(results)], target)
    for text in paragraphs(results):
        print(f"\n{textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False)}", file=target)
    print(f"\n{command(results)}", file=target)


def page(results: AdviseResults) -> str:
    """The whole page. Raises MissingExtra without matplotlib."""
    subject, advice = results.subject, results.advice
    lead = (
        f"{subject.model} through {subject.conversation.name}: {subject.used_tokens:,} tokens in {subject.used_turns} "
        f"turns, {subject.heads} attention heads in {subject.layers} layers."
    )
    where = "in that memory" if advice.budget is None else f"at {advice.budget:,} tokens"
    sections = [
        *(html.paragraph(text) for text in paragraphs(results)),
        html.code(command(results)),
        html.heading("Attention kept, by budget"),
        html.figure(
            plots.curve_plot(results),
            "Rings: what is advised, and the best that runs live today. Thin line: from the smallest budget to the "
            "whole conversation; the bend is where the best policy lies farthest above it.",
        ),
        html.heading(f"The policies {where}"),
        html.table(COLUMNS, [_cells(row) for row in _one_each(results)]),
        html.folded("Retained mass at every budget", html.table(*_by_budget(results))),
        html.heading(f"Recent windows {where}"),
        html.figure(plots.windows_plot(results), "The newest tokens that a policy keeps whatever it thinks of them."),
        html.folded("The figures", html.table(*_by_window(results))),
        html.heading("How it was measured"),
        *(html.paragraph(text) for text in (*MEASURED, *ABOUT)),
        html.heading("Settings and machine"),
        html.facts(_facts(results)),
    ]
    return html.document("Which policy, at which budget", lead, sections)


def _one_each(results: AdviseResults) -> list[Row]:
    """The rows of the advice, each policy with the recent window that suits it best, below everything kept."""
    advice, found = results.advice, dict[str, Row]()
    for row in here(results.rows, advice.by, advice.budget):
        found.setdefault(row.policy, row)
    return [results.full, *found.values()]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.budget:,}",
        NOTHING if row.recent_window is None else f"{row.recent_window:,}",
        f"{row.retained_attention_mass:.4f}",
        f"{row.mass_low:.3f} to {row.mass_high:.3f}",
        f"{row.heavy_hitter_recall:.4f}",
        size(row.cache_bytes),
        size(row.state_bytes),
        size(row.total_bytes),
        NOTHING if row.policy == RANDOM else "yes" if row.live or row.policy == FULL else "not yet",
    )


def _by_budget(results: AdviseResults) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Policies by budget, and what the keys and values of each budget take."""
    budgets = results.subject.budgets
    mass = {(row.policy, row.budget): row for row in results.rows if row.role == CURVE}
    names = [row.policy for row in _one_each(results) if row.policy != FULL]
    size_of = [size((budget + 1) * results.subject.kv_bytes_per_token) for budget in budgets]
    return ("policy", *(f"{budget:,}" for budget in budgets)), [
        *((name, *(f"{mass[name, budget].retained_attention_mass:.4f}" for budget in budgets)) for name in names),
        ("keys and values", *size_of),
    ]


def _by_window(results: AdviseResults) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Policies by recent window, where it can be set."""
    advice = results.advice
    rows = [row for row in here(results.rows, advice.by, advice.budget) if "recent_window" in row.parameters]
    mass = {(row.policy, row.recent_window): row.retained_attention_mass for row in rows}
    windows = sorted({row.recent_window or 0 for row in rows})
    return ("policy", *(str(window) for window in windows)), [
        (name, *(f"{mass[name, window]:.4f}" if (name, window) in mass else NOTHING for window in windows))
        for name in dict.fromkeys(row.policy for row in rows)
    ]


def _facts(results: AdviseResults) -> list[tuple[str, str]]:
    subject, source = results.subject, results.subject.conversation
    made = {row.policy: row.parameters for row in reversed(results.rows) if row.role == CURVE}
    numbers = "; ".join(
        f"{name} {', '.join(f'{parameter}={value}' for parameter, value in parameters.items())}"
        for name, parameters in reversed(made.items())
        if parameters
    )
    pairs = [
        ("Model", f"{subject.model}, engine {subject.engine}, trained length {subject.context_length:,} tokens"),
        ("Conversation", f"{source.name}: {source.turns} turns, {source.tokens:,} tokens with the chat template"),
        ("Read of it", f"{subject.used_tokens:,} tokens, {subject.used_turns} turns"),
        ("Its source", source.attribution),
        ("Its sha256", source.sha256),
        ("Keys and values", f"{subject.kv_bytes_per_token:,} bytes a token"),
        ("Memory asked for", "" if subject.asked.memory_bytes is None else size(subject.asked.memory_bytes)),
        ("Parameters", numbers),
        ("Seed", f"{subject.asked.seed} (of the random choice; nothing else is drawn)"),
        ("Choices", "; ".join(subject.choices)),
        *machine_facts(subject.hardware, results.versions),
        ("Started", subject.started),
        ("Duration", f"{results.duration_s:,.0f} s"),
    ]
    return [(name, value) for name, value in pairs if value]
