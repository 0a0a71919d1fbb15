"""The gate for callers from other machines: who shows a token, and what is open with each.

In the event loop alone, but for `revoke`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from snapshotd.daemon.access.limits import ADDRESS_MAX, TOKEN_BURST, TOKEN_PER_S, Shares
from snapshotd.daemon.access.principals import Principal
from snapshotd.daemon.access.tokens import Token, Tokens
from snapshotd.errors import LimitExceeded, NotPermitted

_SCHEME = b"bearer "


class Access:
    """See the module's text."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._shares = Shares(ADDRESS_MAX, TOKEN_PER_S, TOKEN_BURST)
        self._open: dict[str, set[Callable[[], object]]] = {}
        """By token: what cuts its connections."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, authorization: bytes, cut: Callable[[], object]) -> tuple[Principal, Callable[[], None]]:
        """Admit a request with this header. Returns its caller, and the function to call at its end. `cut` is called when the
        token is revoked or expires before that. NotPermitted: the header has no token that opens anything; LimitExceeded: there
        are too many requests with this token."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise NotPermitted(
                "the request shows no token; put it into SNAPSHOTD_TOKEN, or into the header `Authorization: Bearer TOKEN`"
            )
        principal, expires_at_ns = self.tokens.check(authorization[len(_SCHEME) :].strip().decode("latin-1"))
        if not self._shares.enter(principal.token):
            raise LimitExceeded(
                f"the token {principal.name} has {ADDRESS_MAX} requests open, or more than {TOKEN_PER_S:.0f} came within a second; "
                "wait, and ask again"
            )
        self._loop = asyncio.get_running_loop()
        opened = self._open.setdefault(principal.token, set())
        opened.add(cut)
        left_s = None if expires_at_ns is None else (expires_at_ns - time.time_ns()) / 1e9
        timer = None if left_s is None else self._loop.call_later(max(0.0, left_s), cut)

        def leave() -> None:
            if timer is not None:
                timer.cancel()
            self._shares.leave(principal.token)
            opened.discard(cut)
            if not opened:
                self._open.pop(principal.token, None)

        return principal, leave

    def revoke(self, ref: str) -> Token:
        """Forget a token, and cut what is open with it. From any thread. NotFound."""
        token = self.tokens.revoke(ref)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_connections, token.id)
        return token

    def _cut_connections(self, token_id: str) -> None:
        for cut in tuple(self._open.get(token_id, ())):
            cut()
