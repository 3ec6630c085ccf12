"""The tables and the picture of `docs/memory.md`, from the stored figures alone.

`python -m bench.memory_page` draws them again; `tests/bench/test_memory_page.py` holds the page to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.page import table, with_blocks
from headwater.bench import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "memory.md"
STORED = DOCS / "results" / "memory.json"
HORIZON = DOCS / "memory-horizon.png"


def blocks(results: dict[str, Any]) -> dict[str, str]:
    """What stands between the markers of the page, by the name of the marker."""
    return {
        "source": _source(results),
        "retrieval": _retrieval(results),
        "horizon": _horizon(results),
        "answers": _answers(results),
        "costs": _costs(results),
    }


def _source(results: dict[str, Any]) -> str:
    machine, versions, says = results["hardware"], results["versions"], results["recall_horizon_says"]
    return (
        f"{machine['cores']} cores of an {machine['cpu']}, Python {versions['python']}, SmolLM2-135M in float32, "
        f"{results['horizon_started'][:10]}. {says[0].upper()}{says[1:]}."
    )


def _retrieval(results: dict[str, Any]) -> str:
    bookings, locomo = (results["retrieval"][name] for name in ("bookings", "locomo"))
    lines = []
    for way in bookings:
        shown = (bookings[way]["all"], locomo[way]["single-hop"], locomo[way]["all"])
        lines.append([way, *(f"{each[name]:.3f}" for each in shown for name in ("recall_at_1", "recall_at_5", "mrr"))])
    texts = ("bookings", "single-hop", "all of LoCoMo")
    return table(["way", *(f"{text}, {name}" for text in texts for name in ("at 1", "at 5", "MRR"))], lines)


def _horizon(results: dict[str, Any]) -> str:
    ways = results["recall_horizon"]
    lines = []
    for way, by_distance in ways.items():
        lines.append([way, *(_told(each) for each in by_distance.values())])
    distances = next(iter(ways.values()))
    return table(["answered right (brought)", *(_place(int(distance)) for distance in distances)], lines)


def _told(each: dict[str, Any]) -> str:
    if not each["questions"]:
        return "none asked"
    right = f"{round(each['right'] * each['questions'])} of {each['questions']}"
    return right if each["brought"] is None else f"{right} ({round(each['brought'] * each['questions'])})"


def _place(distance: int) -> str:
    return f"{distance:,} tokens later" if distance else "still in the window"


def _answers(results: dict[str, Any]) -> str:
    lines = []
    for way, by_distance in results["recall_horizon"].items():
        for distance, each in by_distance.items():
            for answer in each["answers"][:1]:
                lines.append(f"- {way}, {_place(int(distance))}: {' '.join(answer.split())!r}")
    return "\n".join(lines)


def _costs(results: dict[str, Any]) -> str:
    lines = [
        ["a search over 10,000 passages", f"{results['search_ms_10000']:.1f} ms"],
        ["a search over 200,000 passages", f"{results['search_ms_200000']:.1f} ms"],
        ["the first search over 200,000", f"{results['search_ms_200000_first'] / 1000:.1f} s"],
        ["indexing", f"{results['indexed_per_s_200000']:,.0f} passages/s"],
        ["a passage on the disk", f"{results['bytes_per_passage_200000']:,.0f} bytes"],
        ["the journal, as a share of decoding", f"{results['journal_overhead']:.2%}"],
        ["a snapshot, against writing its bytes", f"{results['snapshot_over_write']:.2f}"],
        ["its file, against the bytes held", f"{results['snapshot_bytes_over_held']:.4f}"],
        [
            "a restore and its first token, against two decode steps and reading the file",
            f"{results['restore_over_bound']:.2f}",
        ],
    ]
    return table(["what", "measured"], lines)


def draw_horizon(results: dict[str, Any], path: Path) -> None:
    """The share answered right, and the share brought, by the distance of the fact."""
    ways = results["recall_horizon"]
    distances = [int(distance) for distance in next(iter(ways.values()))]
    with style.canvas(10.4, 3.6) as figure:
        panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
        for axes, what, title in zip(
            panels, ("right", "brought"), ("answered right", "brought before the question"), strict=True
        ):
            for index, (way, by_distance) in enumerate(ways.items()):
                values = [each[what] for each in by_distance.values()]
                if all(value is None for value in values):
                    continue
                look = style.look(index)
                axes.plot(
                    range(len(distances)),
                    [float("nan") if value is None else value for value in values],
                    color=look.color,
                    linestyle=look.line,
                    linewidth=look.width,
                    marker=look.marker,
                    label=way,
                )
            axes.set_xticks(range(len(distances)), ["in the window", *(f"{each:,}" for each in distances[1:])])
            axes.set_xlabel("tokens since the fact was said")
            axes.set_title(title, color=style.INK)
            axes.set_ylim(-0.03, 1.03)
        panels[0].set_ylabel("share of the questions")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        style.save(figure, path)


def main() -> None:
    """Draw the picture and write the tables into the page."""
    results = json.loads(STORED.read_text(encoding="utf-8"))
    draw_horizon(results, HORIZON)
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), blocks(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
