"""The bytes of a record object: a document with the ids in it at half their length, because ids are most of a small
delta.

    1         0: the document follows as it is; 1: folded
    -         folded: each run of 64 (or else 32) hexadecimal digits is 0x01 (0x02) and the 32 (16) bytes that it says

A document with a byte 0x01 or 0x02 in it, or with nothing to fold, is stored as it is (JSON has neither). One document
has exactly one encoding.
"""

from __future__ import annotations

import re

from snapshotd.repo.format.pack import BadFrame

_HEX = re.compile(rb"[0-9a-f]{64}|[0-9a-f]{32}")
_FOLDED = re.compile(rb"\x01.{32}|\x02.{16}", re.DOTALL)
_MARKS = re.compile(rb"[\x01\x02]")


def encode_record(document: bytes) -> bytes:
    """The bytes of the object."""
    if _MARKS.search(document):
        return b"\x00" + document
    folded = _HEX.sub(
        lambda found: (b"\x01" if len(found[0]) == 64 else b"\x02") + bytes.fromhex(found[0].decode()), document
    )
    return b"\x01" + folded if folded != document else b"\x00" + document


def decode_record(data: bytes) -> bytes:
    """The document. BadFrame unless `encode_record` makes exactly these bytes of it."""
    document = data[1:]
    if data[:1] == b"\x01":
        document = _FOLDED.sub(lambda found: found[0][1:].hex().encode(), document)
    if encode_record(document) != data:
        raise BadFrame("it is no record")
    return document
