"""The plots of a replay, drawn from its stored results alone.

Knows which figure goes on which axis. Does not know policies, pages or files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from headwater.bench import style
from headwater.bench.replay_results import FULL, ReplayResults, Row, Source, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

CELLS = 128
"""A picture of kept positions has at most so many cells along either axis."""

SHADES = ((0.0, 0.3), (0.25, 0.6), (0.6, 1.0))
"""How dark a cell is drawn that is kept by more than so much."""

Value = Callable[[Row], float]


def mass_plot(results: ReplayResults) -> str:
    """SVG: retained attention mass by budget."""
    with style.canvas(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        _by_budget(axes, results, lambda row: row.retained_attention_mass)
        axes.set_ylabel("retained attention mass")
        return style.to_svg(figure, "mass", "Retained attention mass by budget, one line for each policy")


def recall_plot(results: ReplayResults) -> str:
    """SVG: heavy-hitter recall by budget."""
    with style.canvas(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        _by_budget(axes, results, lambda row: row.heavy_hitter_recall)
        axes.set_ylabel("heavy-hitter recall")
        return style.to_svg(figure, "recall", "Heavy-hitter recall by budget, one line for each policy")


def kept_plot(results: ReplayResults) -> str:
    """SVG: the positions that each policy held along the trace."""
    rows = [row for row in results.at(results.settings.shown_budget) if row.left is not None]
    lines = -(-len(rows) // 3)
    with style.canvas(7.4, 0.4 + 2.35 * lines) as figure:
        for axes, row in zip(_panels(figure, len(rows), 3), rows, strict=True):
            _kept(axes, row, results.trace.tokens)
        figure.supxlabel("step", fontsize=9.5)
        figure.supylabel("position", fontsize=9.5)
        return style.to_svg(figure, "kept", "Positions held along the trace, one panel for each policy")


def layers_plot(results: ReplayResults) -> str:
    """SVG: retained mass by layer, mean over its heads, at the shown budget."""
    with style.canvas(7.4, 4.0) as figure:
        axes = figure.add_subplot()
        ends = list[style.End]()
        places = range(len(results.trace.layers))
        for index, row in enumerate(results.at(results.settings.shown_budget)):
            look = style.look(index, row.policy)
            values = by_layer(row, results.trace)
            axes.plot(
                places,
                values,
                color=look.color,
                linestyle=look.line,
                linewidth=look.width,
                marker=look.marker,
                markevery=max(1, len(places) // 10),
                zorder=look.order,
            )
            ends.append(style.End(x=places[-1], y=float(values[-1]), text=row.policy, color=look.color))
        _layer_axis(axes, results.trace)
        axes.set_xlabel("layer")
        axes.set_ylabel("retained attention mass")
        style.label_ends(axes, ends)
        return style.to_svg(figure, "layers", "Retained attention mass by layer, one line for each policy")


def heads_plot(results: ReplayResults) -> str:
    """SVG: what every head lost at the shown budget, one map for each policy."""
    rows = results.at(results.settings.shown_budget)
    grids = [lost(row, results.trace) for row in rows]
    levels = loss_levels(np.concatenate([grid.ravel() for grid in grids]))
    lines, tall = -(-len(rows) // 2), grids[0].shape[0]
    with style.canvas(7.4, 0.9 + lines * min(2.6, 0.55 + 0.1 * tall)) as figure:
        for axes, row, grid in zip(_panels(figure, len(rows), 2), rows, grids, strict=True):
            _map(axes, grid, levels)
            _layer_axis(axes, results.trace)
            axes.set_title(f"{row.policy}  {row.retained_attention_mass:.3f}", color=style.INK)
        figure.supxlabel("layer", fontsize=9.5)
        figure.supylabel("head", fontsize=9.5)
        style.scale(figure, levels, "share of the attention that was lost")
        return style.to_svg(figure, "heads", "Attention lost by every head, one map for each policy")


def spread_plot(results: ReplayResults) -> str:
    """SVG: how the retained mass of the heads is spread at the shown budget, one line for each policy."""
    rows = results.at(results.settings.shown_budget)
    with style.canvas(7.4, 0.8 + 0.3 * len(rows)) as figure:
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            look = style.look(0, row.policy)
            axes.hlines(place, min(row.mass_by_head), max(row.mass_by_head), color=look.color, linewidth=1)
            axes.hlines(place, *row.spread(), color=look.color, linewidth=5)
            axes.plot(
                float(np.mean(row.mass_by_head)), place, marker="o", color=look.color, mec=style.INK, mew=0.8, ms=6
            )
        axes.set_yticks(range(len(rows)), [row.policy for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("retained attention mass")
        return style.to_svg(figure, "spread", "Retained attention mass of the heads, one line for each policy")


def summary(results: ReplayResults, path: Path) -> None:
    """Write one picture, PNG or SVG by its suffix: mass by budget, and beside it what six of the policies held."""
    rows = [row for row in results.at(results.settings.shown_budget) if row.left is not None]
    distinct = {(row.retained_attention_mass, row.left): row for row in reversed(rows)}
    shown = [row for row in rows if row in distinct.values()][:6]
    with style.canvas(11.4, 4.4) as figure:
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)[0]
        axes = left.subplots()
        _by_budget(axes, results, lambda row: row.retained_attention_mass)
        axes.set_title("Retained attention mass", color=style.INK, pad=8)
        for panel, row in zip(_panels(right, len(shown), 3), shown, strict=True):
            _kept(panel, row, results.trace.tokens)
        right.supxlabel("step", fontsize=9.5)
        right.supylabel("position", fontsize=9.5)
        style.save(figure, path)


def _by_budget(axes: Axes, results: ReplayResults, value: Value) -> None:
    budgets = results.settings.budgets
    ends = list[style.End]()
    for names, rows in _distinct(results, value):
        look = style.look(len(ends), names[0])
        values = [value(row) for row in rows]
        axes.plot(
            [row.budget for row in rows],
            values,
            color=look.color,
            linestyle=look.line,
            linewidth=look.width,
            marker=look.marker,
            zorder=look.order,
        )
        ends.append(style.End(x=rows[-1].budget, y=values[-1], text=" = ".join(names), color=look.color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.minorticks_off()
    edge = 2 ** (0.04 * max(1.0, np.log2(budgets[-1] / budgets[0])))
    axes.set_xlim(budgets[0] / edge, budgets[-1] * edge)
    axes.set_xlabel("budget, tokens (log scale)")
    style.label_ends(axes, ends)


def _distinct(results: ReplayResults, value: Value) -> list[tuple[list[str], tuple[Row, ...]]]:
    """The policies with their rows; those with the same figure at every budget together, full left out."""
    found = list[tuple[list[str], tuple[Row, ...]]]()
    for name, rows in results.lines().items():
        if name == FULL:
            continue
        same = next((names for names, others in found if list(map(value, others)) == list(map(value, rows))), None)
        if same is None:
            found.append(([name], rows))
        else:
            same.append(name)
    return found


def _kept(axes: Axes, row: Row, tokens: int) -> None:
    """Cells by how much of them is kept, darker the more; the thin line is the newest position."""
    share, edges = kept_share(np.asarray(row.left), tokens)
    color = style.look(0, row.policy).color
    for (more_than, alpha), (up_to, _) in zip(SHADES, (*SHADES[1:], (1.0, 1.0)), strict=True):
        style.cells(axes, (share > more_than) & (share <= up_to), color, x=edges, y=edges, alpha=alpha)
    axes.plot([0, tokens], [0, tokens], color=style.INK, linewidth=0.7)
    axes.set_xlim(0, tokens)
    axes.set_ylim(-0.02 * tokens, tokens)
    axes.set_title(f"{row.policy}  {row.retained_attention_mass:.3f}", color=style.INK)
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        style.thousands(axis, 4)


def kept_share(left: Int64[np.ndarray, " tokens"], tokens: int) -> tuple[Float64[np.ndarray, "tall wide"], style.Edges]:
    """Positions against steps in at most `CELLS` cells each way: the share of a cell's positions that is held.

    A column stands for the step in its middle. The edges of rows and columns are the same.
    """
    edges = np.linspace(0, tokens, min(CELLS, tokens) + 1).round()
    middles = ((edges[:-1] + edges[1:]) / 2).astype(np.int64)
    positions = np.arange(tokens)[:, None]
    held = (positions <= middles) & (left[:, None] > middles)
    starts = edges[:-1].astype(np.int64)
    return np.add.reduceat(held, starts, axis=0, dtype=np.int64) / np.diff(edges)[:, None], edges


def lost(row: Row, trace: Source) -> NDArray[np.float64]:
    """What was not retained, by head and layer, NaN where the trace has no such head."""
    heads = sorted({head for _, head in trace.heads})
    grid = np.full((len(heads), len(trace.layers)), np.nan)
    for (layer, head), mass in zip(trace.heads, row.mass_by_head, strict=True):
        grid[heads.index(head), trace.layers.index(layer)] = 1 - mass
    return grid


def loss_levels(losses: NDArray[np.float64]) -> style.Edges:
    """Edges at 1, 2 and 5 of each decade, from what a twentieth of the values lies below to over all; 0 before them."""
    found = np.maximum(losses[~np.isnan(losses)], 0)
    steps = np.array([step * 10.0**decade for decade in range(-4, 1) for step in (1, 2, 5)])
    low, high = np.quantile(found, 0.05), found.max()
    first = max(0, int(np.searchsorted(steps, low, side="right")) - 1)
    last = int(np.searchsorted(steps, high))
    return np.array([0.0, *steps[first : max(last, first + 1) + 1]])


def _map(axes: Axes, grid: NDArray[np.float64], levels: NDArray[np.float64]) -> None:
    x, y = np.arange(grid.shape[1] + 1) - 0.5, np.arange(grid.shape[0] + 1) - 0.5
    level = np.clip(np.searchsorted(levels, grid, side="right") - 1, 0, len(levels) - 2)
    for index, color in enumerate(style.shades(len(levels) - 1)):
        style.cells(axes, (level == index) & ~np.isnan(grid), color, x=x, y=y)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[-1], y[0])
    style.thousands(axes.yaxis, 4)
    axes.grid(False)


def _layer_axis(axes: Axes, trace: Source) -> None:
    layers = trace.layers
    every = -(-len(layers) // 8)
    axes.set_xticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])


def _panels(figure: FigureBase, count: int, columns: int) -> list[Axes]:
    """So many panels with shared axes, numbered at the left and where none stands below."""
    lines, wide = -(-count // columns), min(columns, count)
    panels: list[Axes] = figure.subplots(lines, wide, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for axes in panels[count:]:
        axes.set_visible(False)
    for place, axes in enumerate(panels[:count]):
        axes.label_outer()
        axes.tick_params(labelbottom=place + wide >= count)
    return panels[:count]
