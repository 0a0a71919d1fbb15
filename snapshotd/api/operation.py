"""A row of the API's operations. Each stands beside its records, in the module of its subject; `operations.py` gathers them."""

from __future__ import annotations

import re
from typing import Final, Generic, Literal, TypeVar
from urllib.parse import quote

from snapshotd.api.record import Request
from snapshotd.api.wire import check_ref

A = TypeVar("A")
Scope = Literal["read", "run", "approve", "admin"]
READ: Final = "read"
"""Looking. The others: what changes trajectories and values; deciding for a person; the daemon, its storage and images, and
all that names a path of its machine."""
RUN: Final = "run"
APPROVE: Final = "approve"
ADMIN: Final = "admin"
_PLACE = re.compile(r"\{(\w+)(:path)?\}")


class Operation(Generic[A]):
    """One operation. `body`: the record that it takes, or the media type of what is streamed to the daemon. `query`: the record
    whose members stand in the request's query. `answer`: the type of its JSON, or the media type of what comes piece by
    piece. `once`: it makes something, and has a key, under which that is made once. `scope`: what its caller may do.
    `subject`: its group in docs/openapi.json. `by`: the engine's service whose method of the same name (or SERVICE.METHOD)
    answers it with what the request says, where nothing else is to do. `own`: its list has the things of the caller's
    tenant alone."""

    __slots__ = ("answer", "body", "by", "method", "name", "once", "own", "path", "query", "scope", "status", "subject")

    def __init__(
        self,
        method: str,
        path: str,
        answer: type[A] | str | None,
        scope: Scope,
        subject: str,
        *,
        body: type[Request] | str | None = None,
        query: type[Request] | None = None,
        once: bool = False,
        status: int = 200,
        by: str | None = None,
        own: bool = False,
    ) -> None:
        self.name = ""
        self.method, self.path, self.answer, self.scope, self.subject = method, path, answer, scope, subject
        self.body, self.query, self.once, self.by, self.own = body, query, once, by, own
        self.status = 204 if answer is None else status

    @property
    def is_upload(self) -> bool:
        """Its body has any size, and is read as it comes."""
        return isinstance(self.body, str)

    def at(self, *names: str) -> tuple[str, str]:
        """Its method, and `to`."""
        return self.method, self.to(*names)

    def to(self, *names: str) -> str:
        """Its path with these names in their places. NotFound for a text that cannot be such a name."""
        parts = iter(names)
        return _PLACE.sub(lambda place: quote(self._check_name(place, next(parts)), safe=""), self.path)

    def _check_name(self, place: re.Match[str], name: str) -> str:
        if place[2] or place[1] == "name":
            return name  # any text: the daemon says what is wrong with it
        if place[1] == "ref":
            return check_ref(name, "trajectory" if self.path.startswith("/trajectories/") else "snapshot or trajectory")
        return check_ref(name, place[1])
