"""The thread that drives the model: turns, waiting, ends; with jobs that only count."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from headwater.server.job import Done, Event, Failed, Job
from headwater.server.worker import Worker

ORDER: list[str] = []


@dataclass(slots=True, eq=False, kw_only=True)
class Counting(Job):
    name: str
    steps: int
    fails_at: int = -1
    events: list[Event] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Generator[None, None, None]:
        for step in range(self.steps):
            if step == self.fails_at:
                raise RuntimeError("a defect")
            if self.over is not None:
                break
            ORDER.append(self.name)
            yield
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
    worker = Worker(most_active=most)
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
