"""The agent's mind as it was at a snapshot: conversation, journal, state and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

from snapshotd.api.history import TaskInfo
from snapshotd.api.record import Bounds
from snapshotd.api.wire import LIST_MAX
from snapshotd.engine.context import Context
from snapshotd.engine.journal import tasks
from snapshotd.engine.journal.answers import with_result
from snapshotd.types import JournalEntry, Message


class JournalService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(self, context: Context) -> None:
        self._context, self._catalog = context, context.catalog

    def conversation(
        self,
        ref: str,
        start: Annotated[int, Bounds(ge=0, le=LIST_MAX)] = 0,
        count: Annotated[int, Bounds(ge=1, le=LIST_MAX)] | None = None,
    ) -> list[Message]:
        """The conversation up to the snapshot, across forks; from message number `start` on, at most `count`."""
        return list(islice(self._catalog.conversations.read(self._catalog.refs.find_snapshot(ref).id, start), count))

    def entries(self, ref: str) -> Iterator[JournalEntry]:
        """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
        program's beginning, with the results of calls. A result that is longer than 1 MiB, or damaged, is None."""
        catalog = self._catalog
        snapshot = catalog.refs.find_snapshot(ref)
        if ref in snapshot.tags or snapshot.id.startswith(ref):
            found = list(catalog.journal.read(snapshot.id, since=catalog.trajectories.get(snapshot.trajectory).began))
        else:
            trajectory = catalog.refs.find_trajectory(ref)
            found = [
                *catalog.journal.read(trajectory.head, since=trajectory.began),
                *catalog.journal.unbound(trajectory.id),
            ]
        return (with_result(self._context, entry) for entry in found)

    def state(self, ref: str) -> dict[str, Any]:
        """The agent's own JSON state as it was saved with the snapshot."""
        values: dict[str, Any] = self._catalog.conversations.state(self._catalog.refs.find_snapshot(ref).id).get(
            "values", {}
        )
        return values

    def tasks(self, ref: str) -> list[TaskInfo]:
        """The subtasks as they were at the snapshot, in the order in which they were declared."""
        return tasks.tasks_of(self._catalog.conversations.state(self._catalog.refs.find_snapshot(ref).id))
