"""The page of a comparison, from its stored results alone.

Knows what is said on the page and in which order; every figure in its text comes from the results. Does not know how
anything was measured at run time, nor how a plot is drawn.
"""

from __future__ import annotations

from pathlib import Path

from headwater.bench import page as html
from headwater.bench import plots
from headwater.bench.results import Results, Row
from headwater.bench.style import require_plots
from headwater.bench.table import COLUMNS, cells, figure, machine_facts, size, steady_cache, steady_speed

__all__ = ["findings", "page", "require_plots", "summary"]

MEASURED = (
    "Each policy is driven through the same conversation by teacher forcing: the user's message goes in with the "
    "model's chat template, then every token of the real answer is scored by the probability that the model gave it, "
    "given what the cache held at that step, and fed. The perplexity of a turn is exp of the mean negative "
    "log-probability over the tokens of the answer's text; template tokens are fed, not scored.",
    "“Before” are the turns scored whole while the policy had evicted nothing, “after” all later ones. “Relative to "
    "full” divides by the perplexity of full on the same turns. Full never evicts; it is split where the first of the "
    "other policies evicts, and goes on past its limit as the reference.",
    "Cache bytes are physical. Decode speed is the median of up to 12 single-token steps at the beginning of an "
    "answer, at about 20 turns along the way; the steady state is the median of the later half of these samples, its "
    "start the median of the first quarter. Intervals are 95 %, from 2,000 resamples of the turns, paired with full.",
)


def summary(results: Results, path: Path) -> None:
    """Write one picture, PNG or SVG by its suffix: perplexity and cache bytes by turn, side by side."""
    plots.summary(results, path)


def page(results: Results) -> str:
    """The whole page. Raises MissingExtra without matplotlib."""
    source, settings = results.conversation, results.settings
    lead = (
        f"{results.model} through {source.turns} turns ({source.tokens:,} tokens) of {source.name}, in a budget of "
        f"{settings.budget_tokens:,} tokens."
    )
    sections = [
        html.bullets(findings(results)),
        html.heading("Results"),
        html.table(COLUMNS, cells(results)),
        *_figures(results),
        html.heading("How each policy ended"),
        html.facts([(row.name, f"{row.rule}. Stopped: {row.stopped_because}.") for row in results.rows]),
        html.heading("How it was measured"),
        *(html.paragraph(text) for text in MEASURED),
        html.heading("Settings and machine"),
        html.facts(_facts(results)),
    ]
    return html.document("What a fixed KV cache costs a conversation", lead, [part for part in sections if part])


def findings(results: Results) -> list[str]:
    """What came out, in sentences."""
    said = [_row_finding(row, results) for row in results.rows if row.name != "full"]
    full = next((row for row in results.rows if row.name == "full"), None)
    if full is not None:
        said.append(_full_finding(full, results))
    return [*[text for text in said if text], *_contrast(results)]


def _row_finding(row: Row, results: Results) -> str:
    if row.first_eviction_turn is None:
        return (
            f"{row.name} evicted nothing in {row.turns_completed} turns: all of it fits the budget."
            if row.turns
            else ""
        )
    text = f"{row.name}: perplexity {figure(row.perplexity_after)} from its first eviction in turn "
    text += f"{row.first_eviction_turn} on"
    if row.perplexity_before is not None:
        text += f", {figure(row.perplexity_before)} before it"
    if row.perplexity_over_full is not None:
        text += f"; {row.perplexity_over_full:.2f} times that of full on the same turns"
        if interval := row.perplexity_over_full_interval:
            text += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"
    return f"{text}.{_steady(row)}"


def _steady(row: Row) -> str:
    cache, speed = steady_cache(row), steady_speed(row)
    text = ""
    if cache is not None:
        text = f" Its cache takes {size(cache[0])} and is {'still growing' if cache[1] else 'flat'}"
        if speed is not None:
            text += f"; it decodes {figure(speed[0])} tokens/s"
            text += f", {speed[1]:.2f} times its speed at the start" if speed[1] is not None else ""
        text += "."
    return text


def _full_finding(row: Row, results: Results) -> str:
    limit = min(results.settings.limit_tokens, results.context_length)
    total = results.conversation.turns
    if row.turns_completed < (row.turns[-1].turn if row.turns else 0):
        ended = f"full passes its limit of {limit:,} tokens after {row.turns_completed} of {total} turns"
    else:
        ended = f"full completes {row.turns_completed} of {total} turns within its limit of {limit:,} tokens"
    return f"{ended}.{_steady(row)}"


def _contrast(results: Results) -> list[str]:
    """What the pins change: the same budget with and without them."""
    by_name = {row.name: row for row in results.rows}
    bare, pinned = by_name.get("sliding-window"), by_name.get("streaming-llm")
    if bare is None or pinned is None or bare.perplexity_after is None or pinned.perplexity_after is None:
        return []
    return [
        f"Pinning {results.pinned_tokens} tokens at the head, in the same budget, changes the perplexity after the "
        f"first eviction from {figure(bare.perplexity_after)} to {figure(pinned.perplexity_after)}."
    ]


def _figures(results: Results) -> list[str]:
    rows = [row.name for row in results.rows if row.turns]
    if not rows:
        return []
    drawn = [
        html.heading("Perplexity by turn"),
        html.figure(
            plots.perplexity_plot(results),
            f"Lines: perplexity over the last {plots.SMOOTH_TURNS} assistant turns, pooled by tokens. Faint points: "
            f"single turns; the outermost hundredth may lie outside.",
        ),
        html.heading("Cache by turn"),
        html.figure(plots.bytes_plot(results), "Physical bytes of K and V, at the end of every assistant turn."),
    ]
    if any(row.tokens_per_s for row in results.rows):
        drawn += [
            html.heading("Decode speed by turn"),
            html.figure(plots.speed_plot(results), "Median of single-token steps, each point one place along the way."),
        ]
    if any(row.kept for row in results.rows):
        drawn += [
            html.heading("What was kept"),
            html.figure(
                plots.kept_plot(results),
                "Each bar shows the positions whose K and V are in the cache after that turn; the thin line is the end "
                "of the stream. Pins are the marks along the bottom, drawn at least one pixel high.",
            ),
        ]
    return drawn


def _facts(results: Results) -> list[tuple[str, str]]:
    settings, source = results.settings, results.conversation
    pairs = [
        ("Model", f"{results.model}, engine {results.engine}, trained length {results.context_length:,} tokens"),
        ("Conversation", f"{source.name}: {source.turns} turns, {source.tokens:,} tokens with the chat template"),
        ("Its source", source.attribution),
        ("Its sha256", source.sha256),
        ("System prompt", settings.system or ""),
        ("Budget", f"{settings.budget_tokens:,} tokens"),
        ("Pinned", f"{results.pinned_tokens} tokens (sinks {settings.sinks}, system prompt {results.head_tokens})"),
        ("Limit of full", f"{settings.limit_tokens:,} tokens"),
        ("Seed", f"{results.seed} (of the resampling; nothing else is drawn)"),
        ("Choices", "; ".join(results.choices)),
        *machine_facts(results.hardware, results.versions),
        ("Started", results.started),
        ("Duration", ", ".join(f"{row.name} {row.duration_s:.0f} s" for row in results.rows)),
    ]
    return [(name, value) for name, value in pairs if value]
