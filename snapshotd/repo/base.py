"""The repository: durable, deduplicated storage of contents, trees and records; and the spool that comes before it.

    spool        what a step has just written (tool outputs): complete after kill -9, one file per content, until it is archived
    repository   everything *stored*: contents in chunks, trees, records, in packs with an index

An *object* is immutable and known by its id, the keyed BLAKE3-256 of its plain bytes in hexadecimal (64 characters).
The key is the repository's, and another one is derived from it for each kind, so that a file can never pass as a tree.
There are:

    content   the bytes of a file or a tool output, of any length. Its id (`BlobID`) is the hash of all its bytes, however they are cut.
    tree      one directory: its own metadata and its entries, which name contents and further trees (`TreeID`)
    record    a small JSON document about a snapshot, trajectory, image (`RecordID`), from which the catalog can be rebuilt

Durability: saved objects are durable when `flush` has returned, and not before. After a crash, objects whose flush did
not return are there or not there, each as a whole. A failed flush is fatal for everything it covered: OSError, and the
writer refuses everything after it. Concurrency: one writer per repository, in one process; any number of readers in any
number of processes, at any time, also during garbage collection. Readers are thread-safe; the writer is not.
Errors: NotFound (no such object), DataLoss (stored bytes are missing or damaged; names object and pack), OutOfSpace
(nothing half saved; the writer goes on working when there is space), VersionMismatch (written by a newer version),
OSError.

    spool.py, spool_format.py   the spool and the bytes of its files
    key.py                      the key
    (docs/format.md)            the bytes of packs, frames and trees
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from snapshotd.types import BlobID, Kind, RecordID, TreeID

Reader = Callable[[int], bytes]
"""`read(n)`: the next at most n bytes; b"" at the end."""


class ObjectKind(IntEnum):
    """The kind of a frame in a pack. The numbers are on disk."""

    CHUNK = 1
    """A piece of a content, or a whole one that is not larger than a piece."""
    LIST = 2
    """A large content: the list of its chunks (or further lists). Its id is the content's id."""
    TREE = 3
    RECORD = 4


