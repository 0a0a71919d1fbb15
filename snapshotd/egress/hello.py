"""The server name in the first message of a TLS connection (RFC 8446 4.1.2, RFC 6066 3). A message may come in many
records, and a record in many packets."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

RECORD_HANDSHAKE = 0x16
_CLIENT_HELLO, _SERVER_HELLO, _SERVER_NAME, _HOST_NAME = 1, 2, 0, 0
_ASKS_AGAIN = sha256(b"HelloRetryRequest").digest()
"""The random of a server's hello that asks for another one of the client (RFC 8446 4.1.3)."""
_RANDOM_END = 4 + 2 + 32
_HEAD_BYTES = 5
_RECORD_MAX_BYTES = 16_384 + 256
HELLO_MAX_BYTES = 65_536
"""All records together. A hello with several large key shares has some 4 KiB."""


class BadHello(Exception):  # noqa: N818 - the sandbox's bytes are at fault
    """Not the beginning of a TLS connection that tells one server name."""


def may_be_tls(data: bytes) -> bool:
    """True if these first bytes can begin a TLS connection."""
    return data[:1] == b"\x16" and (len(data) < 2 or data[1] == 3)


@dataclass(frozen=True, slots=True)
class ClientHello:
    """`name`: the server name, of any bytes, as Latin-1. `end`: the number of bytes that the records of the hello have."""

    name: str
    end: int


def client_hello(data: bytes) -> ClientHello | None:
    """The hello with which these bytes begin; None: there is more to come. BadHello."""
    message, end = _handshake_bytes(data)
    if message[:1] not in (b"", bytes((_CLIENT_HELLO,))):
        raise BadHello("it does not begin with a hello")
    length = _length(message)
    if length is None or len(message) < length:
        if len(data) > HELLO_MAX_BYTES or (length or 0) > HELLO_MAX_BYTES:
            raise BadHello("its hello is too long")
        if end < len(data) and data[end] != RECORD_HANDSHAKE:
            raise BadHello("another record follows before its hello is complete")
        return None
    if len(message) > length or end > len(data):
        raise BadHello("something follows its hello in the same record")
    return ClientHello(_name_in(_Reader(bytes(message[4:]))), end)


def asks_again(data: bytes) -> bool | None:
    """True if a server whose first bytes these are asks for another hello; None: more of them would tell."""
    try:
        message, end = _handshake_bytes(data, _RANDOM_END)
    except BadHello:
        return False
    if len(message) < _RANDOM_END:
        return False if end < len(data) and data[end] != RECORD_HANDSHAKE else None
    return message[0] == _SERVER_HELLO and message[6:_RANDOM_END] == _ASKS_AGAIN


def begins_handshake(data: bytes) -> bool:
    """True if the next record is one of the handshake."""
    return data[:1] == bytes((RECORD_HANDSHAKE,))


def other_record(data: bytes) -> int:
    """The size of a record that is none of the handshake, with which these bytes begin; 0: it is not complete."""
    size = _HEAD_BYTES + int.from_bytes(data[3:_HEAD_BYTES])
    return size if len(data) >= max(size, _HEAD_BYTES) else 0


def _length(message: bytearray) -> int | None:
    return 4 + int.from_bytes(message[1:4]) if len(message) >= 4 else None


def _handshake_bytes(data: bytes, wanted: int | None = None) -> tuple[bytearray, int]:
    """The content of the first handshake records, as many as the first message or the first `wanted` bytes take; and
    where the last of them ends. BadHello."""
    message, at = bytearray(), 0
    while at + _HEAD_BYTES <= len(data) and data[at] == RECORD_HANDSHAKE:
        length = int.from_bytes(data[at + 3 : at + 5])
        if data[at + 1] != 3 or not 0 < length <= _RECORD_MAX_BYTES:
            raise BadHello("a record of it is malformed")
        message += data[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        at += _HEAD_BYTES + length
        needed = wanted or _length(message)
        if needed is not None and len(message) >= needed:
            break
    return message, at


class _Reader:
    """Takes lengths and what they count from a message. BadHello beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise BadHello("its hello is malformed")
        self._at += count
        return self._data[self._at - count : self._at]

    def take_counted(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width)))

    def has_ended(self) -> bool:
        return self._at == len(self._data)


def _name_in(hello: _Reader) -> str:
    hello.take(2 + 32)  # version, random
    hello.take_counted(1)  # session
    hello.take_counted(2)  # ciphers
    hello.take_counted(1)  # compressions
    if hello.has_ended():
        raise BadHello("it tells no server name")
    extensions, found = _Reader(hello.take_counted(2)), []
    while not extensions.has_ended():
        kind, content = int.from_bytes(extensions.take(2)), extensions.take_counted(2)
        if kind == _SERVER_NAME:
            found.append(content)
    if not hello.has_ended():
        raise BadHello("its hello is malformed")
    if len(found) != 1:
        raise BadHello("it tells no server name" if not found else "it tells several server names")
    names = _Reader(found[0])
    listed = _Reader(names.take_counted(2))
    kind, name = int.from_bytes(listed.take(1)), listed.take_counted(2)
    if kind != _HOST_NAME or not listed.has_ended() or not names.has_ended():
        raise BadHello("it tells several server names")
    return name.decode("latin-1")
