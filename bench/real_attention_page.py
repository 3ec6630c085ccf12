"""The tables and pictures of `docs/real-attention.md`, from the stored figures alone.

`python -m bench.real_attention_page` draws them again; `tests/bench/test_real_attention.py` holds the page to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.page import table, with_blocks
from headwater.bench import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "real-attention.md"
STORED = DOCS / "results" / "real_attention.json"
WHERE, MASS = DOCS / "real-attention-where.png", DOCS / "real-attention-mass.png"
PARTS = {
    "first": "the first token",
    "other_sinks": "the next three",
    "recent": "the last 64",
    "own": "itself",
    "elsewhere": "elsewhere",
}
SHOWN_BUDGET = 256


def blocks(results: dict[str, Any]) -> dict[str, str]:
    """What stands between the markers of the page, by the name of the marker."""
    return {
        "source": _source(results),
        "where": _where(results),
        "mass": _mass(results),
        "ranking": _ranking(results),
        "agreement": _agreement(results),
        "bound": _bound(results),
    }


def _where(results: dict[str, Any]) -> str:
    lines = [[text, *(f"{np.mean(parts[part]):.1%}" for part in PARTS)] for text, parts in results["where"].items()]
    return table(["text", *PARTS.values()], lines)


def _mass(results: dict[str, Any]) -> str:
    texts = list(results["replay"])
    names = list(results["replay"]["book"])
    budget = str(SHOWN_BUDGET)

    def cell(text: str, name: str) -> str:
        found = results["replay"][text].get(name)
        return "" if found is None else f"{found[budget]['retained_attention_mass']:.3f}"

    return table(["policy", *texts], [[f"`{name}`", *(cell(text, name) for text in texts)] for name in names])


def plain(results: dict[str, Any], text: str) -> list[str]:
    """The policies at their defaults, without the rows that protect sinks and without pyramidkv, which is snapkv on a
    trace of one layer."""
    return [name for name in results["replay"][text] if "sinks" not in name and name != "pyramidkv"]


def ranked(results: dict[str, Any], text: str, budget: int) -> list[str]:
    """The policies by retained mass, best first."""
    rows = results["replay"][text]
    return sorted(plain(results, text), key=lambda name: -rows[name][str(budget)]["retained_attention_mass"])


def agreement(results: dict[str, Any], text: str, budget: int) -> float:
    """Kendall's tau between the ranking on the canonical trace and that on a text: 1 the same, -1 the reverse."""
    order = ranked(results, text, budget)
    places = [order.index(name) for name in ranked(results, "canonical", budget)]
    pairs = [np.sign(later - place) for index, place in enumerate(places) for later in places[index + 1 :]]
    return float(np.mean(pairs))


def _ranking(results: dict[str, Any]) -> str:
    orders = {text: ranked(results, text, SHOWN_BUDGET) for text in results["replay"]}
    lines = [
        [str(place + 1), *(f"`{order[place]}`" for order in orders.values())] for place in range(len(orders["book"]))
    ]
    return table(["place", *orders], lines)


def _agreement(results: dict[str, Any]) -> str:
    lines = [
        [text, *(f"{agreement(results, text, budget):+.2f}" for budget in results["budgets"])]
        for text in results["where"]
    ]
    return table(["text", *(f"budget {budget}" for budget in results["budgets"])], lines)


def _bound(results: dict[str, Any]) -> str:
    """How much of the way from random to the bound a policy goes, on the heads where the bound was sought."""
    names = [name for name in plain(results, "book") if name != "random"]

    def share(text: str, name: str) -> str:
        mass = results["bound"][text]
        return f"{(mass[name] - mass['random']) / (mass['oracle'] - mass['random']):.0%}"

    lines = [[f"`{name}`", *(share(text, name) for text in results["bound"])] for name in names]
    lines.append(["the bound itself", *(f"{mass['oracle']:.3f}" for mass in results["bound"].values())])
    return table(["policy", *results["bound"]], lines)


def _source(results: dict[str, Any]) -> str:
    machine = results["hardware"]
    texts = "; ".join(f"{name}: {facts['what']}" for name, facts in results["texts"].items())
    return (
        f"{results['model']}, float32, {results['tokens']:,} tokens of each text, all layers and heads, recorded in "
        f"float16 on {machine['cores']} cores of an {machine['cpu']}, {results['started'][:10]}. Texts: {texts}."
    )


def draw_where(results: dict[str, Any], path: Path) -> None:
    """Where the mass goes, layer by layer, one panel a text."""
    with style.canvas(10.4, 3.4) as figure:
        panels: list[Axes] = list(figure.subplots(1, len(results["where"]), sharey=True))
        colors = (style.SERIES[0], style.SERIES[3], style.SERIES[1], style.SERIES[4], style.GRID)
        for axes, (text, parts) in zip(panels, results["where"].items(), strict=True):
            floor = np.zeros(len(parts["first"]))
            for color, part in zip(colors, PARTS, strict=True):
                values = np.asarray(parts[part])
                axes.bar(np.arange(len(values)), values, bottom=floor, width=0.92, color=color, label=PARTS[part])
                floor = floor + values
            axes.set_title(text, color=style.INK)
            axes.set_xlabel("layer")
            axes.set_ylim(0, 1)
        panels[0].set_ylabel("share of the attention")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        style.save(figure, path)


def draw_mass(results: dict[str, Any], path: Path) -> None:
    """Retained mass by budget, the canonical trace beside the real ones."""
    with style.canvas(12.4, 3.9) as figure:
        panels: list[Axes] = list(figure.subplots(1, len(results["replay"]), sharey=True))
        for axes, (text, rows) in zip(panels, results["replay"].items(), strict=True):
            for index, (name, by_budget) in enumerate(rows.items()):
                if "sinks" in name:
                    continue
                look = style.look(index, name)
                axes.plot(
                    [int(budget) for budget in by_budget],
                    [each["retained_attention_mass"] for each in by_budget.values()],
                    color=look.color,
                    linestyle=look.line,
                    linewidth=look.width,
                    marker=look.marker,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(results["budgets"], [str(budget) for budget in results["budgets"]])
            axes.minorticks_off()
            axes.set_title(text, color=style.INK)
            axes.set_xlabel("budget, tokens")
        panels[0].set_ylabel("retained attention mass")
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        style.save(figure, path)


def main() -> None:
    """Draw the pictures and write the tables into the page."""
    results = json.loads(STORED.read_text(encoding="utf-8"))
    draw_where(results, WHERE)
    draw_mass(results, MASS)
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), blocks(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
