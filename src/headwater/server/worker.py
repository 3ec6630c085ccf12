"""The one thread that drives the model: jobs take turns, a step each, so that nobody waits for another's end.

Knows whose turn it is: in every turn all that have a token due are fed theirs together, so that the weights are read
once for all of them, and one that has more due is fed a part. Does not know what a job does with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from headwater.chat.due import Due, feed_together
from headwater.engines.base import Engine
from headwater.server.job import Failed, Job, Work

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Active:
    """A job under way, and what is due in it."""

    job: Job
    work: Work
    due: Due | None = None


class Worker:
    """`most_active` jobs take turns; more wait in order."""

    def __init__(self, engine: Engine, *, most_active: int = 8) -> None:
        self._engine, self._most = engine, most_active
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._active: list[Active] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="headwater-model", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """How many jobs take turns."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """How many wait for one of them to end."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Take a job on; from any thread."""
        self._inbox.put(lambda: self._waiting.append(job))

    def call(self, action: Callable[[], Result]) -> Future[Result]:
        """Do something between two steps; from any thread."""
        done: Future[Result] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except BaseException as error:
                    done.set_exception(error)

        self._inbox.put(run)
        return done

    def end_all(self, reason: Any) -> None:
        """End every job within a step, the waiting ones too; from any thread."""

        def end() -> None:
            for job in [*self._waiting, *(active.job for active in self._active)]:
                job.end = job.end or reason

        self._inbox.put(end)

    def stop(self, last: Callable[[], None] = lambda: None) -> None:
        """End when every job has ended, with `last` as the last thing done; waits for it."""

        def finish() -> None:
            self._stopping = True

        self._inbox.put(finish)
        self._thread.join()
        last()

    def _run(self) -> None:
        while not (self._stopping and not self._active and not self._waiting):
            self._receive()
            while self._waiting and len(self._active) < self._most:
                job = self._waiting.popleft()
                self._active.append(Active(job, job.run()))
            self.turn()

    def turn(self) -> None:
        """A step for every active job; of those that have more than a token due, for the one that waits longest."""
        self._go_on([active for active in self._active if active.due is None])
        parts = [active for active in self._active if active.due is not None and len(active.due.ids) > 1]
        single = [active for active in self._active if active.due is not None and len(active.due.ids) == 1]
        for active in parts[:1]:
            if active.due is not None:
                active.due.feed()
            self._active.remove(active)
            self._active.append(active)
        if single:
            feed_together(self._engine, [active.due for active in single if active.due is not None])
        self._go_on([*parts[:1], *single])

    def _go_on(self, jobs: list[Active]) -> None:
        """Let them go on to what is due next in each."""
        for active in jobs:
            try:
                active.due = next(active.work)
            except StopIteration:
                self._active.remove(active)
            except Exception as error:  # a defect of the job: it must not take the others with it
                self._active.remove(active)
                active.job.emit(Failed(error=error))

    def _receive(self) -> None:
        """What came in since the last turn; waits for it when there is nothing to do."""
        if not self._active and not self._waiting:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
