"""Advice for one's own model and conversation: which policy, which budget, which recent window, at what cost.

Knows the order of the work: the conversation goes through the model once, and every policy at every budget watches.
Where the bend of the curve decides the budget, the recent windows are tried there in a second reading, since it is not
known before. Does not know any rule, how an advice follows from the figures, nor how a page is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from headwater.bench import advise_report
from headwater.bench.advise_choice import advise, decided
from headwater.bench.advise_plan import WINDOWS, Candidate, Costs, Maker, Plan, for_windows, plan
from headwater.bench.advise_results import CURVE, AdviseResults, Asked, Row, Subject, read
from headwater.bench.advise_words import header
from headwater.bench.conversation import Conversation, load
from headwater.bench.engine_trace import EngineTrace
from headwater.bench.machine import hardware, now, versions
from headwater.bench.measure import Script, script
from headwater.bench.progress import Progress, Silent, progress
from headwater.bench.replay_trace import Watched
from headwater.bench.results import Source, prepare, write_json, write_text
from headwater.bench.rows import pinned
from headwater.bench.sizes import parse_bytes
from headwater.bench.style import require_plots
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.errors import MissingExtra, UsageError
from headwater.policies import StreamingLLM
from headwater.traces import Replay, replay_all

INTERRUPTED = 130
CHUNK_BYTES = 128 << 20
"""Attention in memory at a time: some twenty tokens of a small model, so that the forward passes are not too short."""
MEASURED_TOKENS = 64
"""Tokens fed to a stream to see what K and V take."""


def run(
    *,
    model: str,
    engine: str = "transformers",
    conversation: Path | None = None,
    memory: str | None = None,
    budget: int | None = None,
    turns: int | None = None,
    sinks: int | None = None,
    seed: int = 0,
    output: Path = Path("report/advise"),
) -> int:
    """Advise on a conversation; print the advice, write `advice.json` and `index.html` into `output`.

    Returns the exit code: 0, or 130 after Ctrl-C, when nothing was measured. Raises UsageError and its kind for values
    that cannot be used, UnsupportedCall for an engine that does not show its attention, MissingExtra without matplotlib
    or numba, all before the first token.
    """
    if memory is not None and budget is not None:
        raise UsageError(
            "--memory and --budget cannot both be given: a budget decides the memory, and a memory the budget"
        )
    memory_bytes = None if memory is None else parse_bytes(memory)
    require_plots()
    if find_spec("numba") is None:
        raise MissingExtra("numba", "lab")
    loaded = load(conversation)
    if turns is not None:
        loaded = loaded.first(turns)
    prepare(output)
    asked = Asked(budget=budget, memory_bytes=memory_bytes, sinks=sinks, turns=turns, seed=seed)
    opened = open_engine(model, engine=engine)
    try:
        with progress() as bars:
            measured = experiment(opened, loaded, asked, engine_name=engine, progress=bars, tell=_tell)
    except KeyboardInterrupt:
        _tell("Interrupted; nothing was measured")
        return INTERRUPTED
    finally:
        opened.close()
    write_json(output / "advice.json", measured)
    stored = read(output / "advice.json")
    write_text(output / "index.html", advise_report.page(stored))
    advise_report.show(stored)
    print(f"\nFigures: {output / 'advice.json'}\nReport:  {output / 'index.html'}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A conversation as the model reads it: its token ids, as many of them as the model was trained for."""

    ids: tuple[int, ...]
    tokens: int
    turns: int
    head_tokens: int


