"""One look for every plot: colours that colour-blind readers can tell apart, and lines that differ without colour.

Knows matplotlib, which is imported on first use, and how its SVG becomes part of a page that follows the reader's light
or dark theme. Does not know what is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float64

from headwater.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#1b1f24", "#5b6570", "#d5dae0"
SERIES = ("#0072b2", "#d55e00", "#007a5a", "#9b4f96", "#8a6d00", "#c2185b", "#6b1238")
LABEL_POINTS = 8.5
DARK_INK, DARK_QUIET, DARK_GRID = "#e8eaed", "#a3adb8", "#3a424c"
DARK_SERIES = ("#56b4e9", "#ff9447", "#2fc796", "#d79bd3", "#e0c341", "#f48fb1", "#ffcfe0")


Edges = Float64[np.ndarray, " edges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one series is drawn; line and marker differ between series as well as colour."""

    color: str
    line: Any
    marker: str
    width: float = 1.7
    order: int = 2


_LINES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (10, 3)),
    (0, (3, 3)),
    (0, (8, 2, 1.5, 2, 1.5, 2)),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_NAMED = {
    "full": Look(color=INK, line=(0, (7, 3, 2, 3)), marker="D", width=1.1, order=3),
    "sliding-window": Look(color=SERIES[1], line=(0, (5, 1.5)), marker="s"),
    "streaming-llm": Look(color=SERIES[0], line="-", marker="o"),
    "streaming-llm-turns": Look(color=SERIES[2], line=(0, (1.5, 1.2)), marker="^"),
    "h2o": Look(color=SERIES[2], line=(0, (6, 2)), marker="^"),
    "scissorhands": Look(color=SERIES[3], line=(0, (6, 2, 1.5, 2)), marker="<"),
    "tova": Look(color=SERIES[4], line=(0, (10, 3)), marker="v"),
    "snapkv": Look(color=SERIES[5], line=(0, (3, 2)), marker="P"),
    "pyramidkv": Look(color=SERIES[6], line=(0, (8, 2, 1.5, 2, 1.5, 2)), marker="X"),
    "random": Look(color=QUIET, line=(0, (1.2, 2)), marker=".", width=1.4, order=1),
    "oracle": Look(color=INK, line="-", marker="*", width=1.1, order=3),
}


def look(index: int, name: str = "") -> Look:
    """The look of a row by its name, otherwise of the series with this index."""
    turn = index % len(SERIES)
    return _NAMED.get(name) or Look(color=SERIES[turn], line=_LINES[turn], marker=_MARKERS[turn])


def require_plots() -> None:
    """Raises MissingExtra unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report")


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure in the house's look, in inches."""
    require_plots()
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.edgecolor": QUIET,
        "axes.labelcolor": INK,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": QUIET,
        "ytick.color": QUIET,
        "text.color": INK,
        "legend.frameon": False,
        "lines.linewidth": 1.7,
        "lines.markersize": 4.5,
        "svg.fonttype": "path",
        "svg.hashsalt": "headwater",
    }
    with matplotlib.rc_context(settings):
        yield Figure(figsize=(width, height), layout="constrained")


