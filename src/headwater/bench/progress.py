"""How far a measurement is, on stderr: bars on a terminal, a few plain lines elsewhere.

Knows names and counts. Does not know what is measured. `rich` is imported when a bar is drawn for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Told by a measurement what it does."""

    def start(self, name: str, total: int) -> None:
        """A part called `name` begins; it has `total` steps."""

    def advance(self, steps: int = 1) -> None:
        """So many steps of the part are done."""


class Silent:
    """Shows nothing; for tests and for callers who do not want to be told."""

    def start(self, name: str, total: int) -> None:
        """Nothing."""

    def advance(self, steps: int = 1) -> None:
        """Nothing."""


class Lines:
    """A line when a part begins, and one at each quarter."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._name, self._total, self._done = out, "", 0, 0

    def start(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0

    def advance(self, steps: int = 1) -> None:
        before, self._done = self._done, self._done + steps
        if self._total and before * 4 // self._total != self._done * 4 // self._total:
            print(f"{self._name}: {self._done} of {self._total}", file=self._out, flush=True)


@contextmanager
def progress(out: IO[str] | None = None) -> Iterator[Progress]:
    """Bars when `out` (default: stderr) is a terminal, plain lines otherwise."""
    target: IO[str] = out or sys.stderr
    if not target.isatty():
        yield Lines(target)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    name = TextColumn("{task.description:<32}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(file=target)) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, name: str, total: int) -> None:
        self._task = self._bars.add_task(name, total=total)

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, steps)
