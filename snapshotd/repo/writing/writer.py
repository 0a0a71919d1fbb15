"""Writing a repository of packs: queue, encode in threads, collect into packs, put, index.

    save_*    hash, queue                                          (the caller's thread)
    batch     8 MiB of a step, or 1 MiB of small ones: drop what
              exists, find bases                                   (the caller's thread, one index query per 256 objects)
    encode    delta or zstd, checksum                              (two threads; in place when little is queued)
    pack      16 MiB of frames in the order they were saved        (the caller's thread), checksum and put into the store (two threads)
    files     of a large step: up to here in processes of their own (packers.py)
    index     one transaction, when the packs are durable          (`flush`, and every some ten thousand objects)

Order on disk: an object's chunks, lists and base lie in the same pack before it, or in an earlier one; a pack's objects
are indexed only when it and all earlier ones are durable. So after a crash that cuts this anywhere, every indexed
object can be read.

Failure. An error while packs are put or indexed drops everything since the last commit: queue, frames, and the packs
put since, as far as they can be deleted (the rest is garbage for the garbage collection). The call raises; ids handed
out since the last flush name nothing, and `saved` does not count them: the caller does its job again. After OutOfSpace,
and when a process that helps was killed, the writer goes on; after anything else it refuses.
"""

from __future__ import annotations

import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from snapshotd import failpoints
from snapshotd.errors import DataLoss, InternalError, LimitExceeded, NotFound, OutOfSpace, SnapshotdError
from snapshotd.repo.base import ObjectKind, PlainFile, Reader, RepositoryWriter, Saved, Tree
from snapshotd.repo.format import chunks, compress, encode, pack
from snapshotd.repo.format.encode import Encoded, Job
from snapshotd.repo.format.ids import raw_id
from snapshotd.repo.format.index import Index, IndexEntry, PackRow, open_index
from snapshotd.repo.format.record import encode_record
from snapshotd.repo.format.tree import MAX_ENTRIES, encode_tree
from snapshotd.repo.reading.reader import CACHE_BYTES, PackReader
from snapshotd.repo.writing import packers
from snapshotd.repo.writing.pending import Building, Guide, Queued, Step, lock, put_pack
from snapshotd.repo.writing.similar import Recent, Similar, sort_of
from snapshotd.store.base import Store
from snapshotd.types import BlobID, RecordID, TreeID, new_id

_BATCH_BYTES, _BATCH_OBJECTS = 8 << 20, 2048
_TASK_BYTES, _BULK_TASK_BYTES = 512 << 10, 4 << 20
_READY_BYTES = 2 * _TASK_BYTES
"""Bytes at the end of a step that keep both threads busy while the next step is saved."""
_MAX_TASKS = 4
_MAX_PUTS, _PUTTERS = 3, 2
_COMMIT_OBJECTS = 50_000
_INLINE_BYTES = 128 << 10
_CHECK_ALL_BYTES = 8 << 20
_CHECK_EVERY = 8
_MUCH_BYTES = 4 << 20
"""From this size on a step goes to processes that run already; they are started for a step so large that it gets the
lowest level."""


