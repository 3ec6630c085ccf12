"""What a replay of policies over a trace found, as frozen values, and how they come back from their JSON.

Knows the file format, the single source of the table and the page, and how a row follows from a `Replay`. Does not know
where a trace comes from, nor drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.bench.results import build, damaged, read_json
from headwater.traces import Trace

SCHEMA = "headwater/replay/1"
FULL, RANDOM, ORACLE = "full", "random", "oracle"
"""What is no eviction policy but a measure for them: the ceiling, the floor, and the bound of one that sees ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The trace that was replayed. `heads[row]` is layer and head of each row; `facts` say where it comes from."""

    name: str
    tokens: int
    heads: tuple[tuple[int, int], ...]
    facts: dict[str, str]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have rows, ascending."""
        return tuple(sorted({layer for layer, _ in self.heads}))

    def head(self, row: int) -> str:
        """What a row is called."""
        layer, head = self.heads[row]
        return f"layer {layer}, head {head}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for, and what follows from it; None where the policies' own defaults hold.

    `shown_budget` and `shown_row` are those of the pictures that show one budget or one head.
    """

    trace: str
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    sinks: int | None
    recent_window: int | None
    seed: int | None
    tokens: int | None
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    shown_budget: int
    shown_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy at one budget.

    The three figures are over all heads, rounded as the specification says. `way` is how it was replayed.
    `state_bytes` is what the policy remembers at this budget, over all heads. `left`, of the shown head at the shown
    budget, is the step after which each position was evicted, or the number of tokens if it never was.
    """

    policy: str
    budget: int
    parameters: dict[str, int]
    needs: tuple[str, ...]
    way: str
    retained_attention_mass: float
    heavy_hitter_recall: float
    eviction_calls: int
    state_bytes_per_slot: int
    state_bytes: int
    mass_by_head: tuple[float, ...]
    recall_by_head: tuple[float, ...]
    left: tuple[int, ...] | None = None

    def spread(self) -> tuple[float, float]:
        """Retained mass at the tenth and ninetieth percentile of the heads."""
        low, high = np.quantile(self.mass_by_head, (0.1, 0.9))
        return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResults:
    """One run. `complete` is False when it was interrupted; `choices` are those made for the user."""

    schema: str = SCHEMA
    started: str
    duration_s: float = 0.0
    hardware: dict[str, str | int | None]
    versions: dict[str, str]
    settings: Settings
    trace: Source
    complete: bool = False
    choices: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    def at(self, budget: int) -> tuple[Row, ...]:
        """The rows of a budget, the highest retained mass first."""
        return ranked([row for row in self.rows if row.budget == budget])

    def lines(self) -> dict[str, tuple[Row, ...]]:
        """The rows of each policy by budget, ascending, in the order in which the policies were asked for."""
        names = dict.fromkeys(row.policy for row in self.rows)
        return {
            name: tuple(sorted((row for row in self.rows if row.policy == name), key=lambda row: row.budget))
            for name in names
        }


def ranked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The highest retained mass first; of equals, the higher recall, then the smaller state."""
    order = sorted(rows, key=lambda row: (-row.retained_attention_mass, -row.heavy_hitter_recall, row.state_bytes))
    return tuple(order)


def by_layer(row: Row, trace: Source) -> NDArray[np.float64]:
    """Retained mass of each layer, mean over its heads."""
    layer = np.array([layer for layer, _ in trace.heads])
    mass = np.asarray(row.mass_by_head)
    return np.array([mass[layer == each].mean() for each in trace.layers])


def source(trace: Trace, facts: dict[str, str]) -> Source:
    """What is stored of a trace."""
    return Source(
        name=trace.name, tokens=trace.tokens, heads=tuple((each.layer, each.head) for each in trace.heads), facts=facts
    )


def read(path: Path) -> ReplayResults:
    """The results of a replay. Raises InputFileError for a foreign or damaged file."""
    value = read_json(path, SCHEMA)
    with damaged(path):
        return _results(value, path)


def _results(value: dict[str, Any], path: Path) -> ReplayResults:
    trace = dict(value.get("trace") or {})
    trace["heads"] = tuple((layer, head) for layer, head in trace.get("heads", ()))
    parts = {
        "settings": build(Settings, _tuples(value.get("settings")), path),
        "trace": build(Source, trace, path),
        "choices": tuple(value.get("choices", ())),
        "rows": tuple(build(Row, _tuples(row), path) for row in value.get("rows", ())),
    }
    return build(ReplayResults, {**value, **parts}, path)


def _tuples(value: Any) -> Any:
    return {name: tuple(item) if isinstance(item, list) else item for name, item in (value or {}).items()}
