"""Encrypted bundles: whole, from the right key, or refused."""

from __future__ import annotations

import hashlib
import io
import itertools
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from snapshotd.client.bundles import sealing
from snapshotd.client.bundles.sealing import MAGIC, Sealing, unseal
from snapshotd.errors import DataLoss, UsageError

PIECE = 100


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small, and a key is made fast: these tests make hundreds."""
    monkeypatch.setattr(sealing, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(sealing, "_SCRYPT_COST", 2)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    return path


def sealed(key: Path, data: bytes, step: int = 30) -> bytes:
    out = io.BytesIO()
    sealing = Sealing(key, out.write)
    for start in range(0, len(data), step):
        sealing.write(data[start : start + step])
    sealing.end()
    return out.getvalue()


def read(data: bytes, key: Path | None, count: int = 41) -> bytes:
    source = unseal(io.BytesIO(data), key)
    return b"".join(iter(lambda: source.read(count) or b"", b""))


def test_the_stream_is_as_the_module_says(key: Path) -> None:
    """Read by its description, with another implementation of scrypt."""
    data = bytes(range(256)) * 400
    whole = sealed(key, data, 50_000)
    magic, salt, pieces = whole[:9], whole[9:25], whole[25:]
    assert magic == b"snapseal\x01"
    secret = hashlib.scrypt(key.read_bytes(), salt=salt, n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32)
    cipher, full = AESGCM(secret), (64 << 10) + 16
    plain = cipher.decrypt(bytes(12), pieces[:full], None) + cipher.decrypt(bytes(10) + b"\1\1", pieces[full:], None)
    assert plain == data
    assert read(whole, key) == data


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 17])
def test_what_is_sealed_comes_back(key: Path, size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    for step, count in itertools.product((1, 99, 1000), (1, 100, 1000)):
        assert read(sealed(key, data, step), key, count) == data
    assert sealed(key, data) != sealed(key, data), "a salt of its own each time"


@pytest.mark.usefixtures("small")
def test_a_change_anywhere_is_found_and_nothing_wrong_is_given_out(key: Path) -> None:
    data = bytes(range(250)) * 2
    whole = sealed(key, data)
    changed = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(MAGIC), len(whole), 13)]
    cut = [whole[:size] for size in range(len(MAGIC) + 16, len(whole), 29)]
    cut += [whole[: len(MAGIC) + 16 + (PIECE + 16) * pieces] for pieces in range(5)]
    start, step = len(MAGIC) + 16, PIECE + 16
    swapped = (
        whole[:start] + whole[start + step : start + 2 * step] + whole[start : start + step] + whole[start + 2 * step :]
    )
    left_out = whole[: start + step] + whole[start + 2 * step :]
    for wrong in (*changed, *cut, swapped, left_out, whole + b"x", whole + whole[start:]):
        given: list[bytes] = []
        source = unseal(io.BytesIO(wrong), key)
        with pytest.raises(DataLoss, match="damaged or cut off, or was encrypted with another key"):
            given.extend(iter(lambda: source.read(64) or b"", b""))  # noqa: B023 - used at once
        assert data.startswith(b"".join(given))


def test_the_key_has_to_be_the_same_one_and_named(key: Path, tmp_path: Path) -> None:
    whole = sealed(key, b"data")
    other = tmp_path / "other"
    other.write_bytes(b"another key, as long")
    with pytest.raises(DataLoss, match="another key"):
        read(whole, other)
    with pytest.raises(UsageError, match="is encrypted: name the file"):
        read(whole, None)
    with pytest.raises(UsageError, match="is not encrypted"):
        read(b"a plain bundle", key)
    assert read(b"", None) == b""
    assert read(b"plain", None) == b"plain"
    other.write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes"):
        sealed(other, b"data")
    with pytest.raises(UsageError, match="cannot be read"):
        sealed(tmp_path / "missing", b"data")
