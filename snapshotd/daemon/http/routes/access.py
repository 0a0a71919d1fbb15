"""Callers from other machines: their tokens, and what they did."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Query
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.access import AUDIT_MAX, CreatedTokenInfo, CreateTokenRequest, TokenInfo
from snapshotd.api.forms import iso_time
from snapshotd.api.wire import check_ref
from snapshotd.daemon.access.audit import read_audit
from snapshotd.daemon.access.tokens import Token
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.routes.shared import ServiceDep, handles


@handles(operations.TOKENS)
def tokens(service: ServiceDep) -> list[TokenInfo]:
    """Oldest first, with those that have expired."""
    return list(map(_info, service.access.tokens.list()))


@handles(operations.CREATE_TOKEN)
def create_token(body: CreateTokenRequest, service: ServiceDep) -> CreatedTokenInfo:
    """A token for callers from other machines. `Conflict`: the name is taken."""
    expires = None if body.expires_s is None else time.time_ns() + int(body.expires_s * 1e9)
    made, text = service.access.tokens.create(body.name, body.scopes, tenant=body.tenant, expires_at_ns=expires)
    return CreatedTokenInfo(_info(made), text)


@handles(operations.REVOKE_TOKEN)
def revoke_token(token: Annotated[str, PathParameter(description="Its name or id.")], service: ServiceDep) -> None:
    """It opens nothing any more, and what is open with it is cut."""
    service.access.revoke(check_ref(token, "token"))


@handles(operations.AUDIT)
def audit(service: ServiceDep, last: Annotated[int, Query(ge=1, le=AUDIT_MAX)] = 100) -> Response:
    """The newest records of who did what, oldest first. They are kept while the daemon listens for other machines."""
    return streams.answer_list(read_audit(service.state_dir, last))


def _info(token: Token) -> TokenInfo:
    expires = None if token.expires_at_ns is None else iso_time(token.expires_at_ns)
    return TokenInfo(
        token.id, token.name, token.scopes, token.tenant, iso_time(token.created_at_ns), expires, token.has_expired()
    )
