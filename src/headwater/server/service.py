"""What the endpoints share: the engine, its one thread, the sessions of every key, limits and figures.

Knows who owns what and how a request becomes a job. Does not know any endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headwater.chat.conversation import Frame
from headwater.chat.store import Store
from headwater.engines.base import Engine
from headwater.errors import HeadwaterError
from headwater.memory.embedder import Embedder
from headwater.memory.memory import Memory
from headwater.server.job import Asked, ChatJob, Done, Event, Failed, Job, Piece, Question, Reason
from headwater.server.keys import Key, Keys
from headwater.server.limits import Limits, Use
from headwater.server.metrics import Metrics
from headwater.server.plain import PlainJob
from headwater.server.refused import Refused, place_of, refusal, too_much
from headwater.server.sessions import Manner, Sessions
from headwater.server.shelf import Shelf
from headwater.server.worker import Worker

log = logging.getLogger("headwater.server")
LOCAL = "local"
"""Whose sessions are those of a server without keys."""
MOST_TOKENS = 4096
"""The longest answer that a request may ask for, unless the default is longer."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a server is started with, beside the manner of its conversations."""

    folder: Path
    memory: bool = False
    memory_bytes: int = 1 << 30
    most_tokens: int = MOST_TOKENS
    most_active: int = 8
    timeout_s: float = 600.0
    body_bytes: int = 2 << 20
    body_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class Service:
    """One model and everybody's conversations with it."""

    def __init__(
        self,
        engine: Engine,
        manner: Manner,
        options: Options,
        *,
        keys: Keys | None = None,
        embedder: Callable[[], Embedder] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.manner, self.options = engine, manner, options
        self.keys = Keys(options.folder) if keys is None else keys
        self.clock = clock
        self.began = int(time.time())
        self.metrics = Metrics()
        self.worker = Worker(engine, most_active=options.most_active)
        self.token_bytes, session_bytes = cost(engine, manner)
        self.shelf = Shelf(limit_bytes=options.memory_bytes, session_bytes=session_bytes)
        self.draining = False
        self._embedder, self._embedder_made = embedder, None
        self._uses: dict[str, Use] = {}
        self._sessions: dict[str, Sessions] = {}
        self._memories: list[Memory] = []

    def start(self) -> None:
        """Begin to work."""
        self.worker.start()

    def stop(self) -> list[str]:
        """Let the answers under way end, save every conversation, and end; what went wrong, in words."""
        said: list[str] = []

        def last() -> None:
            said.extend(self.shelf.close_all())
            for memory in self._memories:
                memory.close()

        self.draining = True
        self.worker.stop(last)
        return said

    # Who asks.

    def owner(self, authorization: str | None) -> str:
        """Whose sessions a request is about. Raises Refused where a key is needed and none that is known was given."""
        if not self.keys.all():
            return LOCAL
        scheme, _, given = (authorization or "").partition(" ")
        key: Key | None = self.keys.find(given.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise Refused(
                401,
                "This server needs a key: Authorization: Bearer KEY. headwater keys add NAME makes one.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return f"key-{key.id}"

    def count(self, owner: str) -> Use:
        """Count a request of theirs. Raises Refused for one too many."""
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = Use(limits=self.options.limits, clock=self.clock)
        if (wait := use.request()) > 0:
            raise too_much(f"more than {self.options.limits.requests_per_minute} requests a minute", wait)
        return use

    def sessions(self, owner: str) -> Sessions:
        """Their sessions; in the worker's thread."""
        if owner not in self._sessions:
            store = Store(self.options.folder / f"{owner}.db")
            memory = None
            if self.options.memory:
                memory = Memory(store.path)
                self._memories.append(memory)
            self._sessions[owner] = Sessions(
                store, self.engine, self.manner, self.shelf, memory=memory, most=self.options.limits.sessions
            )
        return self._sessions[owner]

    async def call(self, action: Callable[[], Result]) -> Result:
        """Do something in the worker's thread, between two steps."""
        return await asyncio.wrap_future(self.worker.call(action))

    def figures(self) -> dict[str, float]:
        """The state of this moment, for the gauges; in the worker's thread."""
        live = [each.chat.stats() for each in self.shelf.all()]
        return {
            "sessions": sum(map(len, self._sessions.values())),
            "sessions_in_memory": len(live),
            "cache_bytes": sum(each.cache_bytes for each in live),
            "seen_tokens": sum(each.seen for each in live),
            "held_tokens": sum(each.held for each in live),
            "active": self.worker.active,
            "waiting": self.worker.waiting,
            "snapshots_saved": self.shelf.saved,
        }

    def change(self, manner: Manner) -> None:
        """Hold conversations in another manner from now on, those in memory too; in the worker's thread.

        Raises UsageError while one is being answered, and BudgetError for what cannot be.
        """
        token_bytes, session_bytes = cost(self.engine, manner)
        if self.shelf.busy:
            raise Refused(409, "answers are under way; change settings when they are over", code="session_busy")
        self.shelf.close_all()
        self.manner, self.token_bytes, self.shelf.session_bytes = manner, token_bytes, session_bytes
        for sessions in self._sessions.values():
            sessions.manner = manner

    def embedder(self) -> Embedder:
        """The small model of the extra `memory`. Raises MissingExtra."""
        if self._embedder_made is None:
            from headwater.memory.embedder import StaticEmbedder

            self._embedder_made = (self._embedder or StaticEmbedder)()
        return self._embedder_made

    # Answers.

    def ask(self, owner: str, question: Question) -> Answering:
        """Begin to answer. Raises Refused for more than the key may have in flight."""
        return self._begin(
            owner,
            question.max_tokens,
            lambda emit: ChatJob(
                emit=emit,
                timeout_s=self.options.timeout_s,
                clock=self.clock,
                sessions=lambda: self.sessions(owner),
                question=question,
            ),
        )

    def go_on(self, owner: str, text: str, **how: Any) -> Answering:
        """Begin to continue a text. Raises as `ask` does."""
        return self._begin(
            owner,
            how["max_tokens"],
            lambda emit: PlainJob(
                emit=emit,
                timeout_s=self.options.timeout_s,
                clock=self.clock,
                engine=self.engine,
                manner=self.manner,
                text=text,
                **how,
            ),
        )

    def _begin(self, owner: str, tokens: int, make: Callable[[Callable[[Event], None]], Job]) -> Answering:
        use = self._uses[owner]
        if self.draining:
            raise Refused(503, "the server is shutting down", kind="server_error", headers={"retry-after": "10"})
        if not use.begin(tokens):
            most = self.options.limits.tokens_in_flight
            raise too_much(f"answers of more than {most:,} tokens would be under way; wait for one to end", 1)
        answering = Answering(self, use, tokens)
        answering.job = make(answering.emit)
        self.worker.submit(answering.job)
        return answering


class Answering:
    """An answer under way, as the event loop sees it."""

    job: Job

    def __init__(self, service: Service, use: Use, tokens: int) -> None:
        self._service, self._use, self._tokens = service, use, tokens
        self.timeout_s = service.options.timeout_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._began = service.clock()
        self._first_s: float | None = None
        self._over = False

    def emit(self, event: Event) -> None:
        """In the worker's thread: tell the loop, if it is still there."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        service = self._service
        if isinstance(event, Asked):
            service.metrics.asked(event)
        elif isinstance(event, Piece) and self._first_s is None:
            self._first_s = service.clock() - self._began
        if isinstance(event, (Done, Failed)) and not self._over:
            self._over = True
            self._use.end(self._tokens)
            if isinstance(event, Failed) and not isinstance(event.error, HeadwaterError):
                log.error("a defect: %s at %s", type(event.error).__name__, place_of(event.error))
            waited = (self.job.started or service.clock()) - self._began
            service.metrics.over(event, waited_s=waited, first_s=self._first_s)
        self._events.put_nowait(event)

    def end(self, reason: Reason) -> None:
        """End it within a step."""
        self.job.end = self.job.end or reason

    async def asked(self) -> Asked:
        """What was asked, once it is fed. Raises Refused when there is no answer."""
        event = await self._events.get()
        if isinstance(event, Asked):
            return event
        if isinstance(event, Failed):
            raise refusal(event.error)
        raise ended(event.reason if isinstance(event, Done) else "left", self.timeout_s)

    async def events(self) -> AsyncIterator[Event]:
        """What comes after that, up to the end."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, (Done, Failed)):
                return


def ended(reason: Reason, timeout_s: float) -> Refused:
    """What to say when an answer was ended before its end."""
    if reason == "timeout":
        said = f"the answer took longer than {timeout_s:g} s; what was generated is kept in the session"
        return Refused(504, said, kind="server_error", code="timeout")
    if reason == "left":
        return Refused(499, "the client has gone", kind="server_error")
    return Refused(503, "the server is shutting down; what was generated is kept in the session", kind="server_error")


def cost(engine: Engine, manner: Manner) -> tuple[float, int]:
    """Bytes of a token held, and of a whole session, measured. Raises BudgetError for what cannot be."""
    frame = Frame.of(engine, manner.policy, None)
    stream = frame.open(engine)
    try:
        token = engine.encode("a")[:1]
        stream.feed(token)
        one = stream.nbytes
        stream.feed(token)
        two = stream.nbytes
    finally:
        stream.close()
    slots = frame.budget + 1
    return (one / slots, one) if one == two else (float(two - one), (two - one) * slots)
