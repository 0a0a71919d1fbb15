"""The facts of each session: when it was written, its summary, and its subpaths. One value for each session."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from snapshotd.client import AsyncSnapshotd
from snapshotd.client.exchange import AnswerLost
from snapshotd.errors import Conflict, NotFound
from snapshotd.integrations.logs import repeat_if_lost

_PAGE = 1000
_ATTEMPTS = 100
Fact = dict[str, Any]
"""`logs`: for each subpath ("" is the main transcript) the number of its log, which grows with each deletion. `there`: the
subpaths that have been written. `mtime`: epoch milliseconds. `summary`: the SDK's."""


class SessionIndex:
    """Thread-safe by compare-and-swap; any number of processes."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client

    async def get(self, project: str, session: str) -> Fact:
        return (await self._read(project, session))[0]

    async def change(self, project: str, session: str, edit: Callable[[Fact], None]) -> None:
        """Apply an edit that may be made twice. Conflict: others have been faster a hundred times."""
        for attempt in range(_ATTEMPTS):
            fact, version = await self._read(project, session)
            edit(fact)
            fact["mtime"] = max(time.time_ns() // 1_000_000, fact["mtime"] + 1)
            try:
                await self._client.put_value(_namespace(project), session, fact, expected_version=version)
                return
            except (Conflict, AnswerLost):  # an edit that is there already changes nothing
                if attempt == _ATTEMPTS - 1:
                    raise

    async def all(self, project: str) -> dict[str, Fact]:
        """Every session of a project whose main transcript was written."""
        found: dict[str, Fact] = {}
        after = ""
        while True:
            page = await self._client.search_values(_namespace(project), limit=_PAGE, after=after)
            found |= {one.key: one.value for one in page if "" in one.value["there"]}
            if len(page) < _PAGE:
                return found
            after = page[-1].key

    async def _read(self, project: str, session: str) -> tuple[Fact, int]:
        try:
            found = await repeat_if_lost(lambda: self._client.get_value(_namespace(project), session))
            return found.value, found.version
        except NotFound:
            return {"logs": {}, "there": [], "mtime": 0, "summary": None}, 0


def _namespace(project: str) -> str:
    return f"claude-sessions/{quote(project, safe='')}"
