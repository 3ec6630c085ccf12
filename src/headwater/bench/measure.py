"""One row of a comparison: a stream driven through a conversation by teacher forcing, and what it cost.

Knows the order in which things are fed, scored and timed. Does not know policies by name, file formats or drawing. A
row is measured into a `Recorder`, so that what was measured survives an interruption.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
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
    sampled, drawn = (set(spread(len(exchanges), most)) for most in (SPEED_SAMPLES, KEPT_SAMPLES))
    plan, trained, passed = recorder.plan, engine.context_length, None
    progress.start(plan.name, len(exchanges))
    with closing(engine.open(plan.holds)) as stream:
        driven = Driven(stream=stream, whole_turns=plan.whole_turns, head_tokens=len(script.head))
        driven.feed(script.head)
        for index, exchange in enumerate(exchanges):
            turn = 2 * index + 2
            if plan.holds is None and stream.seen + exchange.tokens > trained:
                return _ended(
                    passed, limit_tokens, f"the trained length of {trained} tokens ends after turn {turn - 2}"
                )
            driven.feed(exchange.question)
            driven.end_turn("user")
            passed = passed or (turn - 1 if stream.seen > limit_tokens else None)
            _answer(recorder, driven, exchange, turn, clock if index in sampled else None)
            passed = passed or (turn if stream.seen > limit_tokens else None)
            driven.feed(exchange.close)
            driven.end_turn("assistant")
            if index in drawn:
                recorder.kept.append(Kept(turn=turn, ranges=ranges(stream.kept)))
            progress.advance()
    return END if plan.holds is not None else _ended(passed, limit_tokens, END)


@dataclass(slots=True, kw_only=True)
class Driven:
    """A stream that is fed as `chat` feeds it: with `whole_turns`, the oldest exchanges leave when a step would not
    fit; where none is left to go, and without `whole_turns`, the stream evicts tokens by itself."""

    stream: Stream
    whole_turns: bool
    head_tokens: int
    spans: list[Span] = field(default_factory=list)

    def feed(self, tokens: Sequence[int]) -> None:
        """Make room for all of the tokens, then feed them; an empty piece of a template is nothing."""
        if tokens:
            self._make_room(len(tokens))
            self.stream.feed(tokens)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Scores of the tokens, room made as if they came one by one, as those of an answer do."""
        scores, window = list[float](), self.stream.window
        while len(scores) < len(tokens):
            self._make_room(1)
            piece = tokens[len(scores) :]
            if self.whole_turns and window is not None:
                piece = piece[: max(1, window.budget - self.stream.held)]
            scores.extend(float(score) for score in self.stream.score(piece))
        return scores

    def end_turn(self, role: str) -> None:
        """Everything since the last turn, or since the head, was this turn."""
        start = self.spans[-1].stop if self.spans else self.head_tokens
        self.spans.append(Span(role=role, text="", start=start, stop=self.stream.seen))

    def _make_room(self, count: int) -> None:
        window = self.stream.window
        if not self.whole_turns or window is None or (need := self.stream.held + count - window.budget) <= 0:
            return
        unpinned = max(0, self.stream.held - window.pins)
        first = self.stream.seen - unpinned
        if gone := leaving(self.spans, first=first, need=need):
            self.stream.evict(gone[-1].stop - first)


def _ended(passed: int | None, limit_tokens: int, reason: str) -> str:
    """Why a row that never evicts is over, and where a real session would have been."""
    if passed is None:
        return reason
    died = f"a real session would have died in turn {passed}, past the limit of {limit_tokens} tokens"
    return f"{died}; measured on as the reference, to {reason}" if reason == END else f"{died}; {reason}"


def _answer(recorder: Recorder, driven: Driven, exchange: Exchange, turn: int, clock: Clock | None) -> None:
    """Score the answer; with a clock, its first tokens one by one, each step timed."""
    tokens, stream = exchange.answer, driven.stream
    scores, durations = ([], []) if clock is None else _step(driven, tokens[:SPEED_STEPS], clock)
    scores.extend(driven.score(tokens[len(scores) :]))
    nll, seen, held = -math.fsum(scores), stream.seen, stream.held
    if not math.isfinite(nll):
        raise HeadwaterError(f"the model gave no finite probability in turn {turn}; try it in float32")
    record = Turn(
        turn=turn, nll=nll, tokens=len(tokens), seen=seen, held=held, cache_bytes=stream.nbytes, evicted=seen - held
    )
    recorder.turns.append(record)
    if durations and (median := statistics.median(durations)) > 0:
        recorder.speeds.append(Speed(turn=turn, seen=seen, held=held, tokens_per_s=1 / median))


def _step(driven: Driven, tokens: Sequence[int], clock: Clock) -> tuple[list[float], list[float]]:
    """Scores of the tokens fed one by one, and the seconds that each step took."""
    scores, durations = list[float](), list[float]()
    for token in tokens:
        begun = clock()
        scores += driven.score([token])
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
