"""The threads that encode objects: in place while little is queued, else some tasks at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.format import compress, encode
from snapshotd.repo.format.encode import Encoded, Job
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing.pending import INLINE_BYTES, Queued

TASK_BYTES, _BULK_TASK_BYTES = 512 << 10, 4 << 20
_THREADS, _MAX_TASKS = 2, 4
_CHECK_ALL_BYTES = 8 << 20
_CHECK_EVERY = 8

Done = list[tuple[Queued, Encoded]]
"""The objects of a task with their frames."""


class Encoders:
    """Encodes objects in the order in which they are added. The caller takes every result."""

    def __init__(self, job: Callable[[Queued, bool], Job]) -> None:
        """`job`: called in any thread; with True, the result is checked."""
        self._job = job
        self._pool: ThreadPoolExecutor | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all tasks."""
        self._task: list[Queued] = []
        self._task_bytes = self._queued_bytes = self._number = 0
        self._tasks: deque[Future[Done]] = deque()

    def add(self, queued: Queued) -> Iterator[Done]:
        """Add an object to the present task. Yields results that are ready."""
        self._task.append(queued)
        self._task_bytes += len(queued.data)
        self._queued_bytes += len(queued.data)
        if self._task_bytes >= (TASK_BYTES if queued.level >= compress.HIGH_LEVEL else _BULK_TASK_BYTES):
            yield from self.end_task()

    def end_task(self) -> Iterator[Done]:
        """Begin with the present task. Yields results that are ready."""
        task, self._task, self._task_bytes = self._task, [], 0
        if not task:
            return
        if self._queued_bytes <= INLINE_BYTES and not self._tasks:
            yield self._encode(task, True)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "repo-encode")
        self._number += 1
        check = self._queued_bytes <= _CHECK_ALL_BYTES or self._number % _CHECK_EVERY == 0
        self._tasks.append(self._pool.submit(self._encode, task, check))
        yield from self.collect(_MAX_TASKS)

    def _encode(self, task: list[Queued], check: bool) -> Done:
        """Encode the objects of a task. Runs in any thread."""
        return list(zip(task, encode.encode_all(self._job(queued, check) for queued in task), strict=True))

    def collect(self, leave: int) -> Iterator[Done]:
        """Yields the results, oldest first; waits until only `leave` tasks are left."""
        while len(self._tasks) > leave or (self._tasks and self._tasks[0].done()):
            yield self._tasks.popleft().result()

    def forget_queued(self) -> None:
        """Forget how much was queued, which is all in the index by now: what comes next may be encoded in place
        again."""
        self._queued_bytes = 0

    def cancel(self) -> None:
        """Tasks that have not begun need not."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def job_of(reader: PackReader, queued: Queued, check: bool) -> Job:
    """An object with the base and the level of its encoding. Called in any thread."""
    base_id, base = _base_of(reader, queued, queued.level)
    similar = tuple((one.id, one.data) for one in queued.similar)
    return Job(queued.kind, queued.id, queued.data, base_id, base, queued.level, check, similar)


def _base_of(reader: PackReader, queued: Queued, level: int) -> tuple[bytes | None, bytes | None]:
    """(id, plain bytes) of the base of the object's delta."""
    base = queued.base
    if isinstance(base, Queued):
        return base.id, base.data
    if base is None:
        return None, None
    try:
        if not queued.branch:
            return base.id, reader.plain(base.id)
        chain = reader.chain(base)[::-1]
        plains = [reader.plain(entry.id) for entry in chain]
        place = encode.best_base(queued.data, plains, level)
        return chain[place].id, plains[place]
    except (DataLoss, NotFound):
        return None, None  # a hint only: the object is stored in full; a reader of the damaged one gets the error
