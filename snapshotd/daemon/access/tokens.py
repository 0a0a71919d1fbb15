"""The tokens of a state directory: texts by which clients on other machines are known.

The file has no token, only the SHA-256 of each: its 256 random bits need no slower digest. It is written whole, by the
daemon alone; other processes may read it, and see a change at their next check.

    sdt_ID_SECRET       ID: 8 hexadecimal characters, by which people name the token; SECRET: 43 characters
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from snapshotd.api.operation import ADMIN, Scope
from snapshotd.daemon.access.principals import GRANTS, Principal
from snapshotd.errors import Conflict, DataLoss, LimitExceeded, NotFound, NotPermitted, UsageError, check_format
from snapshotd.kernel.files import create_file
from snapshotd.terms import DEFAULT_TENANT, NAME_PATTERN, RESERVED_TENANTS

PREFIX = "sdt_"
TOKENS_MAX = 1000
_FORMAT = 1
_UNKNOWN = hashlib.sha256(b"").hexdigest()
_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Token:
    """The record of a token. `tenant`: None for one with the scope admin. `expires_at_ns`: None: never."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    tenant: str | None
    created_at_ns: int
    expires_at_ns: int | None
    digest: str

    def has_expired(self) -> bool:
        return self.expires_at_ns is not None and time.time_ns() >= self.expires_at_ns

    def principal(self) -> Principal:
        """The caller that shows it."""
        opened = frozenset[Scope]().union(*(GRANTS[scope] for scope in self.scopes))
        return Principal(self.name, opened, self.tenant, self.id)


class Tokens:
    """The tokens of one file, which need not exist. Thread-safe; one process alone makes and revokes. DataLoss: the file
    is damaged; VersionMismatch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tokens: dict[str, Token] = {}
        """By id, in the order in which they were made."""
        self._version: _Version | None = None

    def check(self, text: str) -> tuple[Principal, int | None]:
        """Return the caller that shows a token, and the time (ns since the epoch) at which the token expires. NotPermitted: the text
        is no token, or the token was revoked or has expired; the error tells nothing of the text. A refusal takes the same time
        for every text."""
        found = self._present().get(text.removeprefix(PREFIX).partition("_")[0])
        digest = _digest(text)
        is_same = hmac.compare_digest(digest, _UNKNOWN if found is None else found.digest)
        if found is None or not is_same or found.has_expired():
            raise NotPermitted(
                "the token is not known here, was revoked, or has expired; ask the owner of the daemon for another one "
                "(`snapshotd token create`)"
            )
        return found.principal(), found.expires_at_ns

    def create(
        self, name: str, scopes: Collection[Scope], *, tenant: str | None = None, expires_at_ns: int | None = None
    ) -> tuple[Token, str]:
        """Make a token. Returns it and its text, which is not kept. `tenant`: None: the default tenant, or for the scope admin no
        tenant. UsageError; Conflict: the name is taken; LimitExceeded."""
        if not NAME_PATTERN.fullmatch(name):
            raise UsageError(f"{name[:80]!r} cannot be the name of a token: use up to 64 letters, digits and ._-")
        kept = tuple(scope for scope in get_args(Scope) if scope in scopes)
        if not kept or len(kept) < len(set(scopes)):
            raise UsageError(f"the scopes of a token are some of {', '.join(get_args(Scope))}")
        if ADMIN in kept and tenant is not None:
            raise UsageError("a token with the scope admin sees all tenants: leave the tenant out, or the scope")
        if tenant is not None and not NAME_PATTERN.fullmatch(tenant):
            raise UsageError(f"{tenant[:80]!r} cannot be a tenant: use up to 64 letters, digits and ._-")
        if tenant in RESERVED_TENANTS:
            raise UsageError(f"the tenant {tenant} is reserved for a program beside the daemon; choose another one")
        if expires_at_ns is not None and expires_at_ns <= time.time_ns():
            raise UsageError("the token would have expired already; name a later time")
        owner = None if ADMIN in kept else tenant or DEFAULT_TENANT
        with self._lock:
            known = self._read()
            if any(one.name == name for one in known.values()):
                raise Conflict(f"there is a token {name} already; choose another name, or revoke that one first")
            if len(known) >= TOKENS_MAX:
                raise LimitExceeded(f"there are {TOKENS_MAX} tokens, which is the most; revoke some first")
            identity = secrets.token_hex(4)
            while identity in known:
                identity = secrets.token_hex(4)
            text = f"{PREFIX}{identity}_{secrets.token_urlsafe(32)}"
            made = Token(identity, name, kept, owner, time.time_ns(), expires_at_ns, _digest(text))
            self._write([*known.values(), made])
        return made, text

    def list(self) -> list[Token]:
        """Oldest first, with those that have expired."""
        return [*self._present().values()]

    def revoke(self, ref: str) -> Token:
        """Forget a token, by its name or id. NotFound."""
        with self._lock:
            known = self._read()
            found = next((one for one in known.values() if ref in (one.id, one.name)), None)
            if found is None:
                raise NotFound(f"there is no token {ref[:80]!r}; `snapshotd token list` lists them")
            self._write([one for one in known.values() if one is not found])
        return found

    def _present(self) -> dict[str, Token]:
        with self._lock:
            return self._read()

    def _read(self) -> dict[str, Token]:
        """The tokens in the file as it is now."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._tokens, self._version = {}, None
            return self._tokens
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._version:
            self._tokens = {one.id: one for one in _decode(self._path)}
            self._version = version
        return self._tokens

    def _write(self, tokens: Iterable[Token]) -> None:
        text = json.dumps({"format": _FORMAT, "tokens": [asdict(one) for one in tokens]})
        create_file(self._path, text.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _decode(path: Path) -> list[Token]:
    try:
        data = json.loads(path.read_bytes())
        check_format(f"the file {path}", data["format"], _FORMAT)
        return [_token(item) for item in data["tokens"]]
    except (ValueError, KeyError, TypeError):
        raise DataLoss(
            f"the file {path} of tokens is damaged: restore it from a backup, or remove it and make new tokens"
        ) from None


def _token(item: dict[str, Any]) -> Token:
    scopes = tuple(cast(Scope, scope) for scope in item["scopes"] if scope in GRANTS)
    return Token(**{**item, "scopes": scopes})
