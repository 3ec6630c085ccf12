"""One request for an answer: from the session it means to the last piece, a step of the model at a time.

Knows in what order things happen, and what the client is told. Does not know HTTP, nor who else is waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headwater.chat.due import Due
from headwater.chat.sampling import Sampling
from headwater.chat.stats import Stats
from headwater.engines.base import Engine
from headwater.errors import ContextFull, HeadwaterError, UsageError
from headwater.server.history import History
from headwater.server.sessions import NoRoom, Sessions, Taken

Work = Generator[Due | None, None, None]
"""What a job does: it asks for tokens to be fed, or, with None, to be asked again later."""

Reason = Literal["stop", "length", "left", "timeout", "shutdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a request asks for. `top_logprobs` is None when no probabilities are wanted."""

    history: History
    text: str
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    session: str | None = None
    whole: bool = False
    kept: bool = True
    alone: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A token and its log-probability under the model; `others` are the likeliest ones, most likely first."""

    token: int
    logprob: float
    others: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The message is fed. `prompt_tokens` is the conversation so far, `fed` what of it was computed for this request,
    `held` what the cache holds; `turn` is the number of the answer to come."""

    session: str
    conversation: str
    how: str
    turn: int
    fed: int
    held: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of the answer."""

    text: str
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer is over. `surprise` is the mean of -log p of its tokens; `evicted` counts the tokens that left the
    cache for it and its message."""

    reason: Reason
    tokens: int
    stats: Stats | None
    surprise: float | None
    evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """There is no answer, or no more of it."""

    error: Exception


Event = Asked | Piece | Done | Failed


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """`emit` is called in the worker's thread; `end` may be set from any."""

    emit: Callable[[Event], None]
    timeout_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    end: Reason | None = None
    began: float = field(init=False)
    started: float | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def over(self) -> Reason | None:
        """Why it has to end now, if it has."""
        if self.end is None and self.clock() - self.began > self.timeout_s:
            self.end = "timeout"
        return self.end

    def run(self) -> Work:
        """Do all of it; ask for what has to be fed."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class ChatJob(Job):
    """A message in a session. `sessions` are those of the key, opened in the worker's thread."""

    sessions: Callable[[], Sessions]
    question: Question

    def run(self) -> Work:
        self.started, taken = self.clock(), None
        try:
            sessions = self.sessions()
            while self.over is None and (taken := self._take(sessions)) is None:
                yield
        except Exception as error:
            self.emit(Failed(error=error))
            return
        if taken is None:
            self.emit(Done(reason=self.over or "left", tokens=0, stats=None, surprise=None))
            return
        try:
            yield from self._answer(sessions, taken)
        except (UsageError, ContextFull) as error:  # refused before anything was fed
            sessions.give_back(taken, self.question.text, asked=False, left=False)
            self.emit(Failed(error=error))
        except Exception as error:
            try:
                sessions.drop(taken)
            except HeadwaterError as second:
                error.add_note(str(second))
            self.emit(Failed(error=error))

    def _take(self, sessions: Sessions) -> Taken | None:
        """The session; None while another answer has it, or all the memory that there is."""
        question = self.question
        if not sessions.wanted(question.session):
            return None
        try:
            return sessions.take(
                question.history,
                named=question.session,
                whole=question.whole,
                kept=question.kept,
                alone=question.alone,
            )
        except NoRoom:
            if sessions.shelf.busy:
                return None
            raise

    def _answer(self, sessions: Sessions, taken: Taken) -> Work:
        chat, question = taken.live.chat, self.question
        if question.sampling != chat.sampling or question.sampling.seed is not None:
            chat.draw_by(question.sampling)
        chat.max_tokens, chat.stop = question.max_tokens, question.stop
        watch = Watcher(chat.engine, question.top_logprobs)
        before = chat.stats()
        steps = chat.steps(question.text, watch=watch)
        asked, reason = False, None
        try:
            for said in steps:
                if not asked and (now := chat.stats()).turns > before.turns:
                    asked = True
                    self.emit(
                        Asked(
                            session=taken.name,
                            conversation=chat.conversation or "",
                            how=taken.how,
                            turn=before.turns + 1,
                            fed=taken.computed + now.fed - before.fed,
                            held=now.held,
                            prompt_tokens=now.seen,
                        )
                    )
                if isinstance(said, str) and (said or watch.fresh):
                    self.emit(Piece(text=said, likely=watch.take()))
                if (reason := self.over) is not None:
                    break
                if isinstance(said, Due):
                    yield said
        except ContextFull:
            if not asked:
                raise
            reason = "length"  # the end of a cache that never evicts
        finally:
            steps.close()
        latest, now = chat.latest, chat.stats()
        taken.live.surprise = watch.surprise
        if reason is None:
            reason = "stop" if latest is not None and latest.finished else "length"
        sessions.give_back(taken, question.text, asked=True, left=reason == "left")
        evicted = now.evicted_tokens - before.evicted_tokens
        self.emit(Done(reason=reason, tokens=now.answer_tokens, stats=now, surprise=watch.surprise, evicted=evicted))


class Watcher:
    """What every token of an answer was drawn from. `fresh` says that there is something new to tell a client."""

    def __init__(self, engine: Engine, top: int | None) -> None:
        self._engine, self._top = engine, top
        self._new: list[Likely] = []
        self._nats, self._tokens = 0.0, 0

    def __call__(self, logits: NDArray[np.float32], token: int) -> None:
        largest = logits.max()
        norm = float(largest) + math.log(float(np.exp(logits - largest).sum(dtype=np.float64)))
        self._nats += norm - float(logits[token])
        self._tokens += 1
        if self._top is None:
            return
        best = np.argpartition(logits, -self._top)[len(logits) - self._top :] if self._top else np.empty(0, np.int64)
        best = best[np.argsort(-logits[best], kind="stable")]
        others = tuple((int(each), float(logits[each]) - norm) for each in best)
        self._new.append(Likely(token=token, logprob=float(logits[token]) - norm, others=others))

    @property
    def fresh(self) -> bool:
        return bool(self._new)

    @property
    def surprise(self) -> float | None:
        """The mean of -log p; None before the first token."""
        return self._nats / self._tokens if self._tokens else None

    def take(self) -> tuple[Likely, ...]:
        """What was drawn since the last time."""
        out, self._new = tuple(self._new), []
        return out
