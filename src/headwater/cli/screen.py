"""What commands put on the terminal: columns on stdout, progress on stderr.

Knows terminals. Does not know what is printed. `rich` is imported when a bar is drawn for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from headwater.engines.modelstore import Progress, Step


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of cells, every column as wide as its widest cell."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def byte_bars() -> Iterator[Progress]:
    """A bar in megabytes for each step on a terminal, one line for each step elsewhere; on stderr."""
    if not sys.stderr.isatty():
        last = ""

        def line(step: Step) -> None:
            nonlocal last
            if step.name != last:
                click.echo(step.name, err=True)
            last = step.name

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # the stream itself, not "stderr": the conversion sends what the libraries write to stderr elsewhere
    screen = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    with Progress(*columns, console=screen) as bars:
        tasks: dict[str, Any] = {}

        def bar(step: Step) -> None:
            if step.name not in tasks:
                for name in tasks:
                    bars.update(tasks[name], total=1, completed=1)
                tasks[step.name] = bars.add_task(step.name, total=step.total or None, size="")
            size = f"{step.done / 1e6:.0f} of {step.total / 1e6:.0f} MB" if step.total else ""
            bars.update(tasks[step.name], completed=step.done, size=size)

        yield bar
        for name in tasks:
            bars.update(tasks[name], total=1, completed=1)
