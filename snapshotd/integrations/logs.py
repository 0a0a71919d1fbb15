"""An append-only log in the daemon's catalog, for the conversations of frameworks."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from snapshotd.api.values import ValueInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.exchange import AnswerLost
from snapshotd.errors import Conflict

_PAGE = 1000
_ATTEMPTS = 100
_LOSSES = 3
R = TypeVar("R")


class LogEntry(NamedTuple):
    """One value of a log. `version`: it is changed by each `replace`."""

    number: int
    version: int
    value: Any


class StoredLog:
    """JSON values under numbers from 1 on, in a namespace of the key-value store. An appended value is durable, and there
    once or not at all, even where the daemon dies within the write; any number of processes may append. Errors of every
    method: the client's; LimitExceeded for a value of more than 1 MiB as JSON."""

    def __init__(self, client: AsyncSnapshotd, *names: str) -> None:
        """`names`: parts of the namespace; each may be any text."""
        self._client, self._namespace = client, "/".join(quote(name, safe="") for name in names)
        self._last = 0

    async def append(self, value: Any) -> None:
        """Append a value. Conflict: other processes were faster a hundred times."""
        token = uuid.uuid4().hex
        for _ in range(_ATTEMPTS):
            number = self._last + 1
            try:
                await repeat_if_lost(lambda: self._put(_key(number), token, value, 0))  # noqa: B023 - called at once
            except Conflict:
                found = await self._read(self._last)
                self._last = max((int(one.key) for one in found), default=number)
                if any(one.value["token"] == token for one in found):
                    return  # its answer was lost
            else:
                self._last = max(self._last, number)
                return
        raise Conflict("others have been writing all the time; try again later")

    async def read(self) -> list[LogEntry]:
        """All that is there, in order."""
        return [LogEntry(int(one.key), one.version, one.value["value"]) for one in await self._read(0)]

    async def replace(self, old: LogEntry, value: Any) -> None:
        """Put another value in the place of one. Conflict: it was replaced meanwhile."""
        await self._put(_key(old.number), uuid.uuid4().hex, value, old.version)

    async def remove(self) -> None:
        """Delete all values, one after the other."""
        for one in await self._read(0):
            await self._client.delete_value(self._namespace, one.key)

    async def _put(self, key: str, token: str, value: Any, version: int) -> None:
        kept = {"token": token, "value": value}
        await self._client.put_value(self._namespace, key, kept, expected_version=version)

    async def _read(self, after: int) -> list[ValueInfo]:
        found: list[ValueInfo] = []
        last = _key(after)
        while True:
            page = await repeat_if_lost(lambda: self._client.search_values(self._namespace, limit=_PAGE, after=last))  # noqa: B023
            found += (one for one in page if one.namespace == self._namespace)
            if len(page) < _PAGE:
                return found
            last = page[-1].key


async def repeat_if_lost(work: Callable[[], Awaitable[R]]) -> R:
    """Do work again, up to three times in all, as long as the daemon dies before it answers. Returns its result."""
    for _ in range(_LOSSES - 1):
        try:
            return await work()
        except AnswerLost:
            continue
    return await work()


def _key(number: int) -> str:
    return f"{number:010d}"
