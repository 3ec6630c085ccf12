"""The experiment on one long text: perplexity along it, sinks against budgets, and the gap that re-indexing closes.

Knows what is fed, skipped and scored, and in which order. Does not know how a window evicts, nor how a page is drawn.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwater.bench import stream_report
from headwater.bench.conversation import decode
from headwater.bench.machine import hardware, now, versions
from headwater.bench.progress import Progress, Silent, progress
from headwater.bench.results import prepare, write_json, write_text
from headwater.bench.stream_results import (
    Ablation,
    Along,
    Gap,
    Settings,
    StreamResults,
    Text,
    buckets,
    interval,
    read,
    with_ratios,
)
from headwater.bench.style import require_plots
from headwater.engines import open_engine
from headwater.engines.base import Engine, Stream
from headwater.errors import HeadwaterError, InputFileError, UsageError
from headwater.policies import Window

BUDGETS, SINKS, GAPS = (64, 128, 256, 512), (0, 1, 2, 4, 8), (0, 8192, 16384, 65536, 1_048_576)
ABLATION_TOKENS, GAP_SCORED, CHUNK = 2048, 512, 256
LONG_LENGTHS = 3
"""The long run is made when more than this many trained lengths of text are asked for."""

Store = Callable[[StreamResults], None]


def run(
    *,
    model: str,
    text: Path,
    engine: str = "transformers",
    output: Path = Path("report/stream.json"),
    tokens: int = 8192,
    budgets: tuple[int, ...] = BUDGETS,
    sinks: tuple[int, ...] = SINKS,
    gaps: tuple[int, ...] = GAPS,
    seed: int = 0,
) -> int:
    """Run the experiment on the first `tokens` tokens of a text file; write the JSON, and a page beside it.

    Returns the exit code: 0, or 130 after Ctrl-C, when the JSON holds what was measured until then. Before any work,
    raises InputFileError for a file that is not text or too short, UsageError and BudgetError for unusable values.
    """
    require_plots()
    numbers = plan(tokens=tokens, budgets=budgets, sinks=sinks, gaps=gaps, seed=seed)
    try:
        raw = text.read_bytes()
    except OSError as error:
        raise InputFileError(f"{text}: cannot be read ({error.strerror or error})") from error
    words = decode(raw, str(text))
    prepare(output.parent)
    opened = open_engine(model, engine=engine)
    stored = list[StreamResults]()

    def store(measured: StreamResults) -> None:
        write_json(output, measured)
        stored.append(measured)

    try:
        ids = opened.encode(words)
        read_text = Text(name=text.name, sha256=hashlib.sha256(raw).hexdigest(), tokens=len(ids))
        with progress() as bars:
            experiment(opened, ids, read_text, numbers, engine_name=engine, progress=bars, store=store, tell=_tell)
    except KeyboardInterrupt:
        left = f"what was measured is in {output}; no page was drawn from it" if stored else "nothing was measured yet"
        _tell(f"Interrupted; {left}")
        return 130
    finally:
        opened.close()
    measured = read(output)
    page = output.with_suffix(".html")
    write_text(page, stream_report.page(measured))
    stream_report.show(measured)
    print(f"\nResults: {output}\nReport:  {page}")
    return 0


def plan(*, tokens: int, budgets: Sequence[int], sinks: Sequence[int], gaps: Sequence[int], seed: int) -> Settings:
    """The settings with all that follows from them. Raises UsageError or BudgetError when they do not fit together."""
    for name, values in (("budgets", budgets), ("sinks", sinks), ("gaps", gaps)):
        if not values:
            raise UsageError(f"{name}: give at least one number")
        if len(set(values)) != len(values):
            raise UsageError(f"{name}: a number is given twice in {', '.join(map(str, values))}")
    if min(gaps) < 0:
        raise UsageError(f"gaps must be at least 0, got {min(gaps)}")
    for budget in budgets:
        for count in sinks:
            Window(budget=budget, pins=count)
    shown = 256 if 256 in budgets else max(budgets)
    settings = Settings(
        tokens=tokens,
        budgets=tuple(sorted(budgets)),
        sinks=tuple(sorted(sinks)),
        gaps=tuple(sorted({0, *gaps})),
        seed=seed,
        shown_budget=shown,
        shown_sinks=4 if 4 in sinks else max(sinks),
        ablation_tokens=min(tokens, max(ABLATION_TOKENS, 2 * max(budgets))),
        gap_fed_tokens=2 * shown,
        gap_scored_tokens=GAP_SCORED,
    )
    needed = max(2 * max(budgets), settings.gap_fed_tokens + settings.gap_scored_tokens)
    if tokens < needed:
        raise UsageError(f"tokens must be at least {needed} for a largest budget of {max(budgets)}, got {tokens}")
    return settings


def experiment(
    engine: Engine,
    ids: Sequence[int],
    text: Text,
    settings: Settings,
    *,
    engine_name: str = "",
    progress: Progress | None = None,
    store: Store | None = None,
    tell: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StreamResults:
    """Measure every part; `store` is called with what there is after each of them."""
    if len(ids) < settings.tokens:
        raise InputFileError(f"{text.name}: {len(ids)} tokens of text, {settings.tokens} were asked for; ask for fewer")
    bench = _Bench(engine=engine, ids=list(ids[: settings.tokens]), settings=settings, clock=clock)
    bench.progress = progress or Silent()
    measured = StreamResults(
        started=now(),
        hardware=hardware(),
        versions=versions(),
        model=engine.name,
        engine=engine_name,
        context_length=engine.context_length,
        seed=settings.seed,
        settings=settings,
        text=text,
        choices=_choices(settings, engine),
    )
    if tell:
        tell(stream_report.header(measured))
    begun = clock()
    parts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("gaps", bench.gaps),
        ("ablation", bench.ablation),
        ("along", bench.along),
        ("long_run", bench.long_run),
    )
    for name, part in parts:
        found: dict[str, object] = {name: part()}
        measured = with_ratios(replace(measured, **found, duration_s=clock() - begun))  # pyright: ignore[reportArgumentType]
        measured = replace(measured, complete=name == parts[-1][0])
        if store:
            store(measured)
    return measured


def _choices(settings: Settings, engine: Engine) -> tuple[str, ...]:
    made = [
        *engine.choices,
        f"outside the ablation: budget {settings.shown_budget}, sinks {settings.shown_sinks}",
        f"the ablation reads the first {settings.ablation_tokens:,} tokens",
    ]
    if not _is_long(settings, engine):
        least = LONG_LENGTHS * engine.context_length
        made.append(f"no long run: it needs more than {LONG_LENGTHS} trained lengths, {least:,} tokens")
    return tuple(made)


def _is_long(settings: Settings, engine: Engine) -> bool:
    return settings.tokens > LONG_LENGTHS * engine.context_length


@dataclass(slots=True, kw_only=True)
class _Bench:
    """The four measurements over one text."""

    engine: Engine
    ids: list[int]
    settings: Settings
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Silent)

    def gaps(self) -> tuple[Gap, ...]:
        """The window full and slid, then moved on by the gap, then the next tokens scored: re-indexed, and left."""
        settings = self.settings
        fed, scored = settings.gap_fed_tokens, settings.gap_scored_tokens
        window = Window.of(settings.shown_budget, settings.shown_sinks)
        self.progress.start("gap", 2 * len(settings.gaps) * scored)
        found = list[Gap]()
        for reindexed in (True, False):
            for gap in settings.gaps:
                stream = self.engine.open(window, reindex=reindexed)
                stream.feed(self.ids[:fed])
                if gap:
                    stream.skip(gap)
                nll = self._score(stream, self.ids[fed : fed + scored])
                stream.close()
                found.append(
                    Gap(
                        gap=gap,
                        reindexed=reindexed,
                        perplexity=float(np.exp(nll.mean())),
                        interval=interval(nll, settings.seed),
                        tokens=len(nll),
                    )
                )
        return tuple(found)

    def ablation(self) -> tuple[Ablation, ...]:
        """Every number of sinks with every budget, one token leaving for each that comes."""
        settings = self.settings
        ids = self.ids[: settings.ablation_tokens]
        cells = [(budget, sinks) for budget in settings.budgets for sinks in settings.sinks]
        self.progress.start("sinks and budgets", len(cells) * (len(ids) - 1))
        found = list[Ablation]()
        for budget, sinks in cells:
            stream = self.engine.open(Window(budget=budget, pins=sinks))
            nll = self._read(stream, ids)
            stream.close()
            own, same = nll[budget:], nll[max(settings.budgets) :]
            found.append(
                Ablation(
                    budget=budget,
                    sinks=sinks,
                    tokens=len(own),
                    perplexity_after=float(np.exp(own.mean())),
                    perplexity_same_tokens=float(np.exp(same.mean())),
                )
            )
        return tuple(found)

    def along(self) -> tuple[Along, ...]:
        """The three policies along the text, up to the trained length; the windows go on when there is no long run."""
        settings, trained = self.settings, self.engine.context_length
        whole = trained if _is_long(settings, self.engine) else settings.tokens
        budget, sinks = settings.shown_budget, settings.shown_sinks
        reach = min(settings.tokens, trained)
        return (
            self._along("full", None, reach),
            self._along("sliding-window", Window(budget=budget), whole),
            self._along("streaming-llm", Window(budget=budget, pins=sinks), whole),
        )

    def long_run(self) -> Along | None:
        """The re-indexed window over several trained lengths, in the default block; None when the text is shorter."""
        settings = self.settings
        if not _is_long(settings, self.engine):
            return None
        return self._along("long run", Window.of(settings.shown_budget, settings.shown_sinks), settings.tokens)

    def _along(self, name: str, window: Window | None, tokens: int) -> Along:
        self.progress.start(name, tokens - 1)
        begun = self.clock()
        stream = self.engine.open(window)
        nll = self._read(stream, self.ids[:tokens])
        held_bytes = stream.nbytes
        stream.close()
        wanted = self.settings.tokens
        ended = "the end of the text asked for" if tokens == wanted else f"the trained length of {tokens:,} tokens"
        return Along(
            name="streaming-llm" if name == "long run" else name,
            budget=window.budget if window else None,
            sinks=window.pins if window else 0,
            block=window.block if window else 0,
            buckets=buckets(nll),
            stopped_because=ended,
            cache_bytes=held_bytes,
            duration_s=self.clock() - begun,
        )

    def _read(self, stream: Stream, ids: Sequence[int]) -> NDArray[np.float64]:
        """Negative log-probabilities of all but the first token, which nothing predicts."""
        stream.feed(ids[:1])
        return self._score(stream, ids[1:])

    def _score(self, stream: Stream, ids: Sequence[int]) -> NDArray[np.float64]:
        pieces = list[NDArray[np.float64]]()
        for start in range(0, len(ids), CHUNK):
            piece = ids[start : start + CHUNK]
            pieces.append(-stream.score(piece))
            self.progress.advance(len(piece))
        nll = np.concatenate(pieces)
        if not np.isfinite(nll).all():
            raise HeadwaterError("the model gave no finite probability for some tokens; try it in float32")
        return nll


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