class TreeEntry(NamedTuple):
    """One entry of a stored directory. Ids are the container's; `mode` is permission bits only (12 bits).

    FILE: `size` (logical), `content` (None if there is no data), `extents`: None, or for a sparse file the (offset,
    length) of its data in ascending order; `content` then is their bytes joined. SYMLINK: `target`. Devices: `rdev` (as
    st_rdev). DIRECTORY: `tree`. `link`: 0, or the hard link group (64 bits): the entries of one tree with the same
    number are names of one inode, `nlink` of them. `xattrs`: sorted by name; overlayfs's own
    never.
    """

    name: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    content: BlobID | None = None
    extents: tuple[tuple[int, int], ...] | None = None
    target: bytes = b""
    rdev: int = 0
    tree: TreeID | None = None
    link: int = 0
    nlink: int = 1
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """One stored directory: `own` is its own metadata (name b"", kind DIRECTORY, tree None); `entries` sorted by the
    bytes of their names, each name once, none empty, `.`, `..` or with a slash or NUL in it. A sub-directory's entry
    carries only `name`, `kind` and `tree` (the other fields are zero): its metadata are in its own object, so that a
    change of them is a change of its id."""

    own: TreeEntry
    entries: tuple[TreeEntry, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """Growth since the writer was opened: objects, bytes added to the packs, and plain bytes handed in."""

    objects: int
    packed_bytes: int
    plain_bytes: int


class Repository(ABC):
    """Reading. See the module's text."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors. Idempotent."""

    @abstractmethod
    def contains(self, object_id: BlobID | TreeID | RecordID) -> bool:
        """True if the index knows the object. Says nothing about its bytes."""

    @abstractmethod
    def load_tree(self, tree_id: TreeID) -> Tree:
        """A directory, verified (id, checksum and form). Recently used ones come from memory (bounded)."""

    @abstractmethod
    def load_record(self, record_id: RecordID) -> bytes:
        """A record, verified."""

    @abstractmethod
    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        """Every record, in the order they were saved. For rebuilding the catalog."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Size of all packs."""

    @abstractmethod
    def size_bytes(self, content: BlobID) -> int:
        """A content's length."""

    @abstractmethod
    def load(self, content: BlobID) -> Iterator[bytes]:
        """A content from its beginning, in pieces of at most 1 MiB. NotFound at the call. Every byte is checked, chunk
        by chunk and as a whole; DataLoss is raised at the latest at the end, and always before wrong data would pass as
        complete."""

    def load_many(self, contents: Sequence[BlobID]) -> list[bytes | memoryview | None]:
        """Small contents at once, verified, in their order: much faster than one by one. None is no answer: the content
        may be large, missing, damaged or something else that `load` returns or explains. Memory: some 20 MiB at most,
        for any number of contents. NotFound for a text that is no id."""
        return [None] * len(contents)

    @abstractmethod
    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        """Bytes of a content from `offset` (less than `length` at the end, b"" beyond it). Every chunk they come from
        is checked; recent ones come from memory (bounded). Cost: the chunks touched, each with at most the bounded
        chain of deltas."""


class ForwardedReads(Repository):
    """Reads through another repository, `reader`."""

    reader: Repository

    def contains(self, object_id: BlobID | TreeID | RecordID) -> bool:
        return self.reader.contains(object_id)

    def load_tree(self, tree_id: TreeID) -> Tree:
        return self.reader.load_tree(tree_id)

    def load_record(self, record_id: RecordID) -> bytes:
        return self.reader.load_record(record_id)

    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        return self.reader.records()

    def stored_bytes(self) -> int:
        return self.reader.stored_bytes()

    def size_bytes(self, content: BlobID) -> int:
        return self.reader.size_bytes(content)

    def load(self, content: BlobID) -> Iterator[bytes]:
        return self.reader.load(content)

    def load_many(self, contents: Sequence[BlobID]) -> list[bytes | memoryview | None]:
        return self.reader.load_many(contents)

    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        return self.reader.read(content, offset, length)


class FollowedReads(ABC):
    """The beginning of one tree that is read bit by bit. `repository`: the view reads through it."""

    repository: Repository

    @abstractmethod
    def close(self) -> None:
        """The tree is not read any more: nothing more is fetched ahead. Idempotent."""


class ReadOrders(ABC):
    """Fetches ahead what a tree's earlier readers needed, where a bucket is far away (repo/fleet/reads.py)."""

    @abstractmethod
    def follow(self, tree: TreeID, below: TreeID) -> FollowedReads:
        """The difference of two trees is about to be read. Never fails, and returns at once."""


class PlainFile(NamedTuple):
    """A regular file as it was listed, which is nothing but its content: no hole in it, no attributes."""

    name: bytes
    device: int
    inode: int
    size: int


class RepositoryWriter(Repository):
    """Reading and writing. Saved objects can be read at once through this writer, and by others after `flush`.

    `previous`: the earlier version of the same thing (same path in the parent's tree), which a delta may be made
    against. A hint: it may be None, missing or anything. An object that exists already is not saved again. Every method
    may return before the bytes are in a file.
    """

    saved: Saved
    epoch: str
    """Changes whenever unflushed data were given up: objects that were saved in an earlier epoch, and not flushed in
    it, may be nowhere."""

    @abstractmethod
    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        """Save a content that is in memory (any size; meant for up to some MiB). `name`: the file's name, if it is a
        file. A new file may become a delta against another one whose name ends alike. A hint."""

    @abstractmethod
    def save_content(self, read: Reader, previous: BlobID | None = None) -> BlobID:
        """Save a content from a reader, in constant memory. Errors that `read` raises pass through; nothing is kept
        then."""

    def save_files(self, dir_fd: int, files: Sequence[PlainFile]) -> Callable[[], list[BlobID | None]] | None:
        """Begin to save the contents of new files in a directory, in other processes. None: there are no such processes
        (yet), or they are not worth it for so little. `dir_fd` is not needed any more on return.

        The returned function waits, and gives their ids in order: None for each file that does not match its
        `PlainFile` (any more), which the caller has to save by itself. Unlike others these contents can be read after
        `flush` only.
        InternalError, besides the other methods' errors: such a process was killed; nothing since the last flush is
        saved, so save it again.
        """
        return None

    @abstractmethod
    def save_tree(self, tree: Tree, previous: TreeID | None = None) -> TreeID:
        """Save a directory. ValueError when it is malformed (order, names); LimitExceeded when it is too large."""

    @abstractmethod
    def save_record(self, data: bytes, previous: RecordID | None = None) -> RecordID:
        """Save a record."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything saved is durable: packs, then index. Nothing to do costs nothing."""


# -- keeping it small and whole ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roots:
    """The objects that must stay: ids, each with its owner (a snapshot's or image's id), which messages name."""

    trees: Mapping[TreeID, str]
    contents: Mapping[BlobID, str]
    records: Mapping[RecordID, str]

    def join(self, other: Roots) -> Roots:
        """The union of two sets of roots."""
        return Roots(
            {**other.trees, **self.trees}, {**other.contents, **self.contents}, {**other.records, **self.records}
        )


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The result of a collection, planned if dry: `freed_bytes` is the amount by which the packs shrink, `packs_bytes`
    their size afterwards."""

    freed_bytes: int
    packs_bytes: int
    packs_removed: int
    packs_rewritten: int
    packs_unknown: int
    """Packs that stay although the index does not know them."""
    segment: int | None = None
    """In a fleet, the number of the node's last index segment."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, in words. `owner` and `path`: the first snapshot and file that need the object; None: none does, or it
    is not known."""

    what: str
    pack: str | None = None
    object_id: str | None = None
    owner: str | None = None
    path: bytes | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `owners`: every owner of a root that cannot be read in full. `bytes_read`: of packs."""

    objects: int
    packs: int
    bytes_read: int
    faults: tuple[Fault, ...]
    owners: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        faults = [
            [f.what, f.pack, f.object_id, f.owner, f.path.hex() if f.path is not None else None] for f in self.faults
        ]
        return {
            "objects": self.objects,
            "packs": self.packs,
            "bytes_read": self.bytes_read,
            "faults": faults,
            "owners": list(self.owners),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> CheckResult:
        faults = tuple(
            Fault(what, pack, object_id, owner, bytes.fromhex(path) if path is not None else None)
            for what, pack, object_id, owner, path in value["faults"]
        )
        return CheckResult(value["objects"], value["packs"], value["bytes_read"], faults, tuple(value["owners"]))


@dataclass(frozen=True, slots=True)
class RepairResult:
    """`actions`: one sentence each, empty if there was no damage; `gone`: ids of objects that no
    pack has any more; they may be needed by nothing, or still be in layers."""

    actions: tuple[str, ...]
    gone: tuple[str, ...]


class Maintenance(ABC):
    """The writer's process only. Each may be cut off anywhere and run again. A collection and a repair give up the data
    that a failed archive left unflushed, since they may lie in packs, or build upon objects, that go; the caller that
    saved them saves them again."""

    @abstractmethod
    def writer(self) -> RepositoryWriter:
        """The repository, opened for writing at the first call, and again where a write has failed. A repair ends it:
        ask again afterwards. DataLoss, VersionMismatch."""

    @abstractmethod
    def collect(
        self,
        roots: Roots,
        *,
        grace_s: float,
        now: float,
        dry_run: bool,
        progress: Callable[[str], object],
        wanted: Callable[[bytes], bool] = lambda _: False,
    ) -> Reclaimed:
        """Remove objects that the roots do not reach, from packs older than the grace period. Deltas keep their bases.
        Packs that the index does not know go too, unless one of them has a record that is `wanted`: then all stay, and
        `progress` is told.
        Needs room for one pack at most; packs in which nothing lives go first, so it works on a full disk. `now`:
        seconds since the epoch. DataLoss (naming the object) when an object that a root needs is missing: then nothing
        is removed."""

    @abstractmethod
    def check(self, roots: Roots, *, read_data: bool, progress: Callable[[str], object]) -> CheckResult:
        """Verify index, packs and everything the roots reach; with `read_data` also every object against its id.
        Changes nothing; damage is a result."""

    @abstractmethod
    def repair(self, progress: Callable[[str], object]) -> RepairResult:
        """Rebuild the index from the packs, and packs without their damaged frames. Changes nothing in a healthy
        repository."""


@dataclass(slots=True)
class Peers:
    """The nodes of the fleet, as this process was last told of them.

    `segments`: every node that has ever published, with the number of its last index segment. `oldest_pin_s`: the time (seconds
    since the epoch) at which the oldest reader began that is still protected; None: there is none. Packs that were removed later
    stay.
    """

    segments: Mapping[str, int] = field(default_factory=dict)
    oldest_pin_s: float | None = None


class SharedMaintenance(Maintenance):
    """A node's part of a repository that several write (repo/fleet)."""

    @abstractmethod
    def publish(self, roots: Roots, *, now: float) -> int:
        """Flush, and let the others know what this node has stored. Returns the number of the node's last index segment. The
        caller tells the fleet's catalog afterwards that `roots` are needed. Conflict: some of what they need was collected
        meanwhile, so all unpublished snapshots of this node must be archived again. OSError: try again."""

    @abstractmethod
    def merge(self, *, ahead: bool = False) -> None:
        """Take over what the others have published; with `ahead`, also segments in the bucket that nobody has told of yet. DataLoss,
        OSError: what came before is merged."""
