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

_PIECES = 8
"""Enough that threads end at about the same time, and few enough that each has rows to work on."""


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


def pieces(trace: Trace, *, by_layer: bool) -> tuple[slice, ...]:
    """The rows in pieces small enough to keep several threads busy; `by_layer`, none has rows of two layers."""
    most = max(1, trace.rows // _PIECES)
    groups = trace.layer_rows if by_layer else (slice(0, trace.rows),)
    return tuple(
        slice(first, min(first + most, rows.stop)) for rows in groups for first in range(rows.start, rows.stop, most)
    )


def layer_of(trace: Trace, rows: slice) -> int:
    """The depth of the layer that the first of the rows belongs to, counted from 0 among those of the trace."""
    return trace.layers.index(trace.heads[rows.start].layer)
