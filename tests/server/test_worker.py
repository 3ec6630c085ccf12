"""The thread that drives the model: turns, waiting, ends; with jobs that only count, and with chats."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headwater.chat.due import Steps, driven
from headwater.chat.session import Chat
from headwater.engines.base import Stream
from headwater.engines.fake import FakeEngine, FakeStream
from headwater.server.job import Done, Event, Failed, Job, Work
from headwater.server.worker import Worker
from tests.chat.talk import opened

ORDER: list[str] = []


@dataclass(slots=True, eq=False, kw_only=True)
class Counting(Job):
    name: str
    steps: int
    fails_at: int = -1
    events: list[Event] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Work:
        for step in range(self.steps):
            if step == self.fails_at:
                raise RuntimeError("a defect")
            if self.over is not None:
                break
            ORDER.append(self.name)
            yield None
        self.emit(Done(reason=self.over or "stop", tokens=0, stats=None, surprise=None))


def counting(name: str, steps: int, **more: Any) -> Counting:
    job = Counting(emit=lambda event: None, name=name, steps=steps, **more)

    def emit(event: Event) -> None:
        job.events.append(event)
        job.done.set()

    job.emit = emit
    return job


def started(*jobs: Counting, most: int = 8) -> Worker:
    """A worker that has all the jobs before it takes its first step."""
    ORDER.clear()
    worker = Worker(FakeEngine(), most_active=most)
    for job in jobs:
        worker.submit(job)
    worker.start()
    return worker


def test_jobs_take_turns():
    jobs = [counting("a", 3), counting("b", 5), counting("c", 1)]
    worker = started(*jobs)
    worker.stop()
    assert "".join(ORDER) == "abc" + "ab" + "ab" + "b" + "b"
    assert all(isinstance(job.events[0], Done) for job in jobs)


def test_more_than_that_wait_in_order():
    worker = started(*(counting(name, 2) for name in "abcd"), most=2)
    worker.stop()
    assert "".join(ORDER) == "abab" + "cdcd"


def test_a_job_that_fails_does_not_take_the_others_with_it():
    broken, whole = counting("a", 5, fails_at=2), counting("b", 5)
    worker = started(broken, whole)
    assert whole.done.wait(5)
    assert isinstance(broken.events[0], Failed)
    assert isinstance(whole.events[0], Done)
    assert worker.alive
    worker.stop()
    assert not worker.alive


def test_what_is_called_happens_between_steps():
    job = counting("a", 10**9)
    worker = started(job)
    seen = [worker.call(lambda: len(ORDER)).result(5) for _ in range(3)]
    assert seen == sorted(seen)

    def wrong() -> None:
        raise ValueError("no")

    assert isinstance(worker.call(wrong).exception(5), ValueError)
    worker.end_all("shutdown")
    worker.stop()
    assert isinstance(job.events[0], Done) and job.events[0].reason == "shutdown"


def test_an_end_reaches_those_that_wait():
    jobs = [counting("a", 10**9), counting("b", 10**9)]
    worker = started(*jobs, most=1)
    worker.end_all("shutdown")
    worker.stop()
    assert [job.events[0].reason for job in jobs if isinstance(job.events[0], Done)] == ["shutdown"] * 2


def test_a_clock_that_passes_the_timeout_ends_it():
    now = [0.0]
    job = counting("a", 10**9, timeout_s=5.0, clock=lambda: now[0])
    worker = started(job)
    now[0] = 4.9
    assert not job.done.wait(0.05)
    now[0] = 5.1
    assert job.done.wait(5)
    worker.stop()
    assert isinstance(job.events[0], Done) and job.events[0].reason == "timeout"


# Steps that are computed together.


class Noting(FakeEngine):
    """Notes what it is fed, in order: how many streams a token together, or how many tokens of one."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__(answer_tokens=None)
        self.noted: list[tuple[str, int]] = []
        self.fails = fails

    def feed_together(self, streams: Sequence[Stream], tokens: Sequence[int]) -> list[Any]:
        self.noted.append(("together", len(streams)))
        if len(self.noted) == self.fails:
            return [MemoryError("no memory for this row"), *super().feed_together(streams[1:], tokens[1:])]
        return super().feed_together(streams, tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Talking(Job):
    """A message to a chat."""

    chat: Chat
    text: str
    said: str = ""

    def run(self) -> Work:
        steps: Steps = self.chat.steps(self.text, piece=50)
        for step in steps:
            if isinstance(step, str):
                self.said += step
            else:
                yield step
        self.emit(Done(reason="stop", tokens=0, stats=None, surprise=None))


def talking(engine: FakeEngine, *texts: str) -> list[Talking]:
    return [
        Talking(emit=lambda event: None, chat=opened(engine, budget=600, max_tokens=20 + number), text=text)
        for number, text in enumerate(texts)
    ]


def drive(engine: FakeEngine, jobs: Sequence[Job], most: int = 8) -> None:
    worker = Worker(engine, most_active=most)
    for job in jobs:
        worker.submit(job)
    worker.start()
    worker.stop()


def alone(job: Talking) -> str:
    chat = opened(FakeEngine(answer_tokens=None), budget=600, max_tokens=job.chat.max_tokens)
    return "".join(driven(chat.steps(job.text)))


def test_tokens_of_all_conversations_are_fed_together():
    engine = Noting()
    jobs = talking(engine, *(f"message {number}" for number in range(8)))
    drive(engine, jobs)
    assert [job.said for job in jobs] == [alone(job) for job in jobs]
    assert max(engine.noted) == ("together", 8)
    assert len(engine.noted) < 20 + 8 + 8, "a turn for every token of the longest, after the messages"


def test_a_long_message_goes_in_parts_between_the_tokens_of_others(monkeypatch: pytest.MonkeyPatch):
    engine = Noting()
    jobs = talking(engine, "hi", "a long story of a boat, " * 20, "another long story of it, " * 20)
    feed, parts = FakeStream.feed, list[int]()

    def noting(self: FakeStream, tokens: Sequence[int]) -> Any:
        if len(tokens) == 50:
            engine.noted.append(("part", id(self)))
            parts.append(id(self))
        return feed(self, tokens)

    monkeypatch.setattr(FakeStream, "feed", noting)
    drive(engine, jobs)
    monkeypatch.setattr(FakeStream, "feed", feed)
    assert [job.said for job in jobs] == [alone(job) for job in jobs]
    kinds = [kind for kind, _ in engine.noted]
    assert kinds.count("part") > 16
    first = kinds.index("together")
    assert all(
        "part" not in pair or "together" in pair for pair in zip(kinds[first:], kinds[first + 1 :], strict=False)
    )
    assert parts[:6] == [*dict.fromkeys(parts)] * 3, "two long messages take turns"


def test_a_row_that_fails_takes_no_other_with_it():
    engine = Noting(fails=6)
    jobs = talking(engine, "one", "two", "three")
    events: list[Event] = []
    jobs[0].emit = events.append
    drive(engine, jobs)
    assert isinstance(events[0], Failed) and "no memory for this row" in str(events[0].error)
    assert [job.said for job in jobs[1:]] == [alone(job) for job in jobs[1:]]
