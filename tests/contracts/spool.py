"""What every repository must do. Each function of `CHECKS` takes an empty repository of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from snapshotd.errors import InternalError, NotFound
from snapshotd.repo.spool import Spool
from snapshotd.types import BlobID
from tests.contracts.refusal import refuses

PIECE_BYTES = 1 << 20


def load(repository: Spool, blob_id: BlobID) -> bytes:
    return b"".join(repository.load_blob(blob_id))


def content_of_any_size_round_trips(repository: Spool) -> None:
    rng = random.Random(1)
    for size in (0, 1, 55, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7):
        for data in (rng.randbytes(size), bytes(size), (b"line of text\n" * (size // 13 + 1))[:size]):
            blob_id = repository.save_blob(data)
            assert load(repository, blob_id) == data
            assert repository.size_bytes(blob_id) == size
            pieces = [len(piece) for piece in repository.load_blob(blob_id)]
            assert all(0 < piece <= PIECE_BYTES for piece in pieces)


def pieces_of_any_length_make_the_same_blob(repository: Spool) -> None:
    rng = random.Random(2)
    data = rng.randbytes(100_000) + bytes(2_000_000)
    whole = repository.save_blob(data)
    with repository.writer() as writer:
        position = 0
        while position < len(data):
            length = rng.choice((0, 1, 3, 5000, 300_000))
            writer.write(data[position : position + length])
            position += length
            assert writer.size_bytes == min(position, len(data))
        assert writer.save() == whole
    assert list(repository.blobs()) == [whole]
    assert load(repository, whole) == data


def an_unfinished_blob_is_never_seen(repository: Spool) -> None:
    writer = repository.writer()
    writer.write(b"x" * 3_000_000)
    assert list(repository.blobs()) == []
    writer.discard()
    writer.discard()
    try:
        with repository.writer() as writer:
            writer.write(b"half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert list(repository.blobs()) == []
    refuses(InternalError, writer.write, b"more")
    refuses(InternalError, writer.save)


def discarding_after_saving_keeps_it(repository: Spool) -> None:
    with repository.writer() as writer:
        writer.write(b"kept")
        blob_id = writer.save()
        writer.discard()
    assert load(repository, blob_id) == b"kept"


def what_is_not_there_is_not_found(repository: Spool) -> None:
    repository.save_blob(b"something")
    for blob_id in ("0" * 64, "", "../../key", "/etc/passwd", "0" * 63, "A" * 64, "0" * 64 + "\n"):
        refuses(NotFound, repository.load_blob, BlobID(blob_id))
        refuses(NotFound, repository.size_bytes, BlobID(blob_id))
        repository.remove(BlobID(blob_id))
    assert len(list(repository.blobs())) == 1


def removed_blobs_are_gone_and_can_come_back(repository: Spool) -> None:
    one, two = repository.save_blob(b"one"), repository.save_blob(b"two")
    repository.remove(one)
    repository.remove(one)
    refuses(NotFound, repository.load_blob, one)
    assert list(repository.blobs()) == [two]
    assert repository.save_blob(b"one") == one
    repository.flush()
    assert load(repository, one) == b"one"


def a_reader_keeps_what_it_has_begun(repository: Spool) -> None:
    data = random.Random(3).randbytes(5 * PIECE_BYTES)
    blob_id = repository.save_blob(data)
    begun, asked = repository.load_blob(blob_id), repository.load_blob(blob_id)
    begin = next(begun)
    repository.remove(blob_id)
    assert begin + b"".join(begun) == data
    assert b"".join(asked) == data


def flushing_is_repeatable(repository: Spool) -> None:
    repository.flush()
    for count in (1, 3, 50):
        ids = [repository.save_blob(b"%d of %d" % (number, count)) for number in range(count)]
        repository.remove(ids[0])
        repository.flush()
        repository.flush()
        assert all(load(repository, one) for one in ids[1:])


def threads_save_the_same_and_different_content(repository: Spool) -> None:
    """Eight threads, half of their blobs in common, flushing and removing meanwhile."""
    failures: list[BaseException] = []
    ids: list[set[BlobID]] = [set() for _ in range(8)]

    def work(number: int) -> None:
        try:
            for n in range(40):
                ids[number].add(repository.save_blob(b"common %d " % n * 5000))
                ids[number].add(repository.save_blob(b"own %d %d " % (number, n) * 5000))
                passing = repository.save_blob(b"passing")
                repository.remove(passing)
                if n % 10 == number:
                    repository.flush()
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures
    everything = set().union(*ids)
    assert set(repository.blobs()) == everything
    assert len(everything) == 40 + 8 * 40
    assert all(len(load(repository, one)) == repository.size_bytes(one) for one in everything)


CHECKS: tuple[Callable[[Spool], None], ...] = (
    content_of_any_size_round_trips,
    pieces_of_any_length_make_the_same_blob,
    an_unfinished_blob_is_never_seen,
    discarding_after_saving_keeps_it,
    what_is_not_there_is_not_found,
    removed_blobs_are_gone_and_can_come_back,
    a_reader_keeps_what_it_has_begun,
    flushing_is_repeatable,
    threads_save_the_same_and_different_content,
)