def experiment(
    engine: Engine,
    conversation: Conversation,
    asked: Asked,
    *,
    engine_name: str = "",
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> AdviseResults:
    """Measure everything and advise. `tell` gets the header. Raises as `run` does, before the first token."""
    bars, begun = progress or Silent(), clock()
    text = reading(engine, script(engine, conversation))
    trace = EngineTrace(engine, text.ids, name=conversation.name)
    costs = Costs(kv_bytes_per_token=kv_bytes_per_token(engine, text.ids), trace=trace)
    sinks = StreamingLLM().sinks if asked.sinks is None else asked.sinks
    maker = Maker(pins=pinned(sinks, text.head_tokens), sinks=asked.sinks, seed=asked.seed)
    planned = plan(maker, costs, asked)
    subject = _subject(engine, engine_name, conversation, text, costs, maker, planned, asked)
    if tell:
        tell(header(subject))
    rows = _replayed(planned.candidates, costs, bars, "replay")
    _, budget = decided(rows, asked, whole_fits=planned.whole_fits)
    if all(row.role == CURVE for row in rows):
        there = [each for each in planned.candidates if each.policy.budget == budget]
        rows += _replayed(for_windows(maker, there), costs, bars, f"windows at {budget:,}")
    return AdviseResults(
        subject=subject,
        versions=versions(),
        duration_s=clock() - begun,
        rows=tuple(rows),
        advice=advise(rows, asked, whole_fits=planned.whole_fits),
    )


def reading(engine: Engine, text: Script) -> Reading:
    """The conversation's first tokens, as many as the model was trained for, and the turns that lie whole in them."""
    ids, ends = list(text.head), list[int]()
    for exchange in text.exchanges:
        for turn in (exchange.question, (*exchange.answer, *exchange.close)):
            ids += turn
            ends.append(len(ids))
    used = min(len(ids), engine.context_length)
    return Reading(
        ids=tuple(ids[:used]),
        tokens=len(ids),
        turns=sum(end <= used for end in ends),
        head_tokens=len(text.head),
    )


def kv_bytes_per_token(engine: Engine, ids: Sequence[int]) -> int:
    """Bytes of K and V over all layers, by what a stream of the engine takes after some tokens."""
    with closing(engine.open(None)) as stream:
        stream.feed(ids[:MEASURED_TOKENS])
        return -(-stream.nbytes // stream.held)


def _replayed(candidates: Sequence[Candidate], costs: Costs, bars: Progress, label: str) -> list[Row]:
    """What each candidate kept, in one reading of the conversation."""
    if not candidates:
        return []
    watched = Watched(costs.trace, bars, label)
    replays = replay_all(watched, [each.policy for each in candidates], chunk_bytes=CHUNK_BYTES)
    return [row(each, found, costs) for each, found in zip(candidates, replays, strict=True)]


def row(candidate: Candidate, found: Replay, costs: Costs) -> Row:
    """What is stored of a replay."""
    choice = candidate.policy
    low, high = np.quantile(found.mass_by_row, (0.1, 0.9))
    return Row(
        policy=choice.name,
        budget=choice.budget,
        role=candidate.role,
        parameters={field.name: getattr(choice, field.name) for field in fields(choice) if field.name != "budget"},
        recent_window=candidate.recent_window,
        live=candidate.live,
        retained_attention_mass=found.retained_attention_mass,
        heavy_hitter_recall=found.heavy_hitter_recall,
        mass_low=float(low),
        mass_high=float(high),
        eviction_calls=found.eviction_calls,
        cache_bytes=costs.cache(choice),
        state_bytes=costs.state(choice),
        way=found.way,
    )


def _subject(
    engine: Engine,
    engine_name: str,
    conversation: Conversation,
    text: Reading,
    costs: Costs,
    maker: Maker,
    planned: Plan,
    asked: Asked,
) -> Subject:
    choices = [*conversation.choices, *planned.choices]
    if len(text.ids) < text.tokens:
        choices.append(
            f"the conversation has {text.tokens:,} tokens and {engine.name} was trained for {engine.context_length:,}: "
            f"its first {len(text.ids):,} are read, {text.turns} of {conversation.turns} turns"
        )
    if planned.whole_fits:
        choices.append("the memory holds the whole conversation, so it does not decide the budget")
    return Subject(
        started=now(),
        hardware=hardware(),
        model=engine.name,
        engine=engine_name,
        context_length=engine.context_length,
        layers=len(costs.trace.layers),
        heads=costs.trace.rows,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        conversation=Source(
            name=conversation.name,
            sha256=conversation.sha256,
            attribution=conversation.attribution,
            turns=conversation.turns,
            tokens=text.tokens,
        ),
        used_tokens=len(text.ids),
        used_turns=text.turns,
        head_tokens=text.head_tokens,
        pinned_tokens=maker.pins,
        asked=asked,
        budgets=planned.budgets,
        windows=WINDOWS,
        whole_fits=planned.whole_fits,
        choices=tuple(choices),
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
