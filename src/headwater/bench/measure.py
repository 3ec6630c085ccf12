"""One row of a comparison: a stream driven through a conversation by teacher forcing, and what it cost.

Knows the order in which things are fed, scored and timed. Does not know policies by name, file formats or drawing. A
row is measured into a `Recorder`, so that what was measured survives an interruption.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.bench.conversation import Conversation
from headwater.bench.progress import Progress
from headwater.bench.results import END, Kept, Row, Speed, Turn
from headwater.bench.rows import Plan
from headwater.chat.ledger import Turn as Span
from headwater.chat.ledger import leaving
from headwater.chat.template import Template
from headwater.engines.base import Engine, Stream
from headwater.errors import HeadwaterError

Clock = Callable[[], float]

SPEED_SAMPLES, SPEED_STEPS = 20, 12
KEPT_SAMPLES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Token ids of one exchange: the user's message up to the opened answer, the answer's text, what closes it."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    close: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.question) + len(self.answer) + len(self.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A conversation in token ids: the head (the system prompt, with its template), then the exchanges."""

    head: tuple[int, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def tokens(self) -> int:
        return len(self.head) + sum(exchange.tokens for exchange in self.exchanges)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """What one row measured so far."""

    plan: Plan
    turns: list[Turn] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def row(self, *, stopped_because: str, duration_s: float, complete: bool) -> Row:
        return Row(
            name=self.plan.name,
            rule=self.plan.rule,
            turns=tuple(self.turns),
            tokens_per_s=tuple(self.speeds),
            kept=tuple(self.kept),
            complete=complete,
            stopped_because=stopped_because,
            duration_s=duration_s,
        )


def script(engine: Engine, conversation: Conversation) -> Script:
    """The conversation in the model's chat template: the pieces that `chat` would feed, message by message.

    Raises UnsupportedModel when the model has no chat template, or one that cannot be applied by messages.
    """
    template = Template.derive(engine, conversation.system)
    exchanges = tuple(
        Exchange(
            question=tuple(template.question(engine, said.question, first=index == 0)),
            answer=tuple(engine.encode(said.answer.strip() if template.trims else said.answer)),
            close=template.answer_close,
        )
        for index, said in enumerate(conversation.exchanges)
    )
    return Script(head=template.head, exchanges=exchanges)


def warm_up(engine: Engine, script: Script) -> None:
    """Run every kind of step once, so that the first row does not pay for it."""
    stream = engine.open(None)
    stream.feed(script.exchanges[0].question)
    for token in script.exchanges[0].answer[:SPEED_STEPS]:
        stream.score([token])
    stream.close()


def drive(
    recorder: Recorder, engine: Engine, script: Script, *, limit_tokens: int, clock: Clock, progress: Progress
) -> str:
    """Drive one row through the conversation; returns why it stopped.

    `limit_tokens` is where a real session without eviction dies; the row goes on, as far as the model was trained.
    """
    exchanges = script.exchanges
    sampled = set(spread(len(exchanges), SPEED_SAMPLES))
    drawn = set(spread(len(exchanges), KEPT_SAMPLES))
    window = recorder.plan.window
    stream = engine.open(window)
    progress.start(recorder.plan.name, len(exchanges))
    passed = None
    try:
        if script.head:
            stream.feed(script.head)
        spans = list[Span]()
        for index, exchange in enumerate(exchanges):
            turn = 2 * index + 2
            if window is None and stream.seen + exchange.tokens > engine.context_length:
                return _ended(turn - 2, engine.context_length, passed, limit_tokens)
            if recorder.plan.whole_turns:
                make_room(stream, spans, len(exchange.question))
            start = stream.seen
            stream.feed(exchange.question)
            middle = stream.seen
            _answer(recorder, stream, exchange, turn, clock if index in sampled else None)
            passed = turn if passed is None and stream.seen > limit_tokens else passed
            if exchange.close:
                stream.feed(exchange.close)
            spans += [
                Span(role="user", text="", start=start, stop=middle),
                Span(role="assistant", text="", start=middle, stop=stream.seen),
            ]
            if index in drawn:
                recorder.kept.append(Kept(turn=turn, ranges=ranges(stream.kept)))
            progress.advance()
        return END if window is not None else _ended(None, engine.context_length, passed, limit_tokens)
    finally:
        stream.close()


def make_room(stream: Stream, spans: Sequence[Span], need_tokens: int) -> None:
    """Evict whole oldest exchanges, as `chat` does, so that `need_tokens` more fit the budget."""
    window = stream.window
    over = 0 if window is None else stream.held + need_tokens - window.budget
    if window is None or over <= 0:
        return
    kept = stream.kept
    first = int(kept[window.pins]) if len(kept) > window.pins else stream.seen
    if gone := leaving(spans, first=first, need=over):
        stream.evict(gone[-1].stop - first)


def _ended(last: int | None, trained: int, passed: int | None, limit_tokens: int) -> str:
    """Why a row that never evicts is over, and where a real session would have been."""
    died = f"a real session would have died in turn {passed}, past the limit of {limit_tokens} tokens" if passed else ""
    if last is None:
        return f"{died}; measured on to {END} as the reference" if died else END
    ended = f"the trained length of {trained} tokens ends after turn {last}"
    return f"{died}; {ended}" if died else ended


def _answer(recorder: Recorder, stream: Stream, exchange: Exchange, turn: int, clock: Clock | None) -> None:
    """Score the answer; with a clock, its first tokens one by one, each step timed."""
    tokens = exchange.answer
    scores, durations = ([], []) if clock is None else _step(stream, tokens[:SPEED_STEPS], clock)
    if rest := tokens[len(scores) :]:
        scores.extend(float(score) for score in stream.score(rest))
    nll, seen, held = -math.fsum(scores), stream.seen, stream.held
    if not math.isfinite(nll):
        raise HeadwaterError(f"the model gave no finite probability in turn {turn}; try it in float32")
    record = Turn(
        turn=turn, nll=nll, tokens=len(tokens), seen=seen, held=held, cache_bytes=stream.nbytes, evicted=seen - held
    )
    recorder.turns.append(record)
    if durations and (median := statistics.median(durations)) > 0:
        recorder.speeds.append(Speed(turn=turn, seen=seen, held=held, tokens_per_s=1 / median))


def _step(stream: Stream, tokens: Sequence[int], clock: Clock) -> tuple[list[float], list[float]]:
    """Scores of the tokens fed one by one, and the seconds that each step took."""
    scores, durations = list[float](), list[float]()
    for token in tokens:
        begun = clock()
        scores.append(float(stream.score([token])[0]))
        durations.append(clock() - begun)
    return scores, durations


def spread(count: int, most: int) -> list[int]:
    """At most `most` indices of `range(count)`, evenly spaced, the first and the last among them."""
    return sorted({round(value) for value in np.linspace(0, count - 1, min(count, most))})


def ranges(positions: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open ranges `(start, stop)`."""
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) > 1)
    starts = positions[np.concatenate(([0], breaks + 1))]
    stops = positions[np.concatenate((breaks, [len(positions) - 1]))] + 1
    return tuple((int(start), int(stop)) for start, stop in zip(starts, stops, strict=True))
