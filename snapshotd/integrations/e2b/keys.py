"""API keys of clients, and tokens of sandboxes.

A client of the control API has a key, from a file that only its user reads. Within a sandbox it has the sandbox's own token,
which follows from the server's secret and the sandbox's id; so has a URL of a file that was signed with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.records import Box

OWNER = "default"
_TIME = re.compile(r"[0-9]{1,18}")
"""Seconds since 1970. A longer number would not be read (`sys.get_int_max_str_digits`)."""


def new_key() -> str:
    """A key of the form that older SDKs ask for: `e2b_` and forty hexadecimal digits."""
    return f"e2b_{secrets.token_hex(20)}"


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """`key`: the one that clients need. `secret`: what tokens are made of."""

    key: str
    secret: bytes

    def owner(self, headers: Headers) -> str:
        """The owner of a request. WireError: it has no key, or another one."""
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise WireError(
                "unauthenticated", "the API key is missing or wrong; set E2B_API_KEY to the key of this server"
            )
        return OWNER

    def token(self, sandbox: str, purpose: str = "envd") -> str:
        """The token of a sandbox for requests in it (`envd`), or for its ports (`traffic`)."""
        return hmac.new(self.secret, f"{purpose}:{sandbox}".encode(), hashlib.sha256).hexdigest()

    def check(self, given: str | None, sandbox: str, purpose: str = "envd") -> None:
        """WireError: that is not the token."""
        if given is None or not hmac.compare_digest(given.encode(), self.token(sandbox, purpose).encode()):
            raise WireError("unauthenticated", "the access token of the sandbox is missing or wrong")

    def signed_for(
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
