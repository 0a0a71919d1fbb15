"""Sandboxes, snapshots and templates, as the server knows them: values of the daemon's store.

They have a tenant of their own there, so no agent reads or writes them: those see the tenant of their sandbox alone.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotFound
from snapshotd.terms import DEFAULT_TENANT

TENANT = "e2b"
_PAGE = 1000


@dataclass(slots=True)
class BoxRecord:
    """One value. Its `id` is the key."""

    namespace: ClassVar[str]

    id: str
    owner: str
    """The tenant of the API key that made it; it is shown to no other."""

    @classmethod
    def of(cls, value: dict[str, Any]) -> Self:
        """The record in a value of the store, without the fields that a newer server has added."""
        known = {one.name for one in dataclasses.fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known})


@dataclass(slots=True)
class Box(BoxRecord):
    """A sandbox. `id` is its trajectory. Times are seconds since the epoch."""

    namespace: ClassVar[str] = "sandboxes"

    template: str
    started_at: float
    ends_at: float
    alias: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "user"
    workdir: str | None = None
    start: str | None = None
    ready: str | None = None
    paused: bool = False
    pauses_at_end: bool = False
    """Else it is killed when its time is over."""
    resumes: bool = False
    """A request for it, while it is paused, resumes it."""
    is_public: bool = True
    """Its ports need no token."""
    network: dict[str, Any] = field(default_factory=dict)
    """As the client asked for it."""


@dataclass(slots=True)
class KeptSnapshot(BoxRecord):
    """A snapshot that a client has made. `id` is ours, too. `box`: the sandbox, as it was then."""

    namespace: ClassVar[str] = "snapshots"

    tag: str
    taken_at: float
    names: list[str]
    box: dict[str, Any]


@dataclass(slots=True)
class Build:
    """A state of a template: a snapshot, and how the commands of its sandboxes run."""

    id: str
    snapshot: str
    trajectory: str
    built_at: float
    image: str = ""
    """Id of the image that it stands for, where nobody has built it."""
    env: dict[str, str] = field(default_factory=dict)
    user: str = "user"
    workdir: str | None = None
    start: str | None = None
    ready: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None


@dataclass(slots=True)
class BoxTemplate(BoxRecord):
    """A template that sandboxes are made of, by its name. `builds`: by their tags."""

    namespace: ClassVar[str] = "templates"

    name: str
    made_at: float
    builds: dict[str, dict[str, Any]] = field(default_factory=dict)
    tenant: str = DEFAULT_TENANT
    """The tenant that its sandboxes belong to, also where an image is the template."""


def variant_of(build: Build) -> dict[str, Any]:
    """The limits of a build's sandboxes, as keywords of a fork."""
    cpus = {} if build.cpus is None else {"cpus": build.cpus}
    return cpus if build.memory_mb is None else {**cpus, "memory": build.memory_mb << 20}


def build_of(template: BoxTemplate, tag: str) -> Build | None:
    """The build with this tag, or with this id."""
    found = template.builds.get(tag) or next((one for one in template.builds.values() if one["id"] == tag), None)
    return None if found is None else Build(**found)


RecordT = TypeVar("RecordT", bound=BoxRecord)


class Records:
    """The values, read anew for each request. Errors: those of the daemon's store."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client

    async def put(self, record: BoxRecord) -> None:
        await self._client.put_value(record.namespace, record.id, dataclasses.asdict(record), tenant=TENANT)

    async def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        try:
            return kind.of((await self._client.get_value(kind.namespace, key, tenant=TENANT)).value)
        except NotFound:
            return None

    async def drop(self, record: BoxRecord) -> None:
        """Not an error when it is gone."""
        try:
            await self._client.delete_value(record.namespace, record.id, tenant=TENANT)
        except NotFound:
            pass

    async def all_of(self, kind: type[RecordT], **where: Any) -> AsyncIterator[RecordT]:
        """The records whose fields equal these, in the order of their keys."""
        after, page = "", _PAGE
        while page == _PAGE:
            values = await self._client.search_values(
                kind.namespace, tenant=TENANT, where=where, limit=_PAGE, after=after
            )
            for value in values:
                yield kind.of(value.value)
            page, after = len(values), values[-1].key if values else after

    async def secret(self) -> bytes:
        """The secret that tokens are made of: the same for each server of this daemon."""
        try:
            made = secrets.token_hex(32)
            await self._client.put_value("server", "secret", made, tenant=TENANT, expected_version=0)
            return bytes.fromhex(made)
        except Conflict:
            found = await self._client.get_value("server", "secret", tenant=TENANT)
            return bytes.fromhex(found.value)
