"""What it means to take policies through a trace, chunk by chunk.

Knows that the work has parts which do not look at one another, so that they can be done at the same time. Does not know
how a part is done: `rule_run`, `kernel_run`, `window_run` and `incremental_run` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Int32

from headwater.traces.result import Replay
from headwater.traces.trace import Chunk, Trace

Heavy = Int32[np.ndarray, "rows steps heavy"]
"""The positions of each step's largest weights, -1 past their end."""

_PARTS = 16


class Run(ABC):
    """One or more policies on their way through a trace."""

    parts: tuple[slice, ...]
    """The rows of each part."""

    @abstractmethod
    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        """Take one part through the next steps; `chunk` and `heavy` hold all rows."""

    @abstractmethod
    def results(self) -> list[Replay]:
        """What came out after the last chunk, one for each policy."""


def small_parts(trace: Trace) -> tuple[slice, ...]:
    """The rows in pieces small enough to keep several threads busy, none with rows of two layers."""
    most = max(1, trace.rows // _PARTS)
    return tuple(
        slice(first, min(first + most, rows.stop))
        for rows in trace.layer_rows
        for first in range(rows.start, rows.stop, most)
    )