def legend_above(axes: Axes, columns: int = 2) -> None:
    """A legend over the axes, where it can cover nothing."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=min(columns, len(labels)) or 1,
        handlelength=3.2,
        borderaxespad=0.2,
        columnspacing=1.6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a line, in the coordinates of its data, and what is written beside it."""

    x: float
    y: float
    text: str
    color: str


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Names beside the ends of their lines, to the right of the axes, moved apart where they would touch."""
    figure = axes.get_figure(root=True)
    if figure is None or not ends:
        return
    figure.draw_without_rendering()
    bottom, top = axes.get_window_extent().y0, axes.get_window_extent().y1
    line_height = 1.35 * LABEL_POINTS * figure.dpi / 72
    ordered = sorted(ends, key=lambda end: end.y)
    wanted = [float(axes.transData.transform((end.x, end.y))[1]) for end in ordered]
    for end, place in zip(ordered, apart(wanted, line_height), strict=True):
        axes.annotate(
            end.text,
            (end.x, end.y),
            xytext=(1.035, (place - bottom) / (top - bottom)),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_POINTS,
            color=end.color,
            arrowprops={
                "arrowstyle": "-",
                "color": end.color,
                "linewidth": 0.6,
                "alpha": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 3,
            },
        )


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """The places nearest to those wanted, ascending, that lie at least `gap` from one another."""
    blocks = list[tuple[float, int]]()
    for index, place in enumerate(wanted):
        mean, count = place - index * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        blocks.append((mean, count))
    flat = [mean for mean, count in blocks for _ in range(count)]
    return [place + index * gap for index, place in enumerate(flat)]


def shades(count: int) -> tuple[str, ...]:
    """So many colours from light to dark that keep their order without colour, and for colour-blind readers."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return tuple(to_hex(colormaps["cividis"](1 - index / max(1, count - 1))) for index in range(count))


def scale(figure: Figure, levels: Edges, label: str) -> None:
    """The colours of `shades` between the edges of the levels, as a strip above all panels."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    colors = ListedColormap(list(shades(len(levels) - 1)))
    mapped = ScalarMappable(norm=BoundaryNorm(list(levels), colors.N), cmap=colors)
    bar = figure.colorbar(mapped, ax=figure.axes, location="top", aspect=60, shrink=0.7, pad=0.02)
    bar.set_label(label, loc="left")
    bar.set_ticks(list(levels), labels=[f"{level:g}" for level in levels])
    bar.outline.set_visible(False)


def cells(
    axes: Axes, chosen: Bool[np.ndarray, "tall wide"], color: str, *, x: Edges, y: Edges, alpha: float = 1
) -> None:
    """The chosen cells of a grid as one shape, in which runs of neighbours along x are one rectangle.

    `x` and `y` are the edges of the columns and of the rows.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    padded = np.pad(chosen, ((0, 0), (1, 1)))
    rows, starts = np.nonzero(padded[:, 1:-1] & ~padded[:, :-2])
    _, stops = np.nonzero(padded[:, 1:-1] & ~padded[:, 2:])
    if not len(rows):
        return
    left, right, low, high = x[starts], x[stops + 1], y[rows], y[rows + 1]
    corners = np.stack([left, low, right, low, right, high, left, high, left, low], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(rows))
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=color, edgecolor="none", alpha=alpha, linewidth=0))


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a log axis, all digits where it spans less than one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs = (1.0, 2.0, 5.0) if high / low < 100 else (1.0, 3.0) if high / low < 3000 else (1.0,)
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0) if high / low < 6 else subs
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def thousands(axis: Any, most: int = 7) -> None:
    """Whole numbers with separators on an axis, at `most` so many."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def to_svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an `<svg>` element of a page: it scales, follows the theme, and its ids begin with `prefix`."""
    from html import escape

    raw = io.StringIO()
    figure.savefig(raw, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = raw.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?)\s+width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?)\s+height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    for color, variable in _VARIABLES.items():
        text = re.sub(re.escape(color), f"var(--{variable})", text, flags=re.IGNORECASE)
    return text


_VARIABLES = {INK: "ink", QUIET: "quiet", GRID: "grid", **{color: f"s{i}" for i, color in enumerate(SERIES)}}


def css_variables() -> tuple[str, str]:
    """Declarations of the colours for the light and for the dark theme."""
    light = zip(_VARIABLES.values(), (INK, QUIET, GRID, *SERIES), strict=True)
    dark = zip(_VARIABLES.values(), (DARK_INK, DARK_QUIET, DARK_GRID, *DARK_SERIES), strict=True)
    return tuple(" ".join(f"--{name}: {color};" for name, color in colors) for colors in (light, dark))  # type: ignore[return-value]


def save(figure: Figure, path: Any) -> None:
    """Write the figure as a file on a white ground, in the format of the path's suffix."""
    figure.savefig(path, dpi=160, facecolor="white", metadata={"Date": None} if str(path).endswith(".svg") else None)
