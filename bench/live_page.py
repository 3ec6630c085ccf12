"""The tables and the picture of `docs/live.md`, from the stored figures alone.

`python -m bench.live_page` draws them again; `tests/bench/test_live_page.py` holds the page to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.page import table, with_blocks
from headwater.bench import style

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "live.md"
STORED = DOCS / "results" / "live.json"
PICTURE = DOCS / "live-needle.png"
ASKED = ("tokens_per_s_over_ring", "kept_sets_equal")


def blocks(results: dict[str, Any]) -> dict[str, str]:
    """What stands between the markers of the page, by the name of the marker."""
    out = {"source": _source(results), "speed": _speed(results)}
    if "positions" in results:
        out["positions"] = _positions(results)
    return out | {f"quality-{text}": _quality(each) for text, each in results["quality"].items()}


def _source(results: dict[str, Any]) -> str:
    machine, versions = results["hardware"], results["versions"]
    return (
        f"{machine['cores']} cores of an {machine['cpu']}, Python {versions['python']}, torch {versions['torch']}, "
        f"SmolLM2-135M in float32, {results['speed_started'][:10]}."
    )


def _speed(results: dict[str, Any]) -> str:
    ratio, speed, held = (results[name] for name in ("tokens_per_s_over_ring", "tokens_per_s", "bytes_held"))
    lines = [[name, f"{speed[name]:.1f}", f"{ratio[name]:.2f}", f"{held[name] / 2**20:.1f} MiB"] for name in ratio]
    return table(["policy", "tokens/s", "over the ring", "K and V"], lines)


def _quality(by_budget: dict[str, Any]) -> str:
    budgets = [name for name in by_budget if name != "full"]
    lines = []
    for name in by_budget[budgets[0]]:
        each = [by_budget[budget][name] for budget in budgets]
        shown = [f"{of['over_full']:.3f}" for of in each]
        masses = [f"{of['retained_mass']:.3f} ({of['retained_mass_replayed']:.3f})" for of in each]
        lines.append([name, *shown, *masses])
    head = [f"perplexity over full, {budget}" for budget in budgets]
    return table(["policy", *head, *(f"mass live (replayed), {budget}" for budget in budgets)], lines)


def _positions(results: dict[str, Any]) -> str:
    lines = []
    for name, ways in results["positions"].items():
        for how, each in ways.items():
            lines.append([f"{name}, {how}", f"{each['within']:.2f}", f"{each['past']:.2f}"])
    says = results["positions_says"]
    near, tokens = says["near"], says["tokens"]
    return table(["positions", f"perplexity up to token {near:,}", f"up to token {tokens:,}"], lines)


def draw_needle(results: dict[str, Any], path: Path) -> None:
    """A row a policy, a column a depth: the share of heads that hold the number, and how likely it is said."""
    found, depths = results["needle"], results["needle_says"]["depths"]
    names = list(found)
    with style.canvas(10.4, 0.42 * len(names) + 1.3) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, what, title in zip(
            panels,
            ("held", "nats"),
            ("share of the heads that hold the number", "its probability, a token"),
            strict=True,
        ):
            values = np.array([found[name][what] for name in names])
            values = np.exp(values) if what == "nats" else values
            axes.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=1)
            for (row, column), value in np.ndenumerate(values):
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black"
                )
            axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_yticks(range(len(names)), names)
            axes.grid(visible=False)
            axes.set_xlabel("depth of the number in the prompt")
            axes.set_title(title, color=style.INK)
        style.save(figure, path)


def main() -> None:
    """Draw the picture and write the tables into the page, as far as the figures are there."""
    results = json.loads(STORED.read_text(encoding="utf-8"))
    if "needle" in results:
        draw_needle(results, PICTURE)
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), blocks(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
