"""API keys of clients, and tokens of sandboxes.

A client of the control API has a key, from a file that only the server's user reads: one a line, and behind it the tenant that its
sandboxes belong to. Within a sandbox it has the sandbox's own token,
which follows from the server's secret and the sandbox's id; so has a URL of a file that was signed with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers

from snapshotd.errors import UsageError
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.records import Box
from snapshotd.integrations.token_file import tokens_of
from snapshotd.terms import DEFAULT_TENANT

_TIME = re.compile(r"[0-9]{1,18}")
"""Seconds since 1970. A longer number would not be read (`sys.get_int_max_str_digits`)."""


def new_key() -> str:
    """A key of the form that older SDKs ask for: `e2b_` and forty hexadecimal digits."""
    return f"e2b_{secrets.token_hex(20)}"


def owners_of(path: Path) -> dict[str, str]:
    """The keys of a file, each with its tenant; a key is made if there is no file. Errors: those of `tokens_of`."""
    found = dict[str, str]()
    for key, *rest in tokens_of(path, new_key):
        if len(rest) > 1 or key in found:
            raise UsageError(f"{path} has to hold each key once, with one tenant at most behind it")
        found[key] = rest[0] if rest else DEFAULT_TENANT
    return found


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """`owners`: the tenants of clients, by their keys. `secret`: what tokens are made of."""

    owners: Mapping[str, str]
    secret: bytes

    def owner(self, headers: Headers) -> str:
        """The tenant of a request's key. WireError: it has no key, or an unknown one."""
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        found = [owner for key, owner in self.owners.items() if hmac.compare_digest(given.encode(), key.encode())]
        if not found:
            raise WireError(
                "unauthenticated", "the API key is missing or wrong; set E2B_API_KEY to a key of this server"
            )
        return found[0]

    def token(self, sandbox: str, purpose: str = "envd") -> str:
        """The token of a sandbox for requests in it (`envd`), or for its ports (`traffic`)."""
        return hmac.new(self.secret, f"{purpose}:{sandbox}".encode(), hashlib.sha256).hexdigest()

    def check(self, given: str | None, sandbox: str, purpose: str = "envd") -> None:
        """WireError: the given text is not the token of the sandbox."""
        if given is None or not hmac.compare_digest(given.encode(), self.token(sandbox, purpose).encode()):
            raise WireError("unauthenticated", "the access token of the sandbox is missing or wrong")

    def find_signer(
        self, boxes: Iterable[Box], path: str, operation: str, user: str, signature: str, expiration: str | None
    ) -> Box:
        """The sandbox with whose token a URL of a file was signed; `operation` is read or write. WireError: there is none,
        or its time is over."""
        if expiration is not None and not (_TIME.fullmatch(expiration) and time.time() < int(expiration)):
            raise WireError("unauthenticated", "the signature is too old; sign the URL anew")
        rest = "" if expiration is None else f":{expiration}"
        for box in boxes:
            digest = hashlib.sha256(f"{path}:{operation}:{user}:{self.token(box.id)}{rest}".encode()).digest()
            if hmac.compare_digest(f"v1_{base64.b64encode(digest).rstrip(b'=').decode()}".encode(), signature.encode()):
                return box
        raise WireError("unauthenticated", "the signature is wrong")
