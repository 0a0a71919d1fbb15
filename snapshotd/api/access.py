"""Tokens of callers from other machines, and the record of what they did."""

from __future__ import annotations

from typing import Annotated

from snapshotd.api.operation import ADMIN, Operation, Scope
from snapshotd.api.record import ApiRecord, Bounds, Request, Secret, field, record

EXPIRY_MAX_S = 10 * 366 * 86400.0
AUDIT_MAX = 100_000


@record(frozen=True)
class CreateTokenRequest(Request):
    name: str
    """Its name, by which it is listed, revoked and recorded."""
    scopes: Annotated[tuple[Scope, ...], Bounds(min_length=1, max_length=4)] = ("read",)
    """`run` and `approve` open what `read` does, too; `admin` opens everything."""
    tenant: Annotated[str, Bounds(max_length=64)] | None = None
    """The tenant whose things its caller sees; null: the default one, or with the scope admin all."""
    expires_s: Annotated[float, Bounds(gt=0, le=EXPIRY_MAX_S, allow_inf_nan=False)] | None = None
    """Seconds until it opens nothing any more; null: it lasts until it is revoked."""


@record(frozen=True)
class TokenInfo(ApiRecord):
    token_id: str
    name: str
    scopes: tuple[str, ...]
    """Rights of a token: `read`, `run`, `approve`, `admin`."""
    tenant: str | None
    """Null: all of them."""
    created_at: str
    expires_at: str | None
    has_expired: bool
    """True: the token opens nothing any more."""


@record(frozen=True)
class CreatedTokenInfo(ApiRecord):
    """A new token. Its text is kept nowhere, and shown this once."""

    info: TokenInfo
    """The token, without its secret."""
    token: Secret = field(repr=False)
    """The token, shown this once."""


@record(frozen=True)
class AuditInfo(ApiRecord):
    """A request that was answered, or refused."""

    happened_at: str
    """Time of the answer."""
    caller: str | None
    """Name of the token, or of the user of the daemon's socket; null: it showed no token that is one."""
    token_id: str | None
    tenant: str | None
    address: str | None
    """Address of the other machine; null: it came by the daemon's socket."""
    verb: str | None
    """Name of the operation; null: there is none like it."""
    operation: str
    """Method and path of the request."""
    status: str
    """HTTP status of the answer."""


TOKENS = Operation("GET", "/tokens", list[TokenInfo], ADMIN, "access")
CREATE_TOKEN = Operation("POST", "/tokens", CreatedTokenInfo, ADMIN, "access", body=CreateTokenRequest, status=201)
REVOKE_TOKEN = Operation[None]("DELETE", "/tokens/{token}", None, ADMIN, "access")
AUDIT = Operation("GET", "/audit", list[AuditInfo], ADMIN, "access")
