"""The verbs about callers from other machines: their tokens, and what they did."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api import operations
from snapshotd.api.access import AUDIT_MAX, AuditInfo, CreatedTokenInfo, CreateTokenRequest, TokenInfo
from snapshotd.api.operation import Scope
from snapshotd.client.local.arguments import check_count, words_of
from snapshotd.client.twofold import verb
from snapshotd.client.verbs.base import VerbPart


class AccessVerbs(VerbPart):
    """Part of `Snapshotd`. The daemon answers them for its own users, and for tokens with the scope admin."""

    @verb
    async def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[Scope] = ("read",),
        tenant: str | None = None,
        expires_s: float | None = None,
    ) -> CreatedTokenInfo:
        """A token for callers from other machines. Its text is in the answer, and nowhere else. `scopes`: "read", "run" and
        "approve" (which open what "read" does, too), "admin" (everything, of all tenants). `tenant`: whose things alone its
        caller sees; None: the default tenant's. `expires_s`: seconds until it opens nothing; None: it lasts until it is
        revoked. Conflict: the name is taken."""
        body = CreateTokenRequest(name, tuple(words_of("scopes", scopes)), tenant, expires_s)  # type: ignore[arg-type]
        return await self._transport.call(operations.CREATE_TOKEN, body=body)

    @verb
    async def tokens(self) -> list[TokenInfo]:
        """Oldest first, with those that have expired."""
        return await self._transport.call(operations.TOKENS)

    @verb
    async def revoke_token(self, token: str) -> None:
        """By its name or id: it opens nothing any more, and what is open with it is cut. NotFound."""
        await self._transport.call(operations.REVOKE_TOKEN, token)

    @verb
    async def audit(self, *, last: int = 100) -> list[AuditInfo]:
        """The newest records of who did what, oldest first: the requests of other machines, and the changes of the daemon's own
        users while it listens for those."""
        check_count("last", last, 1, AUDIT_MAX)
        return await self._transport.call(operations.AUDIT, query={"last": last})
