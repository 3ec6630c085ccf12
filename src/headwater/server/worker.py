"""The one thread that drives the model: jobs take turns, a step each, so that nobody waits for another's end.

Knows whose turn it is. Does not know what a step does. Steps of several jobs are not computed together yet: `turn` is
where a batched step goes, once an engine has one; until then as many conversations share one conversation's speed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from headwater.server.job import Failed, Job

Result = TypeVar("Result")


class Worker:
    """`most_active` jobs take turns; more wait in order."""

    def __init__(self, *, most_active: int = 8) -> None:
        self._most = most_active
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._active: deque[tuple[Job, Generator[None, None, None]]] = deque()
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
            for job in [*self._waiting, *(job for job, _ in self._active)]:
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
                self._active.append((job, job.run()))
            self.turn()

    def turn(self) -> None:
        """One step for every active job."""
        for _ in range(len(self._active)):
            job, steps = self._active.popleft()
            try:
                next(steps)
            except StopIteration:
                continue
            except Exception as error:  # a defect of the job: it must not take the others with it
                job.emit(Failed(error=error))
                continue
            self._active.append((job, steps))

    def _receive(self) -> None:
        """What came in since the last turn; waits for it when there is nothing to do."""
        if not self._active and not self._waiting:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
