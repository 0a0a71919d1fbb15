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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from snapshotd import failpoints
from snapshotd.errors import InternalError, LimitExceeded, NotFound, OutOfSpace, SnapshotdError
from snapshotd.repo.base import ForwardedReads, ObjectKind, PlainFile, Reader, RepositoryWriter, Saved, Tree
from snapshotd.repo.format import chunks, compress, pack
from snapshotd.repo.format.ids import raw_id
from snapshotd.repo.format.index import Index, IndexEntry, PackRow, open_index
from snapshotd.repo.format.record import encode_record
from snapshotd.repo.format.tree import MAX_ENTRIES, encode_tree
from snapshotd.repo.reading.finder import closed_error
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing import packers
from snapshotd.repo.writing.bases import Bases
from snapshotd.repo.writing.encoders import TASK_BYTES, Done, Encoders, job_of
from snapshotd.repo.writing.output import PackOutput
from snapshotd.repo.writing.pending import Guide, Queued, Step, lock
from snapshotd.repo.writing.similar import sort_of
from snapshotd.repo.writing.unflushed import Stored, Unflushed
from snapshotd.store.base import Store
from snapshotd.terms import number_of
from snapshotd.types import BlobID, RecordID, TreeID, new_id

_BATCH_BYTES, _BATCH_OBJECTS = 8 << 20, 2048
_READY_BYTES = 2 * TASK_BYTES
"""Bytes at the end of a step that keep both threads busy while the next step is saved."""
_COMMIT_OBJECTS = 50_000
_MUCH_BYTES = 4 << 20
"""From this size on a step goes to processes that run already; they are started for a step so large that it gets the
lowest level."""


class _Batch:
    """Objects that were saved and not looked up yet."""

    def __init__(self) -> None:
        self.bytes = 0
        self._objects: list[Queued] = []
        self._number = 0

    def add(self, kind: ObjectKind, raw: bytes, data: bytes, previous: bytes | None, step: Step) -> Queued:
        self._number += 1
        queued = Queued(self._number, kind, raw, data, previous, step)
        self._objects.append(queued)
        self.bytes += len(data)
        return queued

    @property
    def full(self) -> bool:
        return self.bytes >= _BATCH_BYTES or len(self._objects) >= _BATCH_OBJECTS

    def take(self) -> list[Queued]:
        objects, self._objects, self.bytes = self._objects, [], 0
        return objects


