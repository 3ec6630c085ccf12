"""What a comparison measured, as frozen values, and their JSON.

Knows the file format, which is the single source of every table and page, and how the figures of a row follow from its
turns. Does not know engines, models or drawing.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import HeadwaterError, InputFileError

SCHEMA = "headwater/compare/1"
END = "the end of the conversation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn: what its text cost, and the cache when its last token had been fed.

    `turn` counts messages from 1, questions and answers. `nll` is the sum of negative natural-log probabilities over
    the `tokens` of its text. `evicted` is how many tokens of the stream had left for good.
    """

    turn: int
    nll: float
    tokens: int
    seen: int
    held: int
    cache_bytes: int
    evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Single-token steps timed at one place: tokens/s from the median step."""

    turn: int
    seen: int
    held: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the cache held after a turn: half-open ranges of positions."""

    turn: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy over the conversation. What comes up to `duration_s` is measured; `summarise` computes the rest."""

    name: str
    rule: str
    turns: tuple[Turn, ...] = ()
    tokens_per_s: tuple[Speed, ...] = ()
    kept: tuple[Kept, ...] = ()
    complete: bool = False
    stopped_because: str = ""
    duration_s: float = 0.0
    turns_completed: int = 0
    first_eviction_turn: int | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    perplexity_over_full: float | None = None
    perplexity_over_full_interval: tuple[float, float] | None = None
    cache_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for."""

    budget_tokens: int
    sinks: int
    policies: tuple[str, ...]
    limit_tokens: int
    turns: int | None
    system: str | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The conversation that was read, and its size in turns and in tokens with the template."""

    name: str
    sha256: str
    attribution: str
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One comparison. `head_tokens` is the system prompt with its template; `choices` are those made for the user."""

    schema: str = SCHEMA
    started: str
    hardware: dict[str, str | int | None]
    versions: dict[str, str]
    model: str
    engine: str
    context_length: int
    head_tokens: int
    pinned_tokens: int
    seed: int
    settings: Settings
    conversation: Source
    choices: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()


def perplexity(turns: Sequence[Turn]) -> float | None:
    """exp(mean negative log-probability) over the tokens of the turns; None when there are none, or no finite value."""
    tokens = sum(turn.tokens for turn in turns)
    if not tokens:
        return None
    mean = math.fsum(turn.nll for turn in turns) / tokens
    return math.exp(mean) if math.isfinite(mean) and mean < 700 else None


def summarise(rows: Sequence[Row], *, limit_tokens: int, seed: int) -> tuple[Row, ...]:
    """Rows with the figures that follow from their turns.

    "before" are the turns scored whole while the row had not evicted anything, "after" all later ones. A row that never
    evicts is split where the first of the other rows evicts, so its figures cover the turns the comparison is about.
    """
    full = next((row for row in rows if row.name == "full"), None)
    firsts = [turn for row in rows if (turn := first_eviction(row)) is not None]
    split = min(firsts, default=None)
    return tuple(_summary(row, full, split, limit_tokens, seed) for row in rows)


def first_eviction(row: Row) -> int | None:
    """The first assistant turn that was scored with something evicted."""
    return next((turn.turn for turn in row.turns if turn.evicted), None)


def _summary(row: Row, full: Row | None, split: int | None, limit_tokens: int, seed: int) -> Row:
    own = first_eviction(row)
    start = own if row.name != "full" else split
    before = [turn for turn in row.turns if start is None or turn.turn < start]
    after = [turn for turn in row.turns if start is not None and turn.turn >= start]
    ratio, interval = _over(after, full.turns if full else (), seed)
    return replace(
        row,
        first_eviction_turn=own,
        perplexity_before=perplexity(before),
        perplexity_after=perplexity(after),
        perplexity_over_full=ratio,
        perplexity_over_full_interval=interval,
        cache_bytes=tuple(turn.cache_bytes for turn in row.turns),
        turns_completed=_completed(row, limit_tokens),
    )


def _completed(row: Row, limit_tokens: int) -> int:
    """Turns a real session would have completed: for a row that never evicts, those that fit below the limit."""
    if row.name != "full":
        return row.turns[-1].turn if row.turns else 0
    answers = [turn.turn for turn in row.turns if turn.seen <= limit_tokens]
    questions = [turn.turn - 1 for turn in row.turns if turn.seen - turn.tokens <= limit_tokens]
    return max([0, *answers, *questions])


