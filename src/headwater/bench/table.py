"""The table of a comparison, from its stored results: the same cells on a terminal and on the page.

Knows how a figure of the table follows from a row, and how it is written. Does not know engines or drawing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Container, Mapping, Sequence
from typing import IO

from headwater.bench.results import Results, Row

COLUMNS = (
    "policy",
    "perplexity before first eviction",
    "after it",
    "after, relative to full",
    "cache, steady state",
    "decode, steady state",
    "relative to its start",
    "turns completed",
)
NOTHING = "–"  # noqa: RUF001  (an en dash is what a table shows for "nothing to measure")


def steady_cache(row: Row) -> tuple[int, bool] | None:
    """Bytes of the cache at the end, and whether they still grow: by over 0.5 % in the last quarter of the turns."""
    sizes = row.cache_bytes
    if not sizes:
        return None
    quarter = max(1, len(sizes) // 4)
    earlier = sizes[:-quarter] or sizes
    return sizes[-1], max(sizes[-quarter:]) > 1.005 * max(earlier)


def steady_speed(row: Row) -> tuple[float, float | None] | None:
    """Median tokens/s of the later half of the samples, and that over the median of the first quarter."""
    speeds = [sample.tokens_per_s for sample in row.tokens_per_s]
    if not speeds:
        return None
    late = statistics.median(speeds[len(speeds) // 2 :])
    early = statistics.median(speeds[: max(1, len(speeds) // 4)])
    return late, late / early if len(speeds) > 1 else None


def cells(results: Results) -> list[tuple[str, ...]]:
    """One tuple of texts for every row, in the order of `COLUMNS`."""
    return [_cells(row, results.conversation.turns) for row in results.rows]


def _cells(row: Row, turns: int) -> tuple[str, ...]:
    cache, speed = steady_cache(row), steady_speed(row)
    return (
        row.name,
        figure(row.perplexity_before),
        figure(row.perplexity_after),
        NOTHING if row.perplexity_over_full is None else f"{row.perplexity_over_full:.2f} ×",  # noqa: RUF001
        NOTHING if cache is None else f"{size(cache[0])}, {'growing' if cache[1] else 'flat'}",
        NOTHING if speed is None else f"{figure(speed[0])} tokens/s",
        NOTHING if speed is None or speed[1] is None else f"{speed[1]:.2f} ×",  # noqa: RUF001
        f"{row.turns_completed} of {turns}" + ("" if row.complete else " (stopped early)"),
    )


def figure(value: float | None) -> str:
    """Three significant digits and more; a dash for nothing."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(count: int) -> str:
    """Bytes in a unit that reads well."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def machine_facts(hardware: Mapping[str, object], versions: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a measurement ran on, as names and texts."""
    memory = hardware.get("memory_bytes")
    return [
        ("CPU", f"{hardware.get('cpu')}, {hardware.get('cores')} cores"),
        ("Memory", size(memory) if isinstance(memory, int) else "unknown"),
        ("Accelerator", str(hardware.get("accelerator") or "none")),
        ("Platform", str(hardware.get("platform"))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def show(results: Results, out: IO[str] | None = None) -> None:
    """Print the table: drawn on a terminal, aligned plain text elsewhere."""
    target: IO[str] = out or sys.stdout
    grid(COLUMNS, cells(results), target)
    for row in results.rows:
        print(f"{row.name}: {row.stopped_because}", file=target)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], out: IO[str], *, groups: Container[int] = ()) -> None:
    """A table with its first column to the left and the others to the right; `groups` are the rows that begin one."""
    if out.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(show_edge=False, pad_edge=False)
        for index, column in enumerate(columns):
            drawn.add_column(column, justify="right" if index else "left", vertical="bottom")
        for index, row in enumerate(rows):
            drawn.add_row(*row, end_section=index + 1 in groups)
        Console(file=out).print(drawn)
        return
    widths = [max(len(line[index]) for line in (columns, *rows)) for index in range(len(columns))]
    for place, line in enumerate((columns, *rows)):
        if place - 1 in groups:
            print(file=out)
        parts = (text.rjust(widths[index]) if index else text.ljust(widths[0]) for index, text in enumerate(line))
        print("  ".join(parts).rstrip(), file=out)
