"""The server name in the first message of a TLS connection (RFC 8446 4.1.2, RFC 6066 3). A message may come in many
records, and a record in many packets."""

from __future__ import annotations

RECORD_HANDSHAKE = 0x16
_CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 1, 0, 0
_HEAD_BYTES = 5
_RECORD_MAX_BYTES = 16_384 + 256
HELLO_MAX_BYTES = 65_536
"""All records together. A hello with several large key shares has some 4 KiB."""


class BadHello(Exception):  # noqa: N818 - the sandbox's bytes are at fault
    """Not the beginning of a TLS connection that tells one server name."""


def may_be_tls(data: bytes) -> bool:
    """True if these first bytes can begin a TLS connection."""
    return data[:1] == b"\x16" and (len(data) < 2 or data[1] == 3)


def server_name(data: bytes) -> str | None:
    """The server name, of any bytes, as Latin-1; None: there is more to come. BadHello."""
    message, whole = _handshake_bytes(data)
    if len(message) >= 1 and message[0] != _CLIENT_HELLO:
        raise BadHello("it does not begin with a hello")
    if len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4]):
        if whole or len(data) > HELLO_MAX_BYTES or int.from_bytes(message[1:4]) > HELLO_MAX_BYTES:
            raise BadHello("its hello is too long")
        return None
    return _name_in(_Reader(message[4 : 4 + int.from_bytes(message[1:4])]))


def _handshake_bytes(data: bytes) -> tuple[bytes, bool]:
    """The content of the handshake records so far, and True if another record follows that is none."""
    message, at = bytearray(), 0
    while at < len(data):
        if data[at] != RECORD_HANDSHAKE:
            return bytes(message), True
        if at + _HEAD_BYTES > len(data):
            break
        length = int.from_bytes(data[at + 3 : at + 5])
        if data[at + 1] != 3 or not 0 < length <= _RECORD_MAX_BYTES:
            raise BadHello("a record of it is malformed")
        message += data[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        at += _HEAD_BYTES + length
    return bytes(message), False


class _Reader:
    """Takes lengths and what they count from a message. BadHello beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise BadHello("its hello is malformed")
        self._at += count
        return self._data[self._at - count : self._at]

    def counted(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width)))

    def has_ended(self) -> bool:
        return self._at == len(self._data)


def _name_in(hello: _Reader) -> str:
    hello.take(2 + 32)  # version, random
    hello.counted(1)  # session
    hello.counted(2)  # ciphers
    hello.counted(1)  # compressions
    if hello.has_ended():
        raise BadHello("it tells no server name")
    extensions, found = _Reader(hello.counted(2)), []
    while not extensions.has_ended():
        kind, content = int.from_bytes(extensions.take(2)), extensions.counted(2)
        if kind == _SERVER_NAME:
            found.append(content)
    if not hello.has_ended():
        raise BadHello("its hello is malformed")
    if len(found) != 1:
        raise BadHello("it tells no server name" if not found else "it tells several server names")
    names = _Reader(found[0])
    listed = _Reader(names.counted(2))
    kind, name = int.from_bytes(listed.take(1)), listed.counted(2)
    if kind != _HOST_NAME or not listed.has_ended() or not names.has_ended():
        raise BadHello("it tells several server names")
    return name.decode("latin-1")