def _over(turns: Sequence[Turn], full: Sequence[Turn], seed: int) -> tuple[float | None, tuple[float, float] | None]:
    """Perplexity over `full`'s on the turns both have, and its 95 % interval: 2,000 paired resamples of the turns."""
    reference = {turn.turn: turn for turn in full}
    pairs = [(turn, reference[turn.turn]) for turn in turns if turn.turn in reference]
    if not pairs:
        return None, None
    ours, theirs = perplexity([ours for ours, _ in pairs]), perplexity([theirs for _, theirs in pairs])
    if ours is None or theirs is None:
        return None, None
    gap = np.array([ours.nll - theirs.nll for ours, theirs in pairs])
    tokens = np.array([ours.tokens for ours, _ in pairs], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(pairs), size=(2000, len(pairs)))
    ratios = np.exp(gap[picks].sum(axis=1) / tokens[picks].sum(axis=1))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return ours / theirs, (float(low), float(high))


def write_json(path: Path, value: object) -> None:
    """Write a dataclass as JSON, whole or not at all. Raises HeadwaterError when the file cannot be written."""
    write_text(path, to_json(value) + "\n")


def to_json(value: object) -> str:
    """A dataclass as JSON, one line to a value; numbers that stand in a row stay on one line."""
    text = json.dumps(asdict(value), indent=1, allow_nan=False, ensure_ascii=False)  # type: ignore[call-overload]
    return re.sub(r"\[\n([\d\s,.eE+-]+)\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def prepare(folder: Path) -> None:
    """Make the folder, so that a measurement does not find out at its end that it cannot be stored."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HeadwaterError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another folder"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; what was there stays until the new one is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise HeadwaterError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from error


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """The JSON object in a results file. Raises InputFileError when it is none, or of another schema."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: not a results file ({error})") from error
    given = value.get("schema") if isinstance(value, dict) else None
    if given != schema:
        raise InputFileError(f"{path}: not a results file of this kind: its schema is {given!r}, expected {schema!r}")
    return value


def build(kind: type[Any], value: object, path: Path) -> Any:
    """A dataclass from its JSON object. Raises InputFileError naming the first key that is missing or unknown."""
    if not isinstance(value, dict):
        raise InputFileError(f"{path}: expected an object for {kind.__name__}, got {type(value).__name__}")
    names = [field.name for field in fields(kind)]
    for key in value:
        if key not in names:
            raise InputFileError(f"{path}: unknown key {key!r} in {kind.__name__}; known: {', '.join(names)}")
    try:
        return kind(**value)
    except TypeError as error:
        raise InputFileError(f"{path}: {kind.__name__}: {error}; the file is not complete") from error


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turns what a value of the wrong shape raises into an InputFileError that names the file."""
    try:
        yield
    except InputFileError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputFileError(f"{path}: the file is not complete ({type(error).__name__}: {error})") from error


def read(path: Path) -> Results:
    """The results of a comparison. Raises InputFileError for a foreign or damaged file."""
    value = read_json(path, SCHEMA)
    with damaged(path):
        return _results(value, path)


def _results(value: dict[str, Any], path: Path) -> Results:
    settings = dict(value.get("settings") or {})
    settings["policies"] = tuple(settings.get("policies", ()))
    rows = tuple(_read_row(row, path) for row in value.get("rows", ()))
    parts = {
        "settings": build(Settings, settings, path),
        "conversation": build(Source, value.get("conversation"), path),
        "choices": tuple(value.get("choices", ())),
        "rows": rows,
    }
    return build(Results, {**value, **parts}, path)


def _read_row(value: dict[str, Any], path: Path) -> Row:
    interval = value.get("perplexity_over_full_interval")
    kept = [{**item, "ranges": tuple((start, stop) for start, stop in item["ranges"])} for item in value["kept"]]
    parts = {
        "turns": tuple(build(Turn, turn, path) for turn in value["turns"]),
        "tokens_per_s": tuple(build(Speed, speed, path) for speed in value["tokens_per_s"]),
        "kept": tuple(build(Kept, item, path) for item in kept),
        "perplexity_over_full_interval": None if interval is None else tuple(interval),
        "cache_bytes": tuple(value["cache_bytes"]),
    }
    return build(Row, {**value, **parts}, path)
