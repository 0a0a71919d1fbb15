"""What every repository must do. Each function of `CHECKS` takes an empty repository of its own, open for writing."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable

from snapshotd.errors import NotFound
from snapshotd.repo.base import RepositoryWriter, Tree, TreeEntry
from snapshotd.types import BlobID, Kind, RecordID, TreeID

PIECE_BYTES = 1 << 20
FAR_NS = 1 << 65
"""A time that 64 bits of nanoseconds do not hold: the year 3139."""


def own(mode: int = 0o755, mtime_ns: int = 0, **fields: object) -> TreeEntry:
    """A directory's own metadata."""
    return TreeEntry(b"", Kind.DIRECTORY, mode, 0, 0, mtime_ns, **fields)  # type: ignore[arg-type]


def refuses(error: type[Exception], action: Callable[..., object], *values: object) -> None:
    """`action(*values)` raises `error`."""
    try:
        action(*values)
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def load(repository: RepositoryWriter, content: BlobID) -> bytes:
    pieces = list(repository.load(content))
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)
    return b"".join(pieces)


def edited(data: bytes, rng: random.Random) -> bytes:
    """The data with a few bytes replaced somewhere."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(20).hex().encode() + data[at + rng.randrange(60) :]


def contents_of_any_size_round_trip(repository: RepositoryWriter) -> None:
    rng = random.Random(1)
    saved: dict[BlobID, bytes] = {}
    for size in (0, 1, 55, 4096, 262_143, 262_144, 262_145, PIECE_BYTES, 5 * PIECE_BYTES + 7):
        for data in (rng.randbytes(size), bytes(size), (b"line of text\n" * (size // 13 + 1))[:size]):
            content = repository.save_bytes(data)
            saved[content] = data
            assert load(repository, content) == data
            assert repository.size_bytes(content) == size
            assert repository.save_content(io.BytesIO(data).read) == content
    repository.flush()
    assert all(load(repository, content) == data for content, data in saved.items())
    at_once = repository.load_many([*saved, BlobID("ab" * 32)])
    assert all(found is None or found == data for found, data in zip(at_once, [*saved.values(), None], strict=True))


def ids_are_those_of_the_bytes(repository: RepositoryWriter) -> None:
    data = b"the same"
    content, record = repository.save_bytes(data), repository.save_record(data)
    assert content == repository.save_bytes(data)
    assert str(content) != str(record), "bytes of one kind can pass as another"
    assert content != repository.save_bytes(b"another")
    tree = Tree(own(), ())
    assert repository.save_tree(tree) == repository.save_tree(tree) != repository.save_tree(Tree(own(0o700), ()))


def a_reader_may_give_pieces_of_any_length(repository: RepositoryWriter) -> None:
    rng = random.Random(2)
    data = rng.randbytes(900_000) + bytes(3_000_000)
    whole = repository.save_bytes(data)
    source = io.BytesIO(data)
    assert repository.save_content(lambda n: source.read(min(n, rng.choice((1, 5_000, 300_000))))) == whole
    assert load(repository, whole) == data


def what_the_reader_raises_passes_through(repository: RepositoryWriter) -> None:
    for good in (0, 100, 3_000_000):
        source = io.BytesIO(bytes(good))

        def read(n: int, source: io.BytesIO = source) -> bytes:
            data = source.read(n)
            if not data:
                raise ZeroDivisionError
            return data

        refuses(ZeroDivisionError, repository.save_content, read)
    content = repository.save_bytes(b"goes on")
    repository.flush()
    assert load(repository, content) == b"goes on"


def ranges_are_read(repository: RepositoryWriter) -> None:
    rng = random.Random(3)
    for size in (0, 10, 200_000, 4_000_000):
        data = rng.randbytes(size)
        content = repository.save_bytes(data)
        for flushed in (False, True):
            if flushed:
                repository.flush()
            ranges = [(0, 0), (0, 1), (0, size), (size, 10), (size + 5, 10), (max(size - 3, 0), 10), (0, size + 10)]
            ranges += [(rng.randrange(size + 1), rng.randrange(1, 400_000)) for _ in range(20)]
            for offset, length in ranges:
                assert repository.read(content, offset, length) == data[offset : offset + length]


def versions_are_kept_apart(repository: RepositoryWriter) -> None:
    """Many versions of small and large things, each with the one before as a hint, flushed now and then."""
    rng = random.Random(4)
    small, large = b"".join(b"line %d\n" % rng.randrange(10**9) for _ in range(500)), rng.randbytes(1_500_000)
    contents: dict[BlobID, bytes] = {}
    records: dict[RecordID, bytes] = {}
    last_small = last_large = None
    last_record = None
    for number in range(130):
        small = edited(small, rng)
        last_small = repository.save_bytes(small, last_small)
        contents[last_small] = small
        record = b"record %d of many, with words that do not change from one to the next one" % number
        last_record = repository.save_record(record, last_record)
        records[last_record] = record
        if number % 20 == 0:
            large = edited(large, rng)
            last_large = repository.save_bytes(large, last_large)
            contents[last_large] = large
        if number % 7 == 0:
            repository.flush()
    for _ in range(2):
        assert all(load(repository, content) == data for content, data in contents.items())
        assert list(repository.records()) == list(records.items())
        repository.flush()


def a_hint_may_be_anything(repository: RepositoryWriter) -> None:
    data = b"some text that is long enough to be worth a delta, if only there were something like it " * 3
    other = repository.save_bytes(data)
    record, tree = repository.save_record(data), repository.save_tree(Tree(own(), ()))
    large = repository.save_bytes(random.Random(5).randbytes(2_000_000))
    for number, hint in enumerate(("", "0" * 64, "../x", record, tree, large, other)):
        now = data + b"%d" % number
        content = repository.save_bytes(now, BlobID(hint))
        assert load(repository, content) == now
        assert repository.save_bytes(now, content) == content
        again = repository.save_bytes(random.Random(number).randbytes(600_000), BlobID(hint))
        assert repository.size_bytes(again) == 600_000
        assert repository.load_record(repository.save_record(now, RecordID(hint))) == now
    later = repository.save_bytes(data + b"first", None)
    assert load(repository, repository.save_bytes(data + b"second", later)) == data + b"second"
    repository.flush()
    assert load(repository, later) == data + b"first"


def every_kind_of_entry_comes_back(repository: RepositoryWriter) -> None:
    content = repository.save_bytes(b"data")
    inner = repository.save_tree(Tree(own(0o1777, -5), ()))
    file = Kind.FILE
    entries = [
        TreeEntry(b"\x01\xff\n", file, 0o4755, 1000, 1000, 1_700_000_000_123_456_789, 4, content),
        TreeEntry(b"-rf", Kind.FIFO, 0o600, 0, 0, -1),
        TreeEntry(
            b"acl",
            file,
            0o644,
            0,
            0,
            5,
            xattrs=((b"security.capability", b"\1\0"), (b"user.a", b""), (b"user.b", bytes(70_000))),
        ),
        TreeEntry(b"block", Kind.BLOCK_DEVICE, 0o660, 0, 6, 0, rdev=0x800),
        TreeEntry(b"char", Kind.CHAR_DEVICE, 0o666, 0, 0, 0, rdev=0),
        TreeEntry(b"directory", Kind.DIRECTORY, 0, 0, 0, 0, tree=inner),
        TreeEntry(b"far", file, 0o644, 2**32 - 1, 2**32 - 1, FAR_NS, 0),
        TreeEntry(b"huge hole", file, 0o644, 0, 0, 0, 1 << 50, None, ()),
        TreeEntry(b"link 1", file, 0o644, 0, 0, 7, 4, content, link=2**64 - 1, nlink=3),
        TreeEntry(b"link 2", Kind.SYMLINK, 0o777, 0, 0, 7, target=b"\xff" * 4095, link=12, nlink=2),
        TreeEntry(b"past", file, 0, 0, 0, -FAR_NS),
        TreeEntry(b"socket", Kind.SOCKET, 0o755, 3, 4, 4_294_967_295 * 10**9 + 999_999_999),
        TreeEntry(b"sparse", file, 0o644, 0, 0, 0, 10_000, content, ((0, 1), (5_000, 2), (9_999, 1))),
        TreeEntry(b"z" * 255, Kind.SYMLINK, 0o777, 0, 0, 4_294_967_296 * 10**9, target=b"/"),
    ]
    tree = Tree(own(0o2755, 3, xattrs=((b"user.own", b"1"),)), tuple(sorted(entries, key=lambda entry: entry.name)))
    tree_id = repository.save_tree(tree)
    assert repository.load_tree(tree_id) == tree
    repository.flush()
    assert repository.load_tree(tree_id) == tree
    assert repository.load_tree(inner) == Tree(own(0o1777, -5), ())


def large_and_changing_directories_come_back(repository: RepositoryWriter) -> None:
    rng = random.Random(6)
    content = repository.save_bytes(b"x")
    names = sorted(
        {rng.randbytes(rng.randrange(1, 30)).replace(b"/", b"_").replace(b"\0", b"_") for _ in range(3000)}
        - {b".", b".."}
    )
    entries = [
        TreeEntry(name, Kind.FILE, 0o644, rng.randrange(300), 0, rng.randrange(1 << 62), 1, content) for name in names
    ]
    versions: dict[TreeID, Tree] = {}
    last = None
    for number in range(60):
        place = rng.randrange(len(entries))
        if number % 3 == 0:
            del entries[place]
        else:
            old = entries[place]
            entries[place] = TreeEntry(old.name, Kind.FILE, 0o600, 0, 0, rng.randrange(1 << 62), 1, content)
        tree = Tree(own(mtime_ns=number), tuple(entries))
        last = repository.save_tree(tree, last)
        versions[last] = tree
        if number % 10 == 9:
            repository.flush()
    assert all(repository.load_tree(tree_id) == tree for tree_id, tree in versions.items())


def malformed_trees_are_refused(repository: RepositoryWriter) -> None:
    entry = TreeEntry(b"b", Kind.FIFO, 0o644, 0, 0, 0)
    for names in ((b"b", b"a"), (b"a", b"a"), (b"",), (b".",), (b"..",), (b"a/b",), (b"a\0",)):
        entries = tuple(TreeEntry(name, Kind.FIFO, 0o644, 0, 0, 0) for name in names)
        refuses(ValueError, repository.save_tree, Tree(own(), entries))
    refuses(ValueError, repository.save_tree, Tree(entry, ()))
    refuses(ValueError, repository.save_tree, Tree(own(), (TreeEntry(b"d", Kind.DIRECTORY, 0, 0, 0, 0),)))
    assert repository.load_tree(repository.save_tree(Tree(own(), (entry,)))).entries == (entry,)


def what_is_not_there_is_not_found(repository: RepositoryWriter) -> None:
    content, record = repository.save_bytes(b"content"), repository.save_record(b"record")
    tree = repository.save_tree(Tree(own(), ()))
    for flushed in (False, True):
        if flushed:
            repository.flush()
        for missing in ("0" * 64, "", "../../key", "0" * 63, "A" * 64, "0" * 64 + "\n"):
            assert not repository.contains(BlobID(missing))
            refuses(NotFound, repository.load, BlobID(missing))
            refuses(NotFound, repository.read, BlobID(missing), 0, 1)
            refuses(NotFound, repository.size_bytes, BlobID(missing))
            refuses(NotFound, repository.load_tree, TreeID(missing))
            refuses(NotFound, repository.load_record, RecordID(missing))
        refuses(NotFound, repository.load, BlobID(record))
        refuses(NotFound, repository.load_tree, TreeID(content))
        refuses(NotFound, repository.load_record, RecordID(tree))
        assert repository.contains(content)
        assert repository.contains(record)
        assert repository.contains(tree)


def records_keep_their_order(repository: RepositoryWriter) -> None:
    saved: dict[RecordID, bytes] = {}
    for number in range(300):
        data = b'{"number": %d}' % (number * 7919 % 307)
        saved.setdefault(repository.save_record(data), data)
        if number % 40 == 0:
            repository.flush()
            saved.setdefault(repository.save_record(b'{"number": 0}'), b'{"number": 0}')
    assert list(repository.records()) == list(saved.items())


def only_what_is_new_is_counted(repository: RepositoryWriter) -> None:
    repository.save_bytes(b"one")
    repository.save_record(b"two")
    repository.flush()
    once = repository.saved
    repository.save_bytes(b"one")
    repository.save_record(b"two")
    repository.flush()
    repository.flush()
    assert (repository.saved.objects, repository.saved.packed_bytes) == (once.objects, once.packed_bytes)


def threads_read_while_one_writes(repository: RepositoryWriter) -> None:
    rng = random.Random(7)
    texts = [b"".join(b"%d\n" % rng.randrange(10**9) for _ in range(300)) for _ in range(8)]
    first = [repository.save_bytes(text) for text in texts]
    repository.flush()
    known = dict(zip(first, texts, strict=True))
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for content, data in list(known.items()):
                    assert b"".join(repository.load(content)) == data
                    assert repository.read(content, 100, 50) == data[100:150]
        except BaseException as exc:
            failures.append(exc)
            raise

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        last = first
        for number in range(40):
            texts = [edited(text, rng) for text in texts]
            last = [repository.save_bytes(text, previous) for text, previous in zip(texts, last, strict=True)]
            known.update(zip(last, texts, strict=True))
            if number % 5 == 0:
                repository.flush()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not failures, failures


CHECKS: tuple[Callable[[RepositoryWriter], None], ...] = (
    contents_of_any_size_round_trip,
    ids_are_those_of_the_bytes,
    a_reader_may_give_pieces_of_any_length,
    what_the_reader_raises_passes_through,
    ranges_are_read,
    versions_are_kept_apart,
    a_hint_may_be_anything,
    every_kind_of_entry_comes_back,
    large_and_changing_directories_come_back,
    malformed_trees_are_refused,
    what_is_not_there_is_not_found,
    records_keep_their_order,
    only_what_is_new_is_counted,
    threads_read_while_one_writes,
)