class PackRepository(ForwardedReads, RepositoryWriter):
    """The repository for reading and writing. One per repository: a second one is refused with Conflict (lock file
    beside the index)."""

    def __init__(
        self,
        store: Store,
        index_path: Path,
        key: bytes,
        packer_command: Sequence[str] | None = None,
        index_kind: type[Index] = Index,
    ) -> None:
        """The store is not closed by `close`. `packer_command`: starts a process that helps with large steps
        (packer.py). DataLoss when the index is missing although there are packs; VersionMismatch."""
        with ExitStack() as opened:
            self._lock_fd = lock(index_path)
            opened.callback(os.close, self._lock_fd)
            self.index = open_index(index_path, store, index_kind)
            opened.callback(self.index.close)
            self._unflushed = Unflushed(self.index)
            self.reader: PackReader = PackReader(store, index_path, key, finder=self._unflushed)
            opened.pop_all()
        self._bases = Bases(self._unflushed)
        self._encoders = Encoders(partial(job_of, self.reader))
        self._output = PackOutput(store, self._unflushed.note_durable)
        self._packers = None if packer_command is None else packers.Packers(packer_command, self._take_packed)
        self.saved = Saved(0, 0, 0)
        self._broken: str | None = None
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """Forget everything since the last commit."""
        self.epoch = new_id()
        self._unflushed.clear()
        self.reader.forget()
        self._bases.clear()
        self._encoders.clear()
        self._output.clear()
        self._step, self._batch, self._seen_bytes = Step(), _Batch(), 0

    def close(self) -> None:
        """Close; unflushed data are given up."""
        if self._closed:
            return
        self._encoders.close()
        self._output.close()
        if self._packers is not None:
            self._packers.close()
        self._reset()
        self._closed = True
        self.reader.close()
        os.close(self._lock_fd)

    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        if len(data) > chunks.WHOLE_BYTES:
            return self.save_content(io.BytesIO(data).read, previous)
        raw = self.reader.identity.content(data)
        with self._writing():
            self._queue(ObjectKind.CHUNK, raw, bytes(data), _hint(previous), None if name is None else sort_of(name))
        return BlobID(raw.hex())

    def save_content(self, read: Reader, previous: BlobID | None = None) -> BlobID:
        """See the contract. When `read` raises, chunks that were read before may stay in packs as garbage."""
        begin = chunks.read_full(read, chunks.WHOLE_BYTES + 1)
        if len(begin) <= chunks.WHOLE_BYTES:
            return self.save_bytes(begin, previous)
        hasher = self.reader.identity.content_hasher()
        earlier = _hint(previous)
        guide = Guide(self.reader.contents.parts_of(earlier))
        parts: list[tuple[bytes, int]] = []
        for chunk in chunks.cut_chunks(begin, read):
            hasher.update(chunk)
            raw = self.reader.identity.content(chunk)
            parts.append((raw, len(chunk)))
            with self._writing():
                self._queue(ObjectKind.CHUNK, raw, chunk, guide.base_for(raw))
        content = hasher.digest()
        with self._writing():
            if self._unflushed.find(content) is None:
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
        return lambda: self._take_saved_files(answers)

    def _take_saved_files(self, answers: Callable[[], list[packers.Saved]]) -> list[BlobID | None]:
        with self._writing():
            saved = answers()
            for content, parts in (one for one in saved if isinstance(one, tuple)):
                if self._unflushed.find(bytes.fromhex(content)) is None:
                    self._save_list(bytes.fromhex(content), parts, None)
        return [None if one is None else BlobID(one if isinstance(one, str) else one[0]) for one in saved]

    def _take_packed(self, entries: list[IndexEntry], rows: list[PackRow]) -> None:
        """Take in the entries of other processes, and the packs of theirs that have become durable."""
        self._output.add_stored(self._unflushed.place_elsewhere(entries, rows))

    def save_tree(self, tree: Tree, previous: TreeID | None = None) -> TreeID:
        if len(tree.entries) > MAX_ENTRIES:
            what = f"a directory with {number_of(len(tree.entries), 'entry')} cannot be stored (at most {MAX_ENTRIES})"
            raise LimitExceeded(f"{what}: spread it over several directories")
        data = encode_tree(tree)
        raw = self.reader.identity.tree(data)
        with self._writing():
            self._queue(ObjectKind.TREE, raw, data, _hint(previous))
        self.reader.keep_tree(raw, tree, len(data))  # the next step begins with it
        return TreeID(raw.hex())

    def save_record(self, data: bytes, previous: RecordID | None = None) -> RecordID:
        data = encode_record(data)
        raw = self.reader.identity.record(data)
        with self._writing():
            self._queue(ObjectKind.RECORD, raw, data, _hint(previous))
            if self._batch.bytes >= _READY_BYTES:
                self._dispatch()
        self._step = Step()
        return RecordID(raw.hex())

    def flush(self) -> None:
        with self._writing():
            if self._packers is not None:
                self._packers.begin_flush()  # they write while this process does
            self._dispatch()
            self._place(self._encoders.collect(0))
            self._output.finish()
            self._commit()
        self._step = Step()

    def give_up(self) -> None:
        """Drop everything since the last commit, as when a write fails: ids handed out since the last flush name
        nothing. Needed before objects and packs are removed: a caller that was cut off half way may have built upon
        them."""
        self._drop()

    def _queue(
        self, kind: ObjectKind, raw: bytes, data: bytes, previous: bytes | None, sort: bytes | None = None
    ) -> None:
        if len(data) > pack.MAX_PLAIN_BYTES[kind]:
            raise LimitExceeded(
                f"a {kind.name.lower()} of {len(data)} bytes cannot be stored (at most {pack.MAX_PLAIN_BYTES[kind]}): "
                "spread it over several directories"
            )
        self._seen_bytes += len(data)
        if raw in self._unflushed:
            return
        self._step.bytes += len(data)
        queued = self._batch.add(kind, raw, data, previous if previous != raw else None, self._step)
        queued.sort = sort
        self._unflushed.add(queued)
        if self._batch.full:
            self._dispatch()

    def _dispatch(self) -> None:
        """Have the batch encoded, without objects that exist, and after the bases of deltas were chosen."""
        fresh, known = self._unflushed.drop_existing(self._batch.take())
        for queued in fresh:
            self._plan(queued, known)
            self._place(self._encoders.add(queued))
        self._place(self._encoders.end_task())

    def _plan(self, queued: Queued, known: dict[bytes, IndexEntry]) -> None:
        """Choose the level and the base of an object."""
        queued.level = compress.level_for(queued.step.bytes)
        self._bases.plan(queued, known)
        if queued.branch and isinstance(queued.base, Queued):  # the whole chain must be known to choose a place in it
            self._place(self._encoders.end_task())
            self._place(self._encoders.collect(0))
            queued.base = self._unflushed.place_of(queued.base.id)
        if queued.sort is not None and queued.base is None and queued.level >= compress.HIGH_LEVEL:
            self._bases.plan_similar(queued, queued.sort)

    def _place(self, results: Iterable[Done]) -> None:
        """Put encoded objects into packs."""
        for encoded in results:
            for queued, frame in encoded:
                depth = 0
                if frame.base is not None:
                    base = self._unflushed.place_of(frame.base)
                    if base is None:
                        raise InternalError(f"the base {frame.base.hex()} of a delta is gone")
                    depth = base.depth + 1
                self._unflushed.place(frame, self._output.add(frame, depth))
                if queued.level >= compress.HIGH_LEVEL:  # the next step's version is likely to be a delta against it
                    self.reader.keep(frame.id, queued.data)
                if self._output.full:
                    self._output.finish()
                    if sum(len(entries) for _, entries in self._output.stored) >= _COMMIT_OBJECTS:
                        self._commit()

    def _commit(self) -> None:
        """Index the objects in packs. All packs are durable before the transaction ends; the last ones become durable
        meanwhile."""
        stored: Stored = []
        if self._packers is not None:
            self._packers.begin_flush()
        if not self._output.empty or self._unflushed.awaits_others:
            with self.index.transaction():
                self.index.add_stored(self._output.stored)
                added = len(self._output.stored)
                if self._packers is not None:
                    self._packers.flush()
                self._output.wait(0)
                self.index.add_stored(self._output.stored[added:])
                stored = self._output.take_stored()  # the index may know them from here on: no failure takes them back
            failpoints.hit("repo.index.committed")
        self._unflushed.note_indexed(stored)
        packed, objects = sum(row.bytes for row, _ in stored), sum(row.objects for row, _ in stored)
        self.saved = Saved(
            self.saved.objects + objects, self.saved.packed_bytes + packed, self.saved.plain_bytes + self._seen_bytes
        )
        self._seen_bytes = 0
        if self._unflushed.empty:
            self._encoders.forget_queued()

    @property
    def refuses(self) -> bool:
        """True if the writer refuses to write, since a write has failed."""
        return self._broken is not None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuses after a failed write; if this write fails, gives up everything uncommitted."""
        if self._broken is not None:
            what = f"the repository of {self.index.path}"
            raise OSError(errno.EIO, f"{what} refuses to write since an earlier failure ({self._broken}): reopen it")
        if self._closed:
            raise closed_error(self.index.path)
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
        self._encoders.cancel()
        if self._packers is not None:
            self._packers.drop()
        rows = self._output.put_so_far()
        self._reset()
        # The first failure is raised; packs that stay are garbage that nothing refers to, for the garbage collection.
        with suppress(OSError, SnapshotdError):
            for row in rows:
                self.reader.store.delete(pack.pack_key(row.id))

    def _save_list(self, content: bytes, parts: list[tuple[bytes, int]], previous: bytes | None) -> None:
        for raw, data in chunks.lists_of(content, parts, self.reader.identity.inner_list):
            self._queue(ObjectKind.LIST, raw, data, previous if raw == content else None)


def _hint(previous: str | None) -> bytes | None:
    if previous is None:
        return None
    try:
        return raw_id(previous, "object")
    except NotFound:
        return None
