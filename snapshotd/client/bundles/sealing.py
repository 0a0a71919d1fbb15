"""Encrypted bundles: the bytes of an export, sealed under the content of a key file.

Bytes: magic "snapseal", version 1, 16 random bytes (the salt), then pieces. A piece is AES-256-GCM of up to 64 KiB
with its tag (16 bytes); all but the last are full. The key is scrypt of the key file's content and the salt, so it
belongs to this one stream. A nonce is the number of the piece and whether it is the last, so no piece can be changed,
moved, left out or cut off unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.client.local.arguments import local_path
from snapshotd.errors import DataLoss, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from snapshotd.client.feeding import Readable

MAGIC = b"snapseal\x01"
_SALT_BYTES, _PIECE_BYTES, _TAG_BYTES = 16, 64 << 10, 16
_KEY_MIN_BYTES, _KEY_MAX_BYTES = 16, 1 << 20
_SCRYPT_COST = 1 << 15
"""32 MiB and a tenth of a second for each guess at a key file's content."""


class Sealing:
    """Encrypts what is written to it; `end` writes the last piece, without which the stream is not whole."""

    def __init__(self, key_file: str | Path, write: Callable[[bytes], object]) -> None:
        """UsageError: the key file cannot be read, or is too short."""
        import secrets

        salt = secrets.token_bytes(_SALT_BYTES)
        self._cipher, self._write = _cipher(key_file, salt), write
        self._held, self._number = bytearray(), 0
        write(MAGIC + salt)

    def write(self, data: bytes) -> None:
        self._held += data
        while len(self._held) > _PIECE_BYTES:  # the last piece is held until the end is known
            self._seal(bytes(self._held[:_PIECE_BYTES]), last=False)
            del self._held[:_PIECE_BYTES]

    def end(self) -> None:
        self._seal(bytes(self._held), last=True)

    def _seal(self, piece: bytes, *, last: bool) -> None:
        self._write(self._cipher.encrypt(_nonce(self._number, last), piece, None))
        self._number += 1


class _Opened:
    """The bytes of a sealed stream, verified piece by piece before any of them is given out."""

    def __init__(self, source: Readable, cipher: AESGCM) -> None:
        self._source, self._cipher = source, cipher
        self._ahead, self._piece = bytearray(), b""
        self._number, self._ended = 0, False

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end. DataLoss: another key, or not what was sealed."""
        while not self._piece and not self._ended:
            self._piece = self._next()
        given, self._piece = self._piece[:count], self._piece[count:]
        return given

    def _next(self) -> bytes:
        from cryptography.exceptions import InvalidTag

        size = _PIECE_BYTES + _TAG_BYTES
        while len(self._ahead) <= size:  # one byte more says that this piece is not the last
            data = self._source.read(size + 1 - len(self._ahead))
            if not data:
                self._ended = True
                break
            self._ahead += data
        sealed = bytes(self._ahead[:size])
        del self._ahead[:size]
        try:
            piece = self._cipher.decrypt(_nonce(self._number, self._ended), sealed, None)
        except (InvalidTag, ValueError) as exc:
            raise DataLoss(
                f"the encrypted bundle cannot be read at piece {self._number + 1}: it is damaged or cut off, or was "
                "encrypted with another key; nothing was taken from it"
            ) from exc
        self._number += 1
        return piece


def unseal(source: Readable, key_file: str | Path | None) -> Readable:
    """The plain bytes of `source`, which is sealed if there is a key file. UsageError: one is sealed and the other is
    missing."""
    begun = b""
    while len(begun) < len(MAGIC):
        data = source.read(len(MAGIC) - len(begun))
        if not data:
            break
        begun += data
    if begun != MAGIC:
        if key_file is not None:
            raise UsageError("the bundle is not encrypted; leave the key file out if you trust its origin")
        return _Behind(begun, source)
    if key_file is None:
        raise UsageError(
            "the bundle is encrypted: name the file with its key (`snapshotd import --decrypt KEY BUNDLE`)"
        )
    salt = b""
    while len(salt) < _SALT_BYTES and (data := source.read(_SALT_BYTES - len(salt))):
        salt += data
    return _Opened(source, _cipher(key_file, salt))


class _Behind:
    """`source` with the bytes in front that were read already."""

    def __init__(self, begun: bytes, source: Readable) -> None:
        self._begun, self._source = begun, source

    def read(self, count: int) -> bytes | None:
        if not self._begun:
            return self._source.read(count)
        given, self._begun = self._begun[:count], self._begun[count:]
        return given


def _cipher(key_file: str | Path, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    try:
        with local_path(key_file).open("rb") as file:
            key = file.read(_KEY_MAX_BYTES)
    except OSError as exc:
        raise UsageError(f"the key file {key_file} cannot be read: {exc.strerror}; name another one") from exc
    if len(key) < _KEY_MIN_BYTES:
        raise UsageError(
            f"the key file {key_file} has {len(key)} bytes; use at least {_KEY_MIN_BYTES} random ones (`openssl rand -hex 32`)"
        )
    return AESGCM(Scrypt(salt=salt, length=32, n=_SCRYPT_COST, r=8, p=1).derive(key))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])
