"""`SnapshotdThread`: a conversation together with its files."""

from __future__ import annotations

from agents.items import TResponseInputItem
from agents.memory import SessionABC, SessionSettings
from agents.memory.session_settings import resolve_session_limit
from agents.run_config import SandboxRunConfig

from snapshotd.client import AsyncSnapshotd
from snapshotd.integrations.openai_agents.client import SnapshotdSandboxClient
from snapshotd.integrations.openai_agents.state import SnapshotdOptions
from snapshotd.integrations.openai_agents.stored import StoredThread


class SnapshotdThread(SessionABC):
    """A `Session` of the SDK in the daemon's catalog, whose items are bound to the files that belong to them.

        thread = SnapshotdThread("ann")
        Runner.run(agent, "...", session=thread, run_config=RunConfig(sandbox=thread.sandbox))

    A later run, in another process too, goes on with both. `pop_item` takes the files back as well: the next run has those
    that belonged to the newest item that is left. Errors of every method: the client's.
    """

    def __init__(
        self,
        session_id: str,
        *,
        client: AsyncSnapshotd | None = None,
        options: SnapshotdOptions | None = None,
        session_settings: SessionSettings | None = None,
    ) -> None:
        """`options`: of its first sandbox."""
        self.session_id, self.session_settings = session_id, session_settings or SessionSettings()
        given = client or AsyncSnapshotd()
        self._boxes, self._stored = SnapshotdSandboxClient(given), StoredThread(given, session_id)
        self.sandbox = SandboxRunConfig(
            client=self._boxes, options=(options or SnapshotdOptions()).model_copy(update={"thread": session_id})
        )

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        items = await self._stored.items()
        most = resolve_session_limit(limit, self.session_settings)
        return items if most is None else items[len(items) - most :] if 0 < most < len(items) else items[:most]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        if items:
            await self._stored.add(items, self._boxes.place_of(self.session_id))

    async def pop_item(self) -> TResponseInputItem | None:
        self._boxes.forget(self.session_id)
        popped: TResponseInputItem | None = await self._stored.pop()
        return popped

    async def clear_session(self) -> None:
        """Forget all items and the place of the files: the next run begins with a new sandbox."""
        self._boxes.forget(self.session_id)
        await self._stored.clear()

    async def snapshot(self) -> str | None:
        """The id of the snapshot that belongs to the newest items; None: there is none yet."""
        place = await self._stored.place()
        return None if place is None else place.snapshot
