"""zstd for the payloads of frames: plain, with the dictionary of the format, and as a delta against another object.

A payload may refer to one of these, before its own beginning: nothing, the base of a delta, the dictionary
(dictionary.py), or the dictionary with the base behind its content.

A payload is a zstd frame (RFC 8878) without its header, which follows from the plain length and is put before it again
to decompress:

    4         magic number
    1         descriptor: single segment, content size of 1, 2 or 4 bytes; no checksum, no dictionary id
    1, 2, 4   content size: below 256, below 65,792 (less 256), or more

The blocks of most payloads are a single one, whose header (3 bytes: last, compressed, length) follows from the
payload's length: then it is left out as well, and the frame says so.

Single segment means that the window is the whole content, so no window is allocated that the content does not fill. A
frame with any other header is never written and cannot be read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

import zstandard

from snapshotd.errors import InternalError
from snapshotd.repo.format import dictionary
from snapshotd.repo.format.pack import BadFrame, Frame

_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_WINDOW_BYTES = 256 << 20
_MAX_BLOCK_BYTES = 128 << 10
_MIN_WINDOW_LOG, _MAX_WINDOW_LOG = 10, 27
_MAX_TABLE_LOG, _MIN_DELTA_LEVEL = 20, 6
HIGH_LEVEL = 10
"""The level of small steps. Below it there is too much to do for looking at every object by itself."""
_ESTIMATE_LEVEL = 1
LEVELS = ((2 << 20, HIGH_LEVEL), (8 << 20, 3))
"""(plain bytes of a step, level up to there)."""
BULK_LEVEL = 1
"""The level of larger steps: an installed package is not worth more."""
_FAST_LEVEL = -1
"""Without entropy coding of literals: a third faster than level 1, and a tenth larger for programs and texts, but not
for noise with repetitions in it."""
_FAST_FROM, _FAST_PERCENT = 8, 1
"""From this number of objects on, one sample is compressed at both levels; the fast level is used for all of them if
its result is at most this many per cent larger."""
_FAST_HASH_LOG = 13
"""A table of 32 KiB, as any processor's first cache holds. zstd takes half of that for up to 128 KiB, which is slower
and finds less."""
_MAX_KEPT_LEVEL, _MAX_KEPT_BITS = 3, 20
_SIZE_CLASSES = (16 << 10, 128 << 10, 256 << 10)
"""Sizes up to which zstd uses the same parameters for one level."""
_CLASS_BITS = (14, 17, 18, 20)
"""The window bits for objects that are compressed together. An object larger than a chunk (1 MiB) is compressed
alone."""


class _Own(threading.local):
    """Compressors that each thread keeps; one thread at a time may use them."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], zstandard.ZstdCompressor] = {}
        self.plain = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)

    @cached_property
    def small(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(
            level=HIGH_LEVEL, dict_data=_shared_dictionary(), write_checksum=False, write_dict_id=False
        )

    @cached_property
    def with_dictionary(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor(dict_data=_shared_dictionary(), max_window_size=_MAX_WINDOW_BYTES)


_OWN = _Own()


def level_for(step_bytes: int) -> int:
    """The compression level for an object of a step with this number of bytes."""
    for limit, level in LEVELS:
        if step_bytes <= limit:
            return level
    return BULK_LEVEL


@cache
def _shared_dictionary() -> zstandard.ZstdCompressionDict:
    """The dictionary that all threads share for objects that are no deltas: its tables are made once."""
    found = zstandard.ZstdCompressionDict(dictionary.load(), dict_type=zstandard.DICT_TYPE_FULLDICT)
    found.precompute_compress(level=HIGH_LEVEL)
    return found


def compress_small(data: bytes) -> memoryview:
    """Payload of an object that is not too long for it, with the dictionary. Releases the interpreter's lock."""
    return _strip(_OWN.small.compress(data), len(data))


def compress(data: bytes, level: int) -> memoryview:
    """Payload of an object, without the dictionary. Releases the interpreter's lock."""
    return _strip(_compressor(level, max(len(data), 1).bit_length()).compress(data), len(data))


def compress_many(datas: Sequence[bytes], level: int) -> list[memoryview]:
    """Payloads of objects that are not empty, of one level or, where a sample says that it costs no space, of a faster
    one. Releases the interpreter's lock once for all of a size class: so reading and compressing threads pass it to
    each other less often."""
    payloads: dict[int, memoryview] = {}
    places = sorted(range(len(datas)), key=lambda place: len(datas[place]))
    for bits in _CLASS_BITS:
        some = [place for place in places[len(payloads) :] if len(datas[place]) <= 1 << bits]
        if some:
            payloads |= zip(some, _compress_class([datas[place] for place in some], level, bits), strict=True)
    payloads |= {place: compress(datas[place], level) for place in places[len(payloads) :]}
    return [payloads[place] for place in range(len(datas))]


def _compress_class(datas: Sequence[bytes], level: int, bits: int) -> list[memoryview]:
    """Payloads of objects of up to 2**bits bytes."""
    if level == BULK_LEVEL and len(datas) >= _FAST_FROM:
        sample = datas[len(datas) // 2]
        usual, fast = (len(_compressor(one, bits).compress(sample)) for one in (BULK_LEVEL, _FAST_LEVEL))
        level = _FAST_LEVEL if fast * 100 <= usual * (100 + _FAST_PERCENT) else level
    frames = _compressor(level, bits).multi_compress_to_buffer([*datas])
    return [_strip(memoryview(frames[place]), len(data)) for place, data in enumerate(datas)]  # type: ignore[arg-type]  # see decode_many


def compress_delta(data: bytes, base: bytes, level: int, with_dictionary: bool = False) -> memoryview:
    """Payload of an object as a delta against `base`. Releases the interpreter's lock.

    Tables as large as the base, and no level without a search: with the defaults of the low levels most of a base of 1
    MiB is forgotten before it could be found again (measured: one byte inserted near the beginning costs 900 KiB at
    level 1, 113 bytes so).
    """
    level = max(level, _MIN_DELTA_LEVEL)
    words = _delta_dictionary(base, with_dictionary)
    params = _delta_parameters(level, len(data), len(words))
    return _strip(zstandard.ZstdCompressor(dict_data=words, compression_params=params).compress(data), len(data))


def estimate_delta(data: bytes, base: bytes) -> int:
    """About how many bytes a delta would be: good enough to choose among bases of up to 128 KiB, in a third of the
    time. Releases the interpreter's lock."""
    params = _delta_parameters(_ESTIMATE_LEVEL, len(data), len(base))
    return len(
        zstandard.ZstdCompressor(dict_data=_delta_dictionary(base, False), compression_params=params).compress(data)
    )


def _delta_dictionary(base: bytes, with_dictionary: bool) -> zstandard.ZstdCompressionDict:
    if with_dictionary:
        return zstandard.ZstdCompressionDict(dictionary.load() + base, dict_type=zstandard.DICT_TYPE_FULLDICT)
    return zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def one_block(payload: memoryview) -> memoryview | None:
    """The payload without the header of its only block; None if there are more, or of another type."""
    length = len(payload) - 3
    return payload[3:] if 0 < length <= _MAX_BLOCK_BYTES and payload[:3] == _block_header(length) else None


def _block_header(length: int) -> bytes:
    return (1 | 2 << 1 | length << 3).to_bytes(3, "little")


def decode(frame: Frame, base: bytes | None = None) -> bytes:
    """The plain bytes of a frame, whose base is given if it is a delta. BadFrame."""
    if not frame.zstd:
        return bytes(frame.payload)
    payload: bytes | memoryview = frame.payload
    if frame.one_block:
        if len(payload) > _MAX_BLOCK_BYTES:
            raise BadFrame("its only block is too long")
        payload = _block_header(len(payload)) + bytes(payload)
    return decompress(payload, frame.plain, base, frame.dictionary)


def decode_many(frames: Sequence[Frame]) -> list[bytes | memoryview | None]:
    """The plain bytes of frames that are no deltas. None for each damaged frame, or for all frames (with the
    dictionary, or without) if zstd does not tell which one is damaged.

    Gives up the interpreter's lock once, not once for each. Bytes behind a payload's end go unnoticed: the caller
    verifies the object's id anyway.
    """
    plains: list[bytes | memoryview | None] = [None if frame.zstd else frame.payload for frame in frames]
    for with_dictionary in (False, True):
        places = [
            place
            for place, frame in enumerate(frames)
            if frame.zstd and frame.plain and frame.dictionary == with_dictionary
        ]
        if not places:
            continue
        decompressor = _OWN.with_dictionary if with_dictionary else _OWN.plain
        try:
            decoded = decompressor.multi_decompress_to_buffer([_whole(frames[place]) for place in places])
        except zstandard.ZstdError:
            continue
        for number, place in enumerate(places):
            plains[place] = memoryview(decoded[number])  # type: ignore[arg-type]  # its stub does not say that it is a buffer
    return plains


def _whole(frame: Frame) -> bytes:
    """The payload as zstd would have written it."""
    block = _block_header(len(frame.payload)) if frame.one_block else b""
    return b"".join((_header(frame.plain), block, frame.payload))


def decompress(
    payload: bytes | memoryview, plain_bytes: int, base: bytes | None = None, with_dictionary: bool = False
) -> bytes:
    """The plain bytes: exactly as many as declared, else BadFrame. Releases the interpreter's lock."""
    if not plain_bytes:
        raise BadFrame("it is compressed though there is nothing to compress")
    frame = b"".join((_header(plain_bytes), payload))
    if base is None:
        decompressor = _OWN.with_dictionary if with_dictionary else _OWN.plain
    else:
        words = _delta_dictionary(base, with_dictionary)
        decompressor = zstandard.ZstdDecompressor(dict_data=words, max_window_size=_MAX_WINDOW_BYTES)
    try:
        plain = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise BadFrame(f"it does not decompress ({exc})") from None
    if len(plain) != plain_bytes:
        raise BadFrame("it decompresses to another length than it declares")
    return plain


def _compressor(level: int, bits: int) -> zstandard.ZstdCompressor:
    """The thread's own compressor for objects of up to 2**bits bytes. It is kept for levels that are used in bulk,
    since making one takes 15 us."""
    kept = _OWN.kept
    key = (level, bits)
    found = kept.get(key)
    if found is None:
        size = (1 << bits) - 1
        found = zstandard.ZstdCompressor(compression_params=_parameters(level, size, _window_log(size)))
        if level <= _MAX_KEPT_LEVEL and bits <= _MAX_KEPT_BITS:
            kept[key] = found
    return found


def _delta_parameters(level: int, plain_bytes: int, before_bytes: int) -> zstandard.ZstdCompressionParameters:
    """The parameters of a level with tables that cover everything before the plain bytes."""
    size = plain_bytes + before_bytes
    size_class = next((most for most in _SIZE_CLASSES if size <= most), _SIZE_CLASSES[-1] + 1)
    return _parameters(level, size_class, _window_log(size), True)


def _window_log(size_bytes: int) -> int:
    """Bits of a window that holds everything: the frame is then a single segment, and can refer to all bytes before
    it."""
    return min(max((size_bytes - 1).bit_length(), _MIN_WINDOW_LOG), _MAX_WINDOW_LOG)


@lru_cache(256)
def _parameters(
    level: int, size_bytes: int, window_log: int, large_tables: bool = False
) -> zstandard.ZstdCompressionParameters:
    """The parameters that a level has for this size, with the window."""
    log = min(window_log - 1, _MAX_TABLE_LOG)
    tables = (
        {"hash_log": log, "chain_log": log}
        if large_tables
        else {"hash_log": min(log, _FAST_HASH_LOG)}
        if level < 0
        else {}
    )
    return zstandard.ZstdCompressionParameters.from_level(
        level, source_size=size_bytes, window_log=window_log, write_checksum=False, write_dict_id=False, **tables
    )


def _header(plain_bytes: int) -> bytes:
    if plain_bytes < 256:
        return _MAGIC + bytes((0x20, plain_bytes))
    if plain_bytes < 65_792:
        return _MAGIC + b"\x60" + (plain_bytes - 256).to_bytes(2, "little")
    return _MAGIC + b"\xa0" + plain_bytes.to_bytes(4, "little")


def _strip(frame: bytes | memoryview, plain_bytes: int) -> memoryview:
    """Return the frame without its header, uncopied: copying all payloads of a large step would take as long as hashing
    its objects."""
    header = _header(plain_bytes)
    if frame[: len(header)] != header:
        raise InternalError(
            f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))} writes other headers than this format can hold"
        )
    return memoryview(frame)[len(header) :]
