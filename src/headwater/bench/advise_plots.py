"""The pictures of an advice, drawn from its stored results alone.

Knows which figure goes on which axis. Does not know policies, pages or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headwater.bench import style
from headwater.bench.advise_choice import here
from headwater.bench.advise_results import CURVE, FULL, AdviseResults, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curve_plot(results: AdviseResults) -> str:
    """SVG: retained mass by budget, one line for each policy; its bend, and what is advised."""
    with style.canvas(7.4, 4.4) as figure:
        axes = figure.add_subplot()
        whole, ends = results.full, list[style.End]()
        for name in dict.fromkeys(row.policy for row in results.rows if row.policy != FULL):
            rows = sorted((row for row in results.rows if _on_curve(row, name)), key=lambda row: row.budget)
            _line(axes, ends, name, [(row.budget, row.retained_attention_mass) for row in (*rows, whole)], at=-2)
        _bend(axes, results)
        _advised(axes, results)
        budgets = [*results.subject.budgets, whole.budget]
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        axes.minorticks_off()
        axes.set_xlabel("budget, tokens (log scale); the last one holds the whole conversation")
        axes.set_ylabel("retained attention mass")
        style.label_ends(axes, ends)
        return style.to_svg(figure, "curve", "Retained attention mass by budget, one line for each policy")


def windows_plot(results: AdviseResults) -> str:
    """SVG: retained mass by recent window, for the policies where it can be set, at the budget of the advice."""
    advice = results.advice
    rows = [row for row in here(results.rows, advice.by, advice.budget) if "recent_window" in row.parameters]
    with style.canvas(7.4, 3.0) as figure:
        axes, ends = figure.add_subplot(), list[style.End]()
        for name in dict.fromkeys(row.policy for row in rows):
            own = sorted((row.recent_window or 0, row.retained_attention_mass) for row in rows if row.policy == name)
            _line(axes, ends, name, own)
        if advice.best.parameters.get("recent_window"):
            _ring(axes, advice.best.recent_window or 0, advice.best)
        windows = sorted({row.recent_window or 0 for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(window) for window in windows])
        axes.minorticks_off()
        axes.set_xlabel("recent window, tokens (log scale)")
        axes.set_ylabel("retained attention mass")
        style.label_ends(axes, ends)
        return style.to_svg(figure, "windows", "Retained attention mass by recent window, one line for each policy")


def _on_curve(row: Row, name: str) -> bool:
    return row.policy == name and row.role == CURVE


def _line(axes: Axes, ends: list[style.End], name: str, points: list[tuple[int, float]], at: int = -1) -> None:
    """A line, and its name beside the point `at`."""
    look, (x, y) = style.look(0, name), np.transpose(points)
    axes.plot(
        x,
        y,
        color=look.color,
        linestyle=look.line,
        linewidth=look.width,
        marker=look.marker,
        zorder=look.order,
    )
    ends.append(style.End(x=float(x[at]), y=float(y[at]), text=name, color=look.color))


def _bend(axes: Axes, results: AdviseResults) -> None:
    """The chord, and an upright line where the curve lies farthest above it."""
    first, last, found = results.advice.curve[0], results.advice.curve[-1], results.advice.bend
    axes.plot([first.budget, last.budget], [first.mass, last.mass], color=style.QUIET, linewidth=0.9, zorder=1)
    if found is None:
        return
    axes.axvline(found.budget, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate(
        f"bend, {found.budget:,}",
        (found.budget, 0),
        xycoords=("data", "axes fraction"),
        xytext=(5, 4),
        textcoords="offset points",
        fontsize=style.LABEL_POINTS,
        color=style.INK,
    )


def _advised(axes: Axes, results: AdviseResults) -> None:
    """Rings around what to take, and what of it runs live."""
    best, live = results.advice.best, results.advice.live
    for row in {best.policy: best, live.policy: live}.values():
        _ring(axes, row.budget, row)


def _ring(axes: Axes, x: int, row: Row) -> None:
    axes.plot(
        x,
        row.retained_attention_mass,
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor=style.INK,
        markeredgewidth=1.4,
        linestyle="none",
        zorder=5,
    )