class PackRepository(PackReader, RepositoryWriter):
    """The repository for reading and writing. One per repository: a second one is refused with Conflict (lock file
    beside the index)."""

    def __init__(
        self,
        store: Store,
        index_path: Path,
        key: bytes,
        cache_bytes: int = CACHE_BYTES,
        threads: int = 2,
        packer_command: Sequence[str] | None = None,
    ) -> None:
        """The store is not closed by `close`. `packer_command`: starts a process that helps with large steps
        (packer.py). DataLoss when the index is missing although there are packs; VersionMismatch."""
        self._lock_fd = lock(index_path)
        self._packers = None if packer_command is None else packers.Packers(packer_command, self._packed)
        self._pool: ThreadPoolExecutor | None = None
        self._putter: ThreadPoolExecutor | None = None
        try:
            self._writable = open_index(index_path, store)
            super().__init__(store, index_path, key, cache_bytes)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.saved = Saved(0, 0, 0)
        self._threads = threads
        self._broken: str | None = None
        self._recent = Recent()
        self._step = Step()
        self._pending: dict[bytes, Queued] = {}
        self._fresh: dict[bytes, IndexEntry] = {}
        self._frames: dict[bytes, list[pack.Part]] = {}
        self._elsewhere: dict[bytes, list[IndexEntry]] = {}
        """Objects in packs that other processes make, by pack, until the packs are durable."""
        self._reset()

    def _reset(self) -> None:
        """Nothing is queued, and nothing was written since the last commit."""
        self.epoch = new_id()
        self._pending.clear()
        self._fresh.clear()
        self._frames.clear()
        self._elsewhere.clear()
        self._recent.clear()
        self.forget()
        self._step = Step()
        self._batch: list[Queued] = []
        self._batch_bytes = self._queued_bytes = self._seen_bytes = self._number = self._task_number = 0
        self._tasks: deque[Future[list[Encoded]]] = deque()
        self._puts: deque[tuple[Future[None], PackRow, list[IndexEntry]]] = deque()
        self._stored: list[tuple[PackRow, list[IndexEntry]]] = []
        self._building: Building | None = None

    def open_index(self) -> Index | None:
        """The index, open for writing."""
        if self._closed:
            raise InternalError(f"the repository of {self._index_path} was used after it was closed")
        self._index = self._writable
        return self._index

    def close(self) -> None:
        """Close; unflushed data are given up."""
        if self._closed:
            return
        for pool in (self._pool, self._putter):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        if self._packers is not None:
            self._packers.close()
        self._reset()
        super().close()
        os.close(self._lock_fd)

    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        if len(data) > chunks.WHOLE_BYTES:
            return self.save_content(io.BytesIO(data).read, previous)
        raw = self.identity.content(data)
        with self._writing():
            self._queue(
                ObjectKind.CHUNK, raw, bytes(data), _hint(previous), sort_of(name) if name is not None else None
            )
        return BlobID(raw.hex())

    def save_content(self, read: Reader, previous: BlobID | None = None) -> BlobID:
        """See the contract. When `read` raises, chunks that were read before may stay, as rubbish that nothing
        names."""
        begin = chunks.read_full(read, chunks.WHOLE_BYTES + 1)
        if len(begin) <= chunks.WHOLE_BYTES:
            return self.save_bytes(begin, previous)
        hasher = self.identity.content_hasher()
        earlier = _hint(previous)
        guide = Guide(self.parts_of(earlier))
        parts: list[tuple[bytes, int]] = []
        for chunk in chunks.cut(begin, read):
            hasher.update(chunk)
            raw = self.identity.content(chunk)
            parts.append((raw, len(chunk)))
            with self._writing():
                self._queue(ObjectKind.CHUNK, raw, chunk, guide.base_for(raw))
        content = hasher.digest()
        with self._writing():
            if self.find(content) is None:
                self._save_list(content, parts, earlier)
        return BlobID(content.hex())

    def save_files(self, dir_fd: int, files: Sequence[PlainFile]) -> Callable[[], list[BlobID | None]] | None:
        size = sum(file.size for file in files)
        if self._packers is None or not files:
            return None
        much = _MUCH_BYTES if self._packers.running() else compress.LEVELS[-1][0]
        if self._step.bytes + size <= much or not self._packers.ready():
            return None
        with self._writing():
            answers = self._packers.save(dir_fd, files)
        self._step.bytes += size
        self._seen_bytes += size
        return lambda: self._saved_files(answers)

    def _saved_files(self, answers: Callable[[], list[packers.Saved]]) -> list[BlobID | None]:
        with self._writing():
            saved = answers()
            for content, parts in (one for one in saved if isinstance(one, tuple)):
                if self.find(bytes.fromhex(content)) is None:
                    self._save_list(bytes.fromhex(content), parts, None)
        return [None if one is None else BlobID(one if isinstance(one, str) else one[0]) for one in saved]

    def _packed(self, entries: list[IndexEntry], rows: list[PackRow]) -> None:
        """Take in the entries of other processes, and the packs of theirs that have become durable."""
        for entry in entries:
            if (
                entry.id not in self._pending and entry.id not in self._fresh
            ):  # else it stays there for the garbage collection
                self._fresh[entry.id] = entry
                self._elsewhere.setdefault(entry.pack, []).append(entry)
        self._stored += [(row, self._elsewhere.pop(row.id, [])) for row in rows]

    def save_tree(self, tree: Tree, previous: TreeID | None = None) -> TreeID:
        if len(tree.entries) > MAX_ENTRIES:
            what = f"a directory with {len(tree.entries)} entries cannot be stored (at most {MAX_ENTRIES})"
            raise LimitExceeded(f"{what}: spread it over several directories")
        data = encode_tree(tree)
        raw = self.identity.tree(data)
        with self._writing():
            self._queue(ObjectKind.TREE, raw, data, _hint(previous))
        self._keep_tree(raw, tree, len(data))  # the next step begins with it
        return TreeID(raw.hex())

    def save_record(self, data: bytes, previous: RecordID | None = None) -> RecordID:
        data = encode_record(data)
        raw = self.identity.record(data)
        with self._writing():
            self._queue(ObjectKind.RECORD, raw, data, _hint(previous))
            if self._batch_bytes >= _READY_BYTES:
                self._dispatch()
        self._step = Step()
        return RecordID(raw.hex())

    def flush(self) -> None:
        with self._writing():
            if self._packers is not None:
                self._packers.begin_flush()  # they write while this process does
            self._dispatch()
            self._collect(0)
            self._finish_pack()
            self._commit()
        self._step = Step()

    def give_up(self) -> None:
        """Drop everything since the last commit, as when a write fails: ids handed out since the last flush name
        nothing. Needed before objects and packs are removed: a caller that was cut off half way may have built upon
        them."""
        self._drop()

    def forget(self) -> None:
        super().forget()
        self._recent.clear()

    def find(self, raw: bytes) -> IndexEntry | None:
        queued = self._pending.get(
            raw
        )  # looked for first, since the encoding threads look while things move on from there
        entry = self._fresh.get(raw) or super().find(raw)
        if (
            entry is None and queued is not None
        ):  # else it was queued again, and has a place in a pack that others may be deltas against
            return IndexEntry(raw, queued.kind, b"", 0, 0, len(queued.data), None, 0)
        return entry

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None, keep: bool = True) -> bytes:
        queued = self._pending.get(raw)
        if queued is not None and (kinds is None or queued.kind in kinds):
            return queued.data
        return super().plain(raw, kinds, keep)

    def plain_at(self, entry: IndexEntry, keep: bool = True) -> bytes:
        queued = self._pending.get(entry.id)
        if queued is not None:
            return queued.data
        placed = self.find(entry.id) if not entry.pack else entry  # it was queued when another thread looked it up
        return super().plain_at(placed or entry, keep)

    def frame_bytes(self, entry: IndexEntry) -> bytes:
        parts = self._frames.get(entry.id)
        return b"".join(parts) if parts is not None else super().frame_bytes(entry)

    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        yield from super().records()
        queued = [one for one in self._pending.values() if not self._known(one.id)]
        unflushed: list[IndexEntry | Queued] = [*self._fresh.values(), *queued]
        for one in unflushed:
            if one.kind == ObjectKind.RECORD:
                yield RecordID(one.id.hex()), self._record(one.id)

    def _known(self, raw: bytes) -> bool:
        return self._writable.find(raw) is not None

    def _queue(
        self, kind: ObjectKind, raw: bytes, data: bytes, previous: bytes | None, sort: bytes | None = None
    ) -> None:
        if len(data) > pack.MAX_PLAIN_BYTES[kind]:
            raise LimitExceeded(
                f"a {kind.name.lower()} of {len(data)} bytes cannot be stored (at most {pack.MAX_PLAIN_BYTES[kind]}): "
                "spread it over several directories"
            )
        self._seen_bytes += len(data)
        if raw in self._pending or raw in self._fresh:
            return
        self._number += 1
        self._step.bytes += len(data)
        queued = Queued(self._number, kind, raw, data, previous if previous != raw else None, self._step)
        queued.sort = sort
        self._pending[raw] = queued
        self._batch.append(queued)
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_OBJECTS:
            self._dispatch()

    def _dispatch(self) -> None:
        """Turn the batch into tasks: without existing objects, and with the bases of deltas."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch:
            return
        wanted = {queued.id for queued in batch} | {queued.previous for queued in batch if queued.previous is not None}
        known = self._writable.find_many([raw for raw in wanted if raw not in self._fresh])
        fresh = []
        for queued in batch:
            if queued.id in known:
                del self._pending[queued.id]
            else:
                fresh.append(queued)
        task: list[Queued] = []
        size = 0
        for queued in fresh:
            queued.level = compress.level_for(queued.step.bytes)
            self._plan(queued, known)
            if queued.branch and isinstance(
                queued.base, Queued
            ):  # the whole chain must be known to choose a place in it
                if task:
                    self._submit(task, size)
                    task, size = [], 0
                self._collect(0)
                queued.base = self._fresh.get(queued.base.id) or self._writable.find(queued.base.id)
            if queued.sort is not None and queued.base is None and queued.level > encode.BULK_LEVEL:
                self._plan_similar(queued, queued.sort)
            self._queued_bytes += len(queued.data)
            task.append(queued)
            size += len(queued.data)
            if size >= (_TASK_BYTES if queued.level > encode.BULK_LEVEL else _BULK_TASK_BYTES):
                self._submit(task, size)
                task, size = [], 0
        if task:
            self._submit(task, size)

    def _plan(self, queued: Queued, known: dict[bytes, IndexEntry]) -> None:
        """Choose the object that this one may be a delta against."""
        previous = queued.previous
        if previous is None:
            return
        base: IndexEntry | Queued | None = (
            self._fresh.get(previous) or self._pending.get(previous) or known.get(previous)
        )
        if base is None or base.kind != queued.kind or (isinstance(base, Queued) and base.number > queued.number):
            return  # a base comes first in the packs, and so no chain can come back to where it began
        size = base.plain if isinstance(base, IndexEntry) else len(base.data)
        if not encode.may_be_delta(len(queued.data), size):
            return
        queued.base, queued.depth = base, base.depth + 1
        if queued.depth > encode.max_depth(len(queued.data), size):
            queued.depth, queued.branch = encode.MAX_BRANCH + 1, True

    def _plan_similar(self, queued: Queued, sort: bytes) -> None:
        """Choose the files that a new one is to be compared with."""
        found: list[Similar] = []
        for one in self._recent.get(sort, len(queued.data)):
            base = self._pending.get(one.id) or self._fresh.get(one.id) or self._writable.find(one.id)
            if base is not None and base.kind == ObjectKind.CHUNK and base.depth < encode.MAX_SIMILAR_DEPTH:
                queued.depth = max(queued.depth, base.depth + 1)
                found.append(one)
        queued.similar = tuple(found)
        self._recent.add(sort, queued.id, queued.data)

    def _submit(self, task: list[Queued], size: int) -> None:
        if self._queued_bytes <= _INLINE_BYTES and not self._tasks:
            self._place(self._encode(task, True))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "repo-encode")
        self._task_number += 1
        check = self._queued_bytes <= _CHECK_ALL_BYTES or self._task_number % _CHECK_EVERY == 0
        self._tasks.append(self._pool.submit(self._encode, task, check))
        self._collect(_MAX_TASKS)

    def _encode(self, task: list[Queued], check: bool) -> list[Encoded]:
        """In any thread."""
        return encode.encode_all(self._job(queued, check) for queued in task)

    def _job(self, queued: Queued, check: bool) -> Job:
        base_id, base = self._base_of(queued, queued.level)
        similar = tuple((one.id, one.data) for one in queued.similar)
        return Job(queued.kind, queued.id, queued.data, base_id, base, queued.level, check, similar)

    def _base_of(self, queued: Queued, level: int) -> tuple[bytes | None, bytes | None]:
        """(id, plain bytes) of the base of the object's delta."""
        base = queued.base
        if isinstance(base, Queued):
            return base.id, base.data
        if base is None:
            return None, None
        try:
            if not queued.branch:
                return base.id, self.plain(base.id)
            chain = self.chain(base)[::-1]
            plains = [self.plain(entry.id) for entry in chain]
            place = encode.best_base(queued.data, plains, level)
            return chain[place].id, plains[place]
        except (DataLoss, NotFound):
            return None, None  # a hint only: the object is stored in full; a reader of the damaged one gets the error

    def _collect(self, leave: int) -> None:
        while len(self._tasks) > leave or (self._tasks and self._tasks[0].done()):
            self._place(self._tasks.popleft().result())

    def _place(self, encoded: list[Encoded]) -> None:
        for frame in encoded:
            if self._building is None:
                self._building = Building()
            depth = 0
            if frame.base is not None:
                base = self._fresh.get(frame.base) or self._writable.find(frame.base)
                if base is None:
                    raise InternalError(f"the base {frame.base.hex()} of a delta is gone")
                depth = base.depth + 1
            self._frames[frame.id] = frame.parts
            self._fresh[frame.id] = self._building.add(frame, depth)
            queued = self._pending.pop(frame.id)
            if queued.level > encode.BULK_LEVEL:  # the next step's version is likely to be a delta against it
                self._plain_cache.put(frame.id, queued.data, len(queued.data))
            if self._building.bytes >= pack.PACK_BYTES:
                self._finish_pack()

    def _finish_pack(self) -> None:
        building, self._building = self._building, None
        if building is None:
            return
        row = building.row()
        if not self._puts and building.bytes <= _INLINE_BYTES:
            put_pack(self.store, building)
            self._put_done(row, building.entries)
            return
        if self._putter is None:
            self._putter = ThreadPoolExecutor(_PUTTERS, "repo-put")
        self._puts.append((self._putter.submit(put_pack, self.store, building), row, building.entries))
        self._await_puts(_MAX_PUTS)
        if sum(len(entries) for _, entries in self._stored) >= _COMMIT_OBJECTS:
            self._commit()

    def _await_puts(self, leave: int) -> None:
        while len(self._puts) > leave or (self._puts and self._puts[0][0].done()):
            future, row, entries = self._puts[0]
            future.result()
            self._puts.popleft()
            self._put_done(row, entries)

    def _put_done(self, row: PackRow, entries: list[IndexEntry]) -> None:
        self._stored.append((row, entries))
        for entry in entries:
            self._frames.pop(entry.id, None)

    def _commit(self) -> None:
        """Index the objects in packs. All packs are durable before the transaction ends; the last ones become durable
        meanwhile."""
        stored: list[tuple[PackRow, list[IndexEntry]]] = []
        if self._packers is not None:
            self._packers.begin_flush()
        if self._stored or self._puts or self._elsewhere:
            with self._writable.transaction():
                self._add_to_index(0)
                added = len(self._stored)
                if self._packers is not None:
                    self._packers.flush()
                self._await_puts(0)
                self._add_to_index(added)
                stored, self._stored = (
                    self._stored,
                    [],
                )  # from here on the index may know them, so a failure must not take them back
            failpoints.hit("repo.index.committed")
        for _, entries in stored:
            for entry in entries:
                del self._fresh[entry.id]
        packed, objects = sum(row.bytes for row, _ in stored), sum(row.objects for row, _ in stored)
        self.saved = Saved(
            self.saved.objects + objects, self.saved.packed_bytes + packed, self.saved.plain_bytes + self._seen_bytes
        )
        self._seen_bytes = 0
        if not self._fresh and not self._pending:
            self._queued_bytes = 0

    def _add_to_index(self, first: int) -> None:
        for row, entries in self._stored[first:]:
            self._writable.add_pack(row)
            self._writable.add_objects(entries)

    @property
    def refuses(self) -> bool:
        """True if the writer refuses to write, since a write has failed."""
        return self._broken is not None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuses after a failed write; if this write fails, gives up everything uncommitted."""
        if self._broken is not None:
            what = f"the repository of {self._index_path}"
            raise OSError(errno.EIO, f"{what} refuses to write since an earlier failure ({self._broken}): reopen it")
        if self._closed:
            raise InternalError(f"the repository of {self._index_path} was used after it was closed")
        try:
            yield
        except OutOfSpace:
            self._drop()
            raise
        except packers.Lost as exc:
            self._drop()
            raise InternalError(
                "a process that made packs was killed, and what it had not made durable is lost: try again"
            ) from exc
        except LimitExceeded:
            raise  # nothing was queued
        except BaseException as exc:
            self._broken = f"{type(exc).__name__}: {exc}"
            self._drop()
            raise

    def _drop(self) -> None:
        """Give up everything since the last commit, and take back the packs."""
        for task in self._tasks:
            task.cancel()
        if self._packers is not None:
            self._packers.drop()
        rows = [row for row, _ in self._stored]
        for future, row, _ in self._puts:
            if not future.cancel():
                rows.append(row)
                future.exception()  # waits; the first failure is the one that is raised
        self._reset()
        try:
            for row in rows:
                self.store.delete(pack.pack_key(row.id))
        except (OSError, SnapshotdError):
            # the first failure is raised; these packs are garbage that nothing refers to, for the garbage collection
            return

    def _save_list(self, content: bytes, parts: list[tuple[bytes, int]], previous: bytes | None) -> None:
        level = 0
        while len(parts) > chunks.MAX_PARTS:
            above: list[tuple[bytes, int]] = []
            for some in chunks.group(parts):
                data = chunks.encode_list(some, level, True)
                raw = self.identity.inner_list(data)
                self._queue(ObjectKind.LIST, raw, data, None)
                above.append((raw, sum(length for _, length in some)))
            parts, level = above, level + 1
        self._queue(ObjectKind.LIST, content, chunks.encode_list(parts, level, False), previous)


def _hint(previous: str | None) -> bytes | None:
    if previous is None:
        return None
    try:
        return raw_id(previous, "object")
    except NotFound:
        return None
