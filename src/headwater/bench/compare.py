"""The comparison: the same conversation through every row, JSON first, then a table and a page from the JSON.

Knows the order of the work and what is told to the user. Does not know how a row is measured, nor how a page is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headwater.bench import report, results, table
from headwater.bench.conversation import Conversation, load
from headwater.bench.machine import hardware, now, versions
from headwater.bench.measure import Clock, Recorder, Script, drive, script, warm_up
from headwater.bench.progress import Progress, Silent, progress
from headwater.bench.results import Results, Settings, Source
from headwater.bench.rows import DEFAULT_ROWS, Plan, check_names, pinned, plans
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.errors import UsageError

INTERRUPTED = 130

Store = Callable[[Results], None]


def run(
    *,
    model: str,
    engine: str = "transformers",
    conversation: Path | None = None,
    output: Path = Path("report"),
    budget: int = 512,
    sinks: int = 4,
    policies: tuple[str, ...] = DEFAULT_ROWS,
    limit_tokens: int = 4096,
    turns: int | None = None,
    seed: int = 0,
    system: str | None = None,
) -> int:
    """Compare policies on a model and a conversation; write `results.json` and `index.html` into `output`.

    Returns the exit code: 0, or 130 after Ctrl-C, when the JSON holds what was measured until then. Raises UsageError
    and its kind for values that cannot be used, MissingExtra without matplotlib, all before the first token.
    """
    check_names(policies)
    report.require_plots()
    loaded = load(conversation)
    if turns is not None:
        loaded = loaded.first(turns)
    if system is not None:
        loaded = _with_system(loaded, system)
    path = output / "results.json"
    results.prepare(output)
    opened = open_engine(model, engine=engine)
    settings = Settings(
        budget_tokens=budget,
        sinks=sinks,
        policies=policies,
        limit_tokens=limit_tokens,
        turns=turns,
        system=loaded.system,
        seed=seed,
    )
    stored = list[Results]()

    def store(measured: Results) -> None:
        results.write_json(path, measured)
        stored.append(measured)

    try:
        with progress() as bars:
            compare(opened, loaded, settings, engine_name=engine, progress=bars, store=store, tell=_tell)
    except KeyboardInterrupt:
        left = f"what was measured is in {path}; no page was drawn from it" if stored else "nothing was measured yet"
        _tell(f"Interrupted; {left}")
        return INTERRUPTED
    finally:
        opened.close()
    measured = results.read(path)
    page = output / "index.html"
    results.write_text(page, report.page(measured))
    table.show(measured)
    print(f"\nResults: {path}\nReport:  {page}")
    return 0


def compare(
    engine: Engine,
    conversation: Conversation,
    settings: Settings,
    *,
    engine_name: str = "",
    progress: Progress | None = None,
    store: Store | None = None,
    tell: Callable[[str], None] | None = None,
    clock: Clock = time.perf_counter,
) -> Results:
    """Measure every row, one after the other, and return the results.

    `store` is called with what there is after every row, and when a row is interrupted, before the exception goes on.
    `tell` gets the header. Raises UnknownName, BudgetError, UsageError or UnsupportedCall before the first token.
    """
    if settings.limit_tokens < 1:
        raise UsageError(f"limit_tokens must be at least 1, got {settings.limit_tokens}")
    text = script(engine, conversation)
    rows = plans(
        settings.policies,
        engine=engine,
        budget=settings.budget_tokens,
        sinks=settings.sinks,
        limit_tokens=settings.limit_tokens,
        head_tokens=len(text.head),
    )
    measured = _begin(engine, engine_name, conversation, text, settings)
    if tell:
        tell(header(measured, rows))
    warm_up(engine, text)
    for plan in rows:
        recorder, begun = Recorder(plan=plan), clock()
        limit = min(settings.limit_tokens, engine.context_length)
        reason, complete = "", False
        try:
            reason = drive(recorder, engine, text, limit_tokens=limit, clock=clock, progress=progress or Silent())
            complete = True
        except BaseException as error:
            last = recorder.turns[-1].turn if recorder.turns else 0
            reason = f"{_words(error)} after turn {last}"
            raise
        finally:
            row = recorder.row(stopped_because=reason, duration_s=clock() - begun, complete=complete)
            done = results.summarise([*measured.rows, row], limit_tokens=limit, seed=settings.seed)
            measured = replace(measured, rows=done)
            if store and (complete or recorder.turns):
                store(measured)
    return measured


def header(measured: Results, rows: tuple[Plan, ...]) -> str:
    """What is about to run, and every choice made for the user."""
    settings, source = measured.settings, measured.conversation
    lines = [
        f"Model:        {measured.model} ({measured.engine}), trained length {measured.context_length:,} tokens",
        f"Conversation: {source.name}, {source.turns} turns, {source.tokens:,} tokens with the chat template",
        f"Budget:       {settings.budget_tokens:,} tokens; pinned {measured.pinned_tokens} (sinks {settings.sinks}, "
        f"system prompt {measured.head_tokens}); limit of full {settings.limit_tokens:,}; seed {settings.seed}",
        *(f"Row:          {row.name}: {row.rule}" for row in rows),
        *(f"Choice:       {choice}" for choice in measured.choices),
    ]
    return "\n".join(lines)


def _begin(engine: Engine, kind: str, conversation: Conversation, text: Script, settings: Settings) -> Results:
    choices = [*conversation.choices, *engine.choices]
    if conversation.system is None and text.head:
        choices.append("no system prompt was given; the chat template brings its own, which is pinned")
    if settings.limit_tokens > engine.context_length:
        choices.append(f"a session without eviction ends at the trained length, {engine.context_length} tokens")
    source = Source(
        name=conversation.name,
        sha256=conversation.sha256,
        attribution=conversation.attribution,
        turns=conversation.turns,
        tokens=text.tokens,
    )
    return Results(
        started=now(),
        hardware=hardware(),
        versions=versions(),
        model=engine.name,
        engine=kind,
        context_length=engine.context_length,
        head_tokens=len(text.head),
        pinned_tokens=pinned(settings.sinks, len(text.head)),
        seed=settings.seed,
        settings=settings,
        conversation=source,
        choices=tuple(choices),
    )


def _with_system(conversation: Conversation, system: str) -> Conversation:
    if not system.strip():
        raise UsageError(
            "the system prompt is empty; leave the option out to use the conversation's or the template's own"
        )
    replaced = conversation.system is not None and conversation.system != system
    note = ("the system prompt given takes the place of the conversation's own",) if replaced else ()
    return replace(conversation, system=system, choices=(*conversation.choices, *note))


def _words(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({error})"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
