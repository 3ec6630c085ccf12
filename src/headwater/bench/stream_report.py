"""The table, the plots and the page of an experiment on one long text, from its stored results alone.

Knows what is said and drawn. Does not know engines, or how anything was measured at run time.
"""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from headwater.bench import page as html
from headwater.bench import style
from headwater.bench.stream_results import FAR_GAP, Along, StreamResults
from headwater.bench.table import figure, grid, machine_facts, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def header(results: StreamResults) -> str:
    """What is about to run, and every choice made for the user."""
    settings = results.settings
    lines = [
        f"Model:   {results.model} ({results.engine}), trained length {results.context_length:,} tokens",
        f"Text:    {results.text.name}, the first {settings.tokens:,} of {results.text.tokens:,} tokens",
        f"Budgets: {_list(settings.budgets)}; sinks {_list(settings.sinks)}; gaps {_list(settings.gaps)}; "
        f"seed {results.seed}",
        *(f"Choice:  {choice}" for choice in results.choices),
    ]
    return "\n".join(lines)


def show(results: StreamResults, out: IO[str] | None = None) -> None:
    """Print the tables."""
    target: IO[str] = out or sys.stdout
    for title, columns, rows in _tables(results):
        print(f"\n{title}", file=target)
        grid(columns, rows, target)


def page(results: StreamResults) -> str:
    """The whole page. Raises MissingExtra without matplotlib."""
    settings = results.settings
    lead = (
        f"{results.model} over {settings.tokens:,} tokens of {results.text.name}; outside the ablation a budget of "
        f"{settings.shown_budget:,} tokens with {settings.shown_sinks} sinks."
    )
    captions = {
        "gap": "The window was filled and slid, the stream's positions were moved on by the gap, and the next "
        f"{settings.gap_scored_tokens} tokens were scored. Bars: 95 % intervals over blocks of neighbouring tokens.",
        "ablation": "Perplexity over the same tokens for every point: those after the largest budget's first eviction.",
        "along": "Perplexity per 1,000 tokens, one token leaving the windows for each that comes.",
        "long": "Perplexity per 1,000 tokens of the re-indexed window, evicting in blocks; vertical lines at multiples "
        "of the trained length.",
    }
    drawn = {"gap": gap_plot, "ablation": ablation_plot, "along": along_plot, "long": long_plot}
    names = {
        "gap": "The gap between sinks and window",
        "ablation": "Sinks and budgets",
        "along": "Along the text",
        "long": "Past the trained length",
    }
    sections = [html.bullets(findings(results))]
    for key, draw in drawn.items():
        if key == "long" and results.long_run is None:
            continue
        title, columns, rows = next(table for table in _tables(results) if table[0] == names[key])
        sections += [html.heading(title), html.figure(draw(results), captions[key])]
        shown = html.table(columns, rows)
        sections.append(html.folded("The figures", shown) if key in {"along", "long"} else shown)
    sections += [html.heading("Settings and machine"), html.facts(_facts(results))]
    return html.document("Perplexity of a fixed cache over a long text", lead, [part for part in sections if part])


def findings(results: StreamResults) -> list[str]:
    """What came out, in sentences."""
    said = list[str]()
    if results.gap_reindexed_over_zero is not None:
        said.append(
            f"Re-indexed, the worst of {len(results.settings.gaps)} gaps, up to {max(results.settings.gaps):,} "
            f"positions, costs {results.gap_reindexed_over_zero:.3f} times the perplexity at no gap."
        )
    if results.gap_left_over_zero is not None:
        said.append(
            f"Left where they were, the sinks cost {figure(results.gap_left_over_zero)} times at a gap of {FAR_GAP:,} "
            "positions."
        )
    for row in results.along:
        if row.buckets and row.budget is not None:
            said.append(
                f"{row.name}, budget {row.budget}: perplexity {figure(row.buckets[-1].perplexity)} over the last piece "
                f"of the text, {figure(row.buckets[0].perplexity)} over the first; cache {size(row.cache_bytes)}."
            )
    run = results.long_run
    if run is not None and run.buckets:
        said.append(
            f"Over {run.buckets[-1].stop:,} tokens, {run.buckets[-1].stop / results.context_length:.1f} trained "
            f"lengths, the re-indexed window stays between {figure(min(_values(run)))} and {figure(max(_values(run)))}."
        )
    return said


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _tables(results: StreamResults) -> list[Table]:
    settings = results.settings
    gaps = {(gap.reindexed, gap.gap): gap.perplexity for gap in results.gaps}
    cells = {(cell.budget, cell.sinks): cell.perplexity_same_tokens for cell in results.ablation}
    tables: list[Table] = [
        (
            "The gap between sinks and window",
            ("gap", "perplexity, re-indexed", "left where they were"),
            [(f"{gap:,}", figure(gaps.get((True, gap))), figure(gaps.get((False, gap)))) for gap in settings.gaps],
        ),
        (
            "Sinks and budgets",
            ("budget", *(f"{count} sink{'' if count == 1 else 's'}" for count in settings.sinks)),
            [
                (f"{budget:,}", *(figure(cells.get((budget, count))) for count in settings.sinks))
                for budget in settings.budgets
            ],
        ),
        ("Along the text", ("tokens", *(row.name for row in results.along)), _along_rows(results.along)),
    ]
    if results.long_run is not None:
        tables.append(("Past the trained length", ("tokens", "re-indexed window"), _along_rows((results.long_run,))))
    return tables


def _along_rows(rows: tuple[Along, ...]) -> list[tuple[str, ...]]:
    spans = sorted({(bucket.start, bucket.stop) for row in rows for bucket in row.buckets})
    by_row = [{(bucket.start, bucket.stop): bucket.perplexity for bucket in row.buckets} for row in rows]
    return [
        (f"{start:,} to {stop:,}", *(figure(found.get((start, stop))) for found in by_row)) for start, stop in spans
    ]


