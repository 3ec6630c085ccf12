"""What an experiment on one long text measured, as frozen values, and how they come back from their JSON.

Knows the file format, the single source of the table and the page. Does not know engines, models or drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.bench.results import build, damaged, read_json

SCHEMA = "headwater/stream/1"
BUCKET_TOKENS = 1000
FAR_GAP = 65536
"""The gap at which sinks that were left behind are held against no gap at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Perplexity over the tokens at positions `[start, stop)` of the text."""

    start: int
    stop: int
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """One policy along the text, in buckets of 1,000 tokens (the first token has no prediction)."""

    name: str
    budget: int | None
    sinks: int
    block: int
    buckets: tuple[Bucket, ...]
    stopped_because: str
    cache_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One budget and number of sinks. `perplexity_after` covers the tokens after its own first eviction,
    `perplexity_same_tokens` those after the first eviction of the largest budget, the same for all."""

    budget: int
    sinks: int
    tokens: int
    perplexity_after: float
    perplexity_same_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Perplexity after the stream's positions moved on by `gap`, and its 95 % interval."""

    gap: int
    reindexed: bool
    perplexity: float
    interval: tuple[float, float]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for, and what follows from it. `shown_budget` and `shown_sinks` are those outside the ablation."""

    tokens: int
    budgets: tuple[int, ...]
    sinks: tuple[int, ...]
    gaps: tuple[int, ...]
    seed: int
    shown_budget: int
    shown_sinks: int
    ablation_tokens: int
    gap_fed_tokens: int
    gap_scored_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text that was read; `tokens` is all it has."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResults:
    """One experiment. `complete` is False when it was interrupted; parts that were not reached are empty."""

    schema: str = SCHEMA
    started: str
    duration_s: float = 0.0
    hardware: dict[str, str | int | None]
    versions: dict[str, str]
    model: str
    engine: str
    context_length: int
    seed: int
    settings: Settings
    text: Text
    complete: bool = False
    gap_reindexed_over_zero: float | None = None
    gap_left_over_zero: float | None = None
    choices: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
    ablation: tuple[Ablation, ...] = ()
    along: tuple[Along, ...] = ()
    long_run: Along | None = None


def with_ratios(results: StreamResults) -> StreamResults:
    """The results with the two ratios of the gap: the worst of all gaps when re-indexed, the far one when not."""
    by_key = {(gap.reindexed, gap.gap): gap.perplexity for gap in results.gaps}
    done, zero, left = [value for (reindexed, _), value in by_key.items() if reindexed], (True, 0), (False, 0)
    far = by_key.get((False, FAR_GAP))
    return replace(
        results,
        gap_reindexed_over_zero=max(done) / by_key[zero] if zero in by_key else None,
        gap_left_over_zero=far / by_key[left] if far is not None and left in by_key else None,
    )


def buckets(nll: NDArray[np.float64]) -> tuple[Bucket, ...]:
    """Perplexity by 1,000 tokens; `nll[i]` belongs to position `i + 1`. A last piece below 100 tokens is left out."""
    positions = np.arange(1, len(nll) + 1)
    made = list[Bucket]()
    for start in range(0, len(nll) + 1, BUCKET_TOKENS):
        inside = nll[(positions >= start) & (positions < start + BUCKET_TOKENS)]
        if len(inside) >= BUCKET_TOKENS // 10:
            stop = min(start + BUCKET_TOKENS, len(nll) + 1)
            made.append(Bucket(start=start, stop=stop, perplexity=float(np.exp(inside.mean()))))
    return tuple(made)


def interval(nll: NDArray[np.float64], seed: int, block: int = 32) -> tuple[float, float]:
    """95 % interval of the perplexity: 2,000 resamples of blocks of neighbouring tokens, which are not independent."""
    means = np.array([piece.mean() for piece in np.array_split(nll, max(1, len(nll) // block))])
    picks = np.random.default_rng(seed).integers(len(means), size=(2000, len(means)))
    low, high = np.quantile(np.exp(means[picks].mean(axis=1)), (0.025, 0.975))
    return float(low), float(high)


def read(path: Path) -> StreamResults:
    """The results of an experiment. Raises InputFileError for a foreign or damaged file."""
    value = read_json(path, SCHEMA)
    with damaged(path):
        return _results(value, path)


def _results(value: dict[str, Any], path: Path) -> StreamResults:
    long_run = value.get("long_run")
    parts = {
        "settings": build(Settings, _tuples(value.get("settings"), ("budgets", "sinks", "gaps")), path),
        "text": build(Text, value.get("text"), path),
        "choices": tuple(value.get("choices", ())),
        "gaps": tuple(build(Gap, _tuples(gap, ("interval",)), path) for gap in value.get("gaps", ())),
        "ablation": tuple(build(Ablation, cell, path) for cell in value.get("ablation", ())),
        "along": tuple(_along(row, path) for row in value.get("along", ())),
        "long_run": None if long_run is None else _along(long_run, path),
    }
    return build(StreamResults, {**value, **parts}, path)


def _along(value: dict[str, Any], path: Path) -> Along:
    made = tuple(build(Bucket, bucket, path) for bucket in value.get("buckets", ()))
    return build(Along, {**value, "buckets": made}, path)


def _tuples(value: Any, keys: Sequence[str]) -> Any:
    return {name: tuple(item) if name in keys else item for name, item in value.items()} if value else value
