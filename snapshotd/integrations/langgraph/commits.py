"""Changes of many threads in few commits: to reach the disk takes longer than all else, and a commit may hold many
changes.

A thread that comes while a commit is under way waits, and the first of those then commits for all. Each change is whole or not
at all, whatever becomes of the others; a commit that fails fails them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from snapshotd.sqlite import Database

T = TypeVar("T")


class _Job:
    """A change that waits. `done`: its commit is durable, or it has failed."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None


class Commits:
    """Thread-safe. `failed` is called after each rollback, while the database's lock is held."""

    def __init__(self, database: Database, failed: Callable[[], None]) -> None:
        self._db, self._failed = database, failed
        self._waiting: list[_Job] = []
        self._guard, self._turn = threading.Lock(), threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` in a transaction and return what it returns once that is durable. Raises what `work` raises, and the
        errors of a commit."""
        job = _Job(work)
        with self._guard:
            self._waiting.append(job)
        with self._turn:
            if not job.done:
                with self._guard:
                    jobs, self._waiting = self._waiting, []
                self._commit(jobs)
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _commit(self, jobs: list[_Job]) -> None:
        try:
            with self._db.transaction():
                if len(jobs) == 1:
                    jobs[0].value = jobs[0].work()
                else:
                    for job in jobs:
                        self._within(job)
        except BaseException as exc:  # noqa: BLE001 - each of them raises it in its own thread
            for job in jobs:
                job.error = job.error or exc
            with self._db.lock:
                self._failed()
        finally:
            for job in jobs:
                job.done = True

    def _within(self, job: _Job) -> None:
        self._db.read("SAVEPOINT change")
        try:
            job.value = job.work()
        except BaseException as exc:
            job.error = exc
            if not self._db.connection.in_transaction:  # SQLite itself rolled all of it back (disk full)
                raise
            self._db.read("ROLLBACK TO change")
            self._failed()
        self._db.read("RELEASE change")
