"""Objects as frames: raw, compressed, or a delta, whichever is clearly smallest; and read back before they count."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from snapshotd.errors import InternalError
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import compress, pack
from snapshotd.repo.format.pack import Part

MAX_CHAIN = 50
"""Deltas in a row at most (git's default as well)."""
MAX_CHAIN_BYTES = 8 << 20
"""An object of n plain bytes has at most MAX_CHAIN_BYTES / n deltas to undo, so reading one never decodes more than
some ten MiB."""
_MIN_DELTA_BYTES = 48
MAX_BRANCH = 32
"""A chain branches at a version with at most this number of deltas to undo."""
_MAX_BASE_RATIO = 8
_FRAME_BYTES = 12
MAX_SIMILAR_DEPTH = 4
"""Deltas against similar files in a row; the versions of a path come on top of that."""


class Job(NamedTuple):
    """An object to be stored. `level` and `check` (read it back) depend on how much is queued."""

    kind: ObjectKind
    id: bytes
    data: bytes
    base_id: bytes | None
    base: bytes | None
    level: int
    check: bool
    similar: tuple[tuple[bytes, bytes], ...] = ()
    """(id, plain bytes) of other files that it may be like."""


class Encoded(NamedTuple):
    """A frame that is ready for any pack. `base` is None when it is no delta."""

    kind: ObjectKind
    id: bytes
    plain: int
    base: bytes | None
    parts: list[Part]
    stored: int


def may_be_delta(plain_bytes: int, base_bytes: int) -> bool:
    """True if a delta of an object against another one is worth trying, going by their sizes."""
    return plain_bytes >= _MIN_DELTA_BYTES and 0 < base_bytes <= _MAX_BASE_RATIO * plain_bytes + (64 << 10)


def max_depth(plain_bytes: int, base_bytes: int) -> int:
    """Greatest number of deltas to undo for reading the object."""
    return min(MAX_CHAIN, MAX_CHAIN_BYTES // max(plain_bytes, base_bytes, 1))


def best_base(data: bytes, chain: list[bytes], level: int) -> int:
    """Index in a full chain (from its beginning) of the version that should be the base of the next one, so that the
    chain branches there.

    The cost is shared by the versions that then fit: a delta against an early version is larger and leaves room for
    more. Over time this makes a chain of every fiftieth version beside the chain of all, and no full copy (400 commits:
    8 % smaller packs).
    """
    limit = max_depth(len(data), max(map(len, chain)))
    best, best_cost = 0, float("inf")
    for place in (0, 2, 4, 8, 16, MAX_BRANCH):
        if place < min(len(chain), limit - 1):
            cost = (len(compress.compress_delta(data, chain[place], level)) + _FRAME_BYTES) / (limit - place - 1)
            best, best_cost = (place, cost) if cost < best_cost else (best, best_cost)
    return best


class _Form(NamedTuple):
    """The form in which an object is stored. Without a payload, no form is smaller than the bytes themselves."""

    payload: memoryview | None
    dictionary: bool = False
    base_id: bytes | None = None
    base: bytes | None = None


def _frame(job: Job, form: _Form) -> Encoded:
    """Make the frame of an object in this form. InternalError: a compressed payload does not decompress to its input."""
    payload, short = form.payload, None
    if payload is not None:
        if job.check and compress.decompress(payload, len(job.data), form.base, form.dictionary) != job.data:
            what = f"{job.kind.name.lower()} {job.id.hex()}"
            raise InternalError(f"the {what} did not survive its compression: check the memory of this machine")
        short = compress.one_block(payload)
    parts = pack.encode_frame(
        job.kind,
        job.id,
        len(job.data),
        short or payload or job.data,
        payload is not None,
        form.base_id,
        one_block=short is not None,
        dictionary=form.dictionary,
    )
    return Encoded(job.kind, job.id, len(job.data), form.base_id, parts, sum(map(len, parts)))


def encode_all(jobs: Iterable[Job]) -> list[Encoded]:
    """The frames of objects, in their order. The objects of a large step that are no deltas are compressed together."""
    done: list[Encoded] = []
    for bulk, group in groupby(jobs, _in_bulk):
        some = list(group)
        if bulk:
            payloads = compress.compress_many([job.data for job in some], some[0].level)
            done += [_frame(job, _worth(job.data, _Form(payload))) for job, payload in zip(some, payloads, strict=True)]
        else:
            done += [_frame(job, _smallest(job)) for job in some]
    return done


def _in_bulk(job: Job) -> int:
    """The level, if the object is compressed together with others of this level; else 0."""
    return job.level if job.level < compress.HIGH_LEVEL and job.base is None and not job.similar and job.data else 0


def _smallest(job: Job) -> _Form:
    data, delta = job.data, None
    small = len(data) <= pack.MAX_DICTIONARY_BYTES
    words = small and job.kind == ObjectKind.CHUNK
    if job.base is not None:
        delta = _Form(compress.compress_delta(data, job.base, job.level, words), words, job.base_id, job.base)
        if _length(delta) * 2 < len(data):
            return delta
    if small and job.level >= compress.HIGH_LEVEL:
        plain = _Form(compress.compress_small(data), True)
    else:
        plain = _Form(compress.compress(data, job.level))
    if job.base is None and job.similar and _length(plain) * 100 < len(data) * 90:
        trials = [compress.estimate_delta(data, other) for _, other in job.similar]
        base_id, base = job.similar[trials.index(min(trials))]
        delta = _Form(compress.compress_delta(data, base, job.level, words), words, base_id, base)
    if delta is not None and _length(delta) * 20 < min(_length(plain), len(data)) * 19:
        return delta
    return _worth(data, plain)


def _length(form: _Form) -> int:
    return len(form.payload or b"") + (pack.BASE_BYTES if form.base is not None else 0)


def _worth(data: bytes, plain: _Form) -> _Form:
    """Less than 3 % is not worth the time that every reading would take."""
    return plain if _length(plain) * 100 < len(data) * 97 else _Form(None)
