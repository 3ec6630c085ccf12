"""What an advice rests on, as frozen values, and how they come back from their JSON.

Knows the file format, the single source of the advice, the table and the page. Does not know engines, models, how a
choice is made, or drawing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.bench.results import Source, build, damaged, read_json

SCHEMA = "headwater/advise/1"
FULL, RANDOM = "full", "random"
"""No policies to take but measures for them: the ceiling and the floor."""

CURVE, FIT, WINDOW = "curve", "fit", "window"
"""What a row is for: the curve over the budgets, the budget that fills the memory, the sweep of recent windows."""

BY_BUDGET, BY_MEMORY, BY_BEND, BY_LARGEST = "budget", "memory", "bend", "largest"
"""What decided the budget: the user, the user's memory, the bend of the curve, or nothing but the size, without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy at one budget.

    `recent_window` is how many of the newest positions it always keeps, None where it promises none. `live` says that
    it runs on a live cache today. Mass and recall are over all heads, `mass_low` and `mass_high` the tenth and the
    ninetieth percentile of the heads. `cache_bytes` are K and V of what it holds, one token more than the budget while
    a token joins; `state_bytes` what it remembers beside.
    """

    policy: str
    budget: int
    role: str
    parameters: dict[str, int]
    recent_window: int | None
    live: bool
    retained_attention_mass: float
    heavy_hitter_recall: float
    mass_low: float
    mass_high: float
    eviction_calls: int
    cache_bytes: int
    state_bytes: int
    way: str

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the best policy retains at a budget."""

    budget: int
    policy: str
    mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bend:
    """Where the curve bends, and how far above its chord it lies there, in mass."""

    budget: int
    above: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to take: the best of all, and the best of those that run live today; `most` is what keeps most.

    The best is the cheapest of those that keep next to as much as that one. `by` says what decided the budget; where it
    was the memory, every policy has a budget of its own and `budget` is None. `floor` is the random choice beside them.
    `curve` ends with the whole conversation.
    """

    by: str
    budget: int | None
    best: Row
    live: Row
    most: Row
    floor: Row
    curve: tuple[Point, ...]
    bend: Bend | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for; None where nothing was said."""

    budget: int | None = None
    memory_bytes: int | None = None
    sinks: int | None = None
    turns: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is advised on, known before anything runs.

    `used_tokens` and `used_turns` are what is read of the conversation, whose own size is in the source. Of these the
    system prompt with its template takes `head_tokens`; `pinned_tokens` are what streaming-llm pins, the sinks where
    those are more. `budgets` are those of the curve, `windows` the recent windows tried. `whole_fits` says that the
    memory asked for holds the whole conversation. `choices` are those made for the user.
    """

    started: str
    hardware: dict[str, str | int | None]
    model: str
    engine: str
    context_length: int
    layers: int
    heads: int
    kv_bytes_per_token: int
    conversation: Source
    used_tokens: int
    used_turns: int
    head_tokens: int
    pinned_tokens: int
    asked: Asked
    budgets: tuple[int, ...]
    windows: tuple[int, ...]
    whole_fits: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseResults:
    """One run."""

    schema: str = SCHEMA
    subject: Subject
    versions: dict[str, str]
    duration_s: float
    rows: tuple[Row, ...]
    advice: Advice

    @property
    def full(self) -> Row:
        """The row that keeps everything."""
        return next(row for row in self.rows if row.policy == FULL)


def read(path: Path) -> AdviseResults:
    """The results of an advice. Raises InputFileError for a foreign or damaged file."""
    value = read_json(path, SCHEMA)
    with damaged(path):
        return _results(value, path)


def _results(value: dict[str, Any], path: Path) -> AdviseResults:
    parts = {
        "subject": _subject(value["subject"], path),
        "rows": tuple(build(Row, row, path) for row in value["rows"]),
        "advice": _advice(value["advice"], path),
    }
    return build(AdviseResults, {**value, **parts}, path)


def _subject(value: dict[str, Any], path: Path) -> Subject:
    parts = {
        "conversation": build(Source, value["conversation"], path),
        "asked": build(Asked, value["asked"], path),
        **{name: tuple(value[name]) for name in ("budgets", "windows", "choices")},
    }
    return build(Subject, {**value, **parts}, path)


def _advice(value: dict[str, Any], path: Path) -> Advice:
    bend = value["bend"]
    parts = {
        **{name: build(Row, value[name], path) for name in ("best", "live", "most", "floor")},
        "curve": tuple(build(Point, point, path) for point in value["curve"]),
        "bend": None if bend is None else build(Bend, bend, path),
    }
    return build(Advice, {**value, **parts}, path)
