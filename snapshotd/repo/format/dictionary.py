"""The dictionary that payloads of packs since version 2 are compressed with: a zstd dictionary (RFC 8878, section 5),
part of the format.

Its content is `dictionary.txt`, phrases that programs, documents and the output of commands have in common, the most
frequent last, where they are nearest. Its entropy tables come from this project's files, compressed with that content.
Neither may ever change: stored payloads need them to be read. Other texts would be another dictionary, with another
flag in the frame.

Saving over 400 commits of two projects: 7 % of new files, 3 % of deltas; and both can do with a much lower level.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xxhash

from snapshotd.errors import InternalError

_FILE = Path(__file__).with_name("dictionary.txt")
_HEADER = bytes.fromhex(
    "37a430ec736e61704010a8329c363033333333333333333313557f7b4393bd99441a31b6c4680b99d8358b990d4fbfa0ff14d0f01acf5bcc11a4d300fecd"
    "707b0705e2fb32132605035300001028404c2a180de753d20c0004000c5511cda98389348d921c87510a19638c2184000080010001000000000034b10ad6"
    "a998740a190200000000000000000000010000000400000008000000"
)
"""Magic number, id, tables of literals, offsets, match and literal lengths, and the first three offsets (1, 4, 8)."""
_CHECKSUM = "5483fd2bb50e4cd72bba2d4d4e3338e7"


@cache
def load() -> bytes:
    """Header and content. InternalError when the file is not the one that belongs to the format."""
    found = _HEADER + _FILE.read_bytes()
    if xxhash.xxh3_128_hexdigest(found) != _CHECKSUM:
        raise InternalError(
            f"{_FILE} is not as it was installed, and stored data cannot be read without it: install snapshotd again"
        )
    return found
