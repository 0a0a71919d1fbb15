"""Values on their way to PostgreSQL and back. A process that has not opened such a catalog never imports this.

A text in PostgreSQL holds neither U+0000 nor half a surrogate pair, and a text of an agent may. So such a text, and one
that begins with the mark, is stored as the mark and its JSON, which is ASCII. Equal texts stay equal, and different ones
different. Their order is another one: the catalog compares by order what is never such a text.
"""

from __future__ import annotations

import json
from typing import Any

from psycopg import Connection
from psycopg.adapt import Buffer, Loader
from psycopg.types.numeric import Int8Dumper, IntLoader
from psycopg.types.string import BytesBinaryDumper, StrDumper

from snapshotd.catalog.database import TextBytes

_MARK = "\x01"


def encode(text: str) -> bytes:
    """A text as PostgreSQL holds it."""
    if "\0" not in text and not text.startswith(_MARK):
        try:
            return text.encode()
        except UnicodeEncodeError:
            pass  # half a surrogate pair
    return (_MARK + json.dumps(text)).encode()


def decode(data: bytes) -> str:
    """Reverse `encode`."""
    text = data.decode()
    return str(json.loads(text[1:])) if text.startswith(_MARK) else text


class _Text(StrDumper):
    def dump(self, obj: str) -> Buffer:
        return encode(obj)


class _TextBytes(StrDumper):
    def dump(self, obj: Any) -> Buffer:
        return encode(obj.decode(errors="surrogatepass"))


class _LoadedText(Loader):
    def load(self, data: Buffer) -> str:
        return decode(bytes(data))


def adapt(connection: Connection[Any]) -> None:
    """Have a connection take and give the catalog's values. A whole number is a `bigint` whatever its size, so that a
    statement is planned once; so is what adding them up gives."""
    adapters = connection.adapters
    adapters.register_dumper(str, _Text)
    adapters.register_dumper(bytes, BytesBinaryDumper)
    adapters.register_dumper(TextBytes, _TextBytes)
    adapters.register_dumper(int, Int8Dumper)
    adapters.register_loader("text", _LoadedText)
    adapters.register_loader("numeric", IntLoader)
