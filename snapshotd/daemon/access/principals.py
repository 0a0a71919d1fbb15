"""A caller of the daemon: its name, what it may do, and whose things it sees."""

from __future__ import annotations

import functools
import pwd
from dataclasses import dataclass
from typing import Final

from snapshotd.api.operation import ADMIN, APPROVE, READ, RUN, Scope
from snapshotd.errors import NotPermitted

PRINCIPAL = "principal"
"""Field of a request's state (`request.state`) with its caller."""
GRANTS: Final[dict[Scope, frozenset[Scope]]] = {
    READ: frozenset({READ}),
    RUN: frozenset({READ, RUN}),
    APPROVE: frozenset({READ, APPROVE}),
    ADMIN: frozenset({READ, RUN, APPROVE, ADMIN}),
}
"""Scope of a token to the scopes of verbs that it opens: to run and to decide takes looking."""


@dataclass(frozen=True, slots=True)
class Principal:
    """`scopes`: of the verbs that it may call. `tenant`: the one whose things alone it sees; None, for the users of the
    daemon's socket and for tokens with the scope admin: it sees all. `token`: the id of its token; empty: it came by the
    socket."""

    name: str
    scopes: frozenset[Scope]
    tenant: str | None
    token: str = ""

    def check_scope(self, scope: Scope) -> None:
        """NotPermitted: it may not call a verb of this scope."""
        if scope not in self.scopes:
            raise NotPermitted(
                f"the token {self.name} does not have the scope {scope}, which this request needs; ask for a token that has it"
            )


@functools.cache
def local_principal(uid: int) -> Principal:
    """A user of the daemon's own socket. Its name is a number if it has no other here."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Principal(name, GRANTS[ADMIN], None)
