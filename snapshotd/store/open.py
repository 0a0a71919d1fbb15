"""From an address to a store."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack
from urllib.parse import parse_qsl, unquote, urlsplit

from snapshotd.errors import UsageError
from snapshotd.store.base import Store
from snapshotd.store.keys import is_key
from snapshotd.store.local import LocalStore
from snapshotd.store.memory import MemoryStore
from snapshotd.store.s3 import S3Store

_FORMS = "file:///path, s3://bucket/prefix?endpoint=http://host:port&region=name, or memory:"


class Patience(TypedDict, total=False):
    """Parameters of `S3Store`."""

    attempts: int
    timeout_s: float


def open_store(url: str, **patience: Unpack[Patience]) -> Store:
    """The store at `url`: `file:///path`, `s3://bucket/prefix[?endpoint=...][&region=...]` or `memory:` (a new one each
    time). `patience`: with a service that does not answer; by default as `S3Store`.

    Errors: UsageError (no such form; nothing was touched), and the errors of the store's constructor.
    """
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as exc:
        raise _wrong(url, str(exc)) from exc
    if url == "memory:":
        return MemoryStore()
    if parts.scheme == "file":
        path = unquote(parts.path)
        if parts.netloc or parts.query or parts.fragment or not path.startswith("/") or "\0" in path:
            raise _wrong(url, "a file address has just an absolute path")
        return LocalStore(Path(path))
    if parts.scheme == "s3":
        return _open_s3(url, parts.netloc, parts.path, options, parts.fragment, patience)
    raise _wrong(url, f"there is no store of the kind {parts.scheme!r}")


def _open_s3(
    url: str, bucket: str, path: str, options: list[tuple[str, str]], fragment: str, patience: Patience
) -> Store:
    named = dict(options)
    if len(named) != len(options) or not named.keys() <= {"endpoint", "region"} or not all(named.values()):
        raise _wrong(url, "its options are endpoint and region, each at most once and with a value")
    endpoint = named.get("endpoint")
    if endpoint is not None and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc):
        raise _wrong(url, "the endpoint is an http:// or https:// address")
    if not is_key(bucket) or "/" in bucket:
        raise _wrong(url, "it names no bucket (lower case, digits, . and -)")
    prefix = unquote(path).strip("/")
    if fragment or (prefix and not is_key(prefix.lower())):
        raise _wrong(url, "a prefix has letters, digits and . _ - in parts joined by /")
    return S3Store(bucket, prefix, endpoint=endpoint, region=named.get("region"), **patience)


def _wrong(url: str, why: str) -> UsageError:
    return UsageError(f"{url[:300]!r} is not the address of a store: {why}; use {_FORMS}")