def gap_plot(results: StreamResults) -> str:
    """SVG: perplexity by gap, re-indexed and left."""
    gaps = results.settings.gaps
    with style.canvas(7.4, 3.6) as drawing:
        axes = drawing.add_subplot()
        for index, (reindexed, label) in enumerate(((True, "re-indexed"), (False, "left where they were"))):
            found = {gap.gap: gap for gap in results.gaps if gap.reindexed is reindexed}
            x = [place for place, gap in enumerate(gaps) if gap in found]
            y = [found[gaps[place]].perplexity for place in x]
            low = [max(0.0, value - found[gaps[place]].interval[0]) for place, value in zip(x, y, strict=True)]
            high = [max(0.0, found[gaps[place]].interval[1] - value) for place, value in zip(x, y, strict=True)]
            look = style.look(index)
            axes.errorbar(
                x,
                y,
                yerr=(low, high),
                color=look.color,
                linestyle=look.line,
                marker=look.marker,
                capsize=3,
                elinewidth=1,
                label=label,
            )
        axes.set_xticks(range(len(gaps)), [_short(gap) for gap in gaps])
        axes.set_xlabel("positions that passed between sinks and window")
        _log_y(axes, [value for gap in results.gaps for value in (gap.perplexity, *gap.interval)])
        style.legend_above(axes, 2)
        return style.to_svg(drawing, "gap", "Perplexity by gap: re-indexed, and with the sinks left where they were")


def ablation_plot(results: StreamResults) -> str:
    """SVG: perplexity by number of sinks, one line for each budget."""
    settings = results.settings
    with style.canvas(7.4, 3.6) as drawing:
        axes = drawing.add_subplot()
        for index, budget in enumerate(settings.budgets):
            found = {cell.sinks: cell.perplexity_same_tokens for cell in results.ablation if cell.budget == budget}
            x = [place for place, count in enumerate(settings.sinks) if count in found]
            look = style.look(index)
            values = [found[settings.sinks[place]] for place in x]
            axes.plot(x, values, color=look.color, linestyle=look.line, marker=look.marker, label=f"budget {budget:,}")
        axes.set_xticks(range(len(settings.sinks)), [str(count) for count in settings.sinks])
        axes.set_xlabel("sinks")
        _log_y(axes, [cell.perplexity_same_tokens for cell in results.ablation])
        style.legend_above(axes, 4)
        return style.to_svg(drawing, "ablation", "Perplexity by number of sinks, one line for each budget")


def along_plot(results: StreamResults) -> str:
    """SVG: perplexity along the text, one line for each policy."""
    with style.canvas(7.4, 3.6) as drawing:
        axes = drawing.add_subplot()
        for index, row in enumerate(results.along):
            _draw_along(axes, row, index, row.name)
        _log_y(axes, [value for row in results.along for value in _values(row)])
        axes.set_xlim(left=0)
        style.thousands(axes.xaxis)
        axes.set_xlabel("tokens of the text")
        style.legend_above(axes, 3)
        return style.to_svg(drawing, "along", "Perplexity along the text, one line for each policy")


def long_plot(results: StreamResults) -> str:
    """SVG: perplexity of the re-indexed window past the trained length."""
    run = results.long_run
    with style.canvas(7.4, 3.2) as drawing:
        axes = drawing.add_subplot()
        if run is not None and run.buckets:
            _draw_along(axes, run, 0, "re-indexed window")
            _log_y(axes, _values(run))
            end = run.buckets[-1].stop
            for place in range(results.context_length, end + 1, results.context_length):
                axes.axvline(place, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_xlim(left=0)
        style.thousands(axes.xaxis)
        axes.set_xlabel("tokens of the text")
        style.legend_above(axes, 1)
        return style.to_svg(drawing, "long", "Perplexity of the re-indexed window past the trained length")


def _draw_along(axes: Axes, row: Along, index: int, label: str) -> None:
    look = style.look(index, row.name)
    x = [(bucket.start + bucket.stop) / 2 for bucket in row.buckets]
    every = max(1, len(x) // 20)
    axes.plot(
        x,
        _values(row),
        color=look.color,
        linestyle=look.line,
        marker=look.marker,
        markevery=every,
        label=label,
    )


def _values(row: Along) -> list[float]:
    return [bucket.perplexity for bucket in row.buckets]


def _log_y(axes: Axes, values: list[float]) -> None:
    if not values:
        return
    low, high = min(values) / 1.15, max(max(values), min(values) * 1.3) * 1.15
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    style.log_ticks(axes.yaxis, low, high)
    axes.set_ylabel("perplexity (log scale)")


def _short(gap: int) -> str:
    for unit, factor in (("M", 1 << 20), ("k", 1 << 10)):
        if gap >= factor and gap % factor == 0:
            return f"{gap // factor}{unit}"
    return f"{gap:,}"


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def _facts(results: StreamResults) -> list[tuple[str, str]]:
    settings = results.settings
    return [
        ("Model", f"{results.model}, engine {results.engine}, trained length {results.context_length:,} tokens"),
        ("Text", f"{results.text.name}, the first {settings.tokens:,} of {results.text.tokens:,} tokens"),
        ("Its sha256", results.text.sha256),
        ("Seed", f"{results.seed} (of the resampling; nothing else is drawn)"),
        ("Choices", "; ".join(results.choices)),
        *machine_facts(results.hardware, results.versions),
        ("Started", results.started),
        ("Duration", f"{results.duration_s:,.0f} s"),
    ]
