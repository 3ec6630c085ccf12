"""The plots of a comparison, drawn from its stored results alone.

Knows which figure goes on which axis. Does not know engines, pages or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.bench import style
from headwater.bench.results import Results, Row, Turn, perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_TURNS = 10


def smoothed(turns: Sequence[Turn], width: int = SMOOTH_TURNS) -> list[float]:
    """Perplexity over each turn and up to `width - 1` before it, pooled by tokens."""
    return [perplexity(turns[max(0, index + 1 - width) : index + 1]) or np.nan for index in range(len(turns))]


def bytes_unit(results: Results) -> tuple[str, int]:
    """The unit in which the largest cache reads well, and its bytes."""
    largest = max((count for row in results.rows for count in row.cache_bytes), default=0)
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next(((unit, factor) for unit, factor in units if largest >= factor), ("bytes", 1))


def perplexity_plot(results: Results) -> str:
    """SVG: perplexity by turn."""
    with style.canvas(7.4, 4.0) as figure:
        axes = figure.add_subplot()
        _perplexity(axes, results)
        style.legend_above(axes, 4)
        return style.to_svg(
            figure, "perplexity", "Perplexity of the assistant's turns, by turn, one line for each policy"
        )


def bytes_plot(results: Results) -> str:
    """SVG: cache bytes by turn."""
    with style.canvas(7.4, 3.4) as figure:
        axes = figure.add_subplot()
        _bytes(axes, results)
        style.legend_above(axes, 4)
        return style.to_svg(figure, "bytes", "Bytes of the cache, by turn, one line for each policy")


def speed_plot(results: Results) -> str:
    """SVG: tokens/s by turn."""
    with style.canvas(7.4, 3.2) as figure:
        axes = figure.add_subplot()
        for index, row in enumerate(results.rows):
            turns = [sample.turn for sample in row.tokens_per_s]
            _line(axes, index, row, turns, [sample.tokens_per_s for sample in row.tokens_per_s], every=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s, one at a time")
        style.thousands(axes.yaxis)
        _turn_axis(axes, results)
        style.legend_above(axes, 4)
        return style.to_svg(figure, "speed", "Decode speed in tokens per second, by turn, one line for each policy")


def kept_plot(results: Results) -> str:
    """SVG: the positions that each row held, by turn."""
    rows = [row for row in results.rows if row.kept]
    lines = max(1, -(-len(rows) // 2))
    with style.canvas(7.4, 0.4 + 2.4 * lines) as figure:
        panels = figure.subplots(lines, min(2, max(1, len(rows))), sharex=True, sharey=True, squeeze=False).flatten()
        for index, (axes, row) in enumerate(zip(panels, rows, strict=False)):
            _kept(axes, index, row)
            _turn_axis(axes, results)
            style.thousands(axes.yaxis)
            axes.label_outer()
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        figure.supylabel("position in the stream", fontsize=9.5)
        return style.to_svg(figure, "kept", "Positions held in the cache, by turn, one panel for each policy")


def summary(results: Results, path: Path) -> None:
    """Write one picture, PNG or SVG by its suffix: perplexity and cache bytes by turn, side by side."""
    with style.canvas(10.4, 4.0) as figure:
        left, right = figure.subplots(1, 2)
        _perplexity(left, results)
        _bytes(right, results)
        left.set_title("Perplexity of the assistant's turns", color=style.INK, pad=8)
        right.set_title(f"Cache, {bytes_unit(results)[0]}", color=style.INK, pad=8)
        left.set_ylabel("")
        right.set_ylabel("")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=3.2, columnspacing=1.6)
        style.save(figure, path)


def _line(axes: Axes, index: int, row: Row, x: Sequence[float], y: Sequence[float], every: int | None = None) -> Any:
    look = style.look(index, row.name)
    step = every or max(1, len(x) // 8)
    offset = 0 if every else index * max(1, step // 4) % step
    return axes.plot(
        x,
        y,
        color=look.color,
        linestyle=look.line,
        linewidth=look.width,
        marker=look.marker,
        markevery=(offset, step),
        label=row.name,
        zorder=look.order,
    )


def _turn_axis(axes: Axes, results: Results) -> None:
    axes.set_xlim(0, results.conversation.turns * 1.03)
    style.thousands(axes.xaxis)
    axes.set_xlabel("turn")


def _perplexity(axes: Axes, results: Results) -> None:
    values = list[float]()
    for index, row in enumerate(results.rows):
        turns = [turn.turn for turn in row.turns]
        raw = [perplexity([turn]) or np.nan for turn in row.turns]
        line = smoothed(row.turns)
        values += [*line, *raw]
        look = style.look(index, row.name)
        axes.plot(turns, raw, linestyle="none", marker=look.marker, markersize=2.8, color=look.color, alpha=0.35, mew=0)
        _line(axes, index, row, turns, line)
    finite = np.array([value for value in values if np.isfinite(value)])
    if len(finite):
        low, high = np.quantile(finite, (0.01, 0.99))
        low, high = low / 1.2, max(high, low * 1.5) * 1.2
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        style.log_ticks(axes.yaxis, low, high)
    axes.set_ylabel("perplexity (log scale)")
    _turn_axis(axes, results)
    _first_eviction(axes, results)


def _first_eviction(axes: Axes, results: Results) -> None:
    firsts = [row.first_eviction_turn for row in results.rows if row.first_eviction_turn is not None]
    if not firsts:
        return
    first = min(firsts)
    axes.axvline(first, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)))
    late = first > 0.6 * results.conversation.turns
    axes.annotate(
        f"first eviction, turn {first}",
        (first, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if late else 5, -4),
        textcoords="offset points",
        ha="right" if late else "left",
        va="top",
        fontsize=8.5,
        color=style.INK,
    )


def _bytes(axes: Axes, results: Results) -> None:
    unit, factor = bytes_unit(results)
    for index, row in enumerate(results.rows):
        _line(axes, index, row, [turn.turn for turn in row.turns], [count / factor for count in row.cache_bytes])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"cache, {unit}")
    _turn_axis(axes, results)
    full = next((row for row in results.rows if row.name == "full"), None)
    died = next((turn for turn in full.turns if turn.turn > full.turns_completed), None) if full else None
    if full is None or died is None:
        return
    place = (died.turn, died.cache_bytes / factor)
    axes.plot(*place, marker="X", markersize=9, color=style.INK, linestyle="none", zorder=5)
    axes.annotate(
        f"past its limit, turn {full.turns_completed + 1}",
        place,
        xytext=(-9, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color=style.INK,
    )


def _kept(axes: Axes, index: int, row: Row) -> None:
    color = style.QUIET if row.name == "full" else style.look(index, row.name).color
    turns = [snapshot.turn for snapshot in row.kept]
    gaps = np.diff(turns) if len(turns) > 1 else np.array([2])
    width = 0.75 * float(np.median(gaps))
    bars = [(snapshot.turn, start, stop) for snapshot in row.kept for start, stop in snapshot.ranges]
    axes.bar(
        [turn for turn, _, _ in bars],
        [stop - start for _, start, stop in bars],
        bottom=[start for _, start, _ in bars],
        width=width,
        color=color,
        edgecolor=color,
        linewidth=1.0,
    )
    axes.plot([turn.turn for turn in row.turns], [turn.seen for turn in row.turns], color=style.INK, linewidth=0.9)
    axes.set_title(row.name, color=style.INK)
