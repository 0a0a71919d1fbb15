"""An append-only log in the daemon's catalog, for the conversations of frameworks."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from snapshotd.api.values import ValueInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict

_PAGE = 1000
_ATTEMPTS = 100


class StoredLog:
    """JSON values under numbers from 1 on, in a namespace of the key-value store. An appended value is durable, and
    there whole or not at all; any number of processes may append. Errors of every method: the client's; LimitExceeded for a value that
    is too large."""

    def __init__(self, client: AsyncSnapshotd, *names: str) -> None:
        """`names`: parts of the namespace; each may be any text."""
        self._client, self._namespace = client, "/".join(quote(name, safe="") for name in names)
        self._last = 0

    async def append(self, value: Any) -> None:
        """Behind all that is there. Conflict: others have been faster a hundred times."""
        for attempt in range(_ATTEMPTS):
            try:
                await self._client.put_value(self._namespace, _key(self._last + 1), value, expected_version=0)
            except Conflict:
                if attempt == _ATTEMPTS - 1:
                    raise
                found = await self.read(after=self._last)
                self._last = int(found[-1].key) if found else self._last + 1
            else:
                self._last += 1
                return

    async def read(self, *, after: int = 0) -> list[ValueInfo]:
        """All that is there behind a number, in order. `replace` takes them."""
        found: list[ValueInfo] = []
        page = await self._page(_key(after))
        while page:
            found += (one for one in page if one.namespace == self._namespace)
            page = await self._page(page[-1].key) if len(page) >= _PAGE else []
        return found

    async def replace(self, old: ValueInfo, value: Any) -> None:
        """Put another value in the place of one. Conflict: it was replaced meanwhile."""
        await self._client.put_value(self._namespace, old.key, value, expected_version=old.version)

    async def _page(self, after: str) -> list[ValueInfo]:
        return await self._client.search_values(self._namespace, limit=_PAGE, after=after)


def _key(number: int) -> str:
    return f"{number:010d}"
