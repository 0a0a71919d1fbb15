"""Finding text in what trajectories have recorded: arguments, outputs, messages."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

from snapshotd.api.find import FIND_CHARS_MAX, FIND_MAX, FindInfo, HitInfo
from snapshotd.api.forms import iso_time
from snapshotd.api.record import About, Bounds
from snapshotd.api.wire import LIST_MAX, check_ref
from snapshotd.catalog.base import present_tenant
from snapshotd.engine.context import Context
from snapshotd.engine.search.filling import Filling
from snapshotd.engine.search.index import Excerpts, FoundText, TextIndex, query_of
from snapshotd.engine.search.texts import text_of
from snapshotd.errors import NotFound, UsageError
from snapshotd.kernel import turns
from snapshotd.types import TrajectoryID

_CATCH_UP_S = 1.0
_EXCERPTS_S = 2.0
"""Time for the excerpts of an answer. The hits that are left are its next page."""


class FindService:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, index: TextIndex, filling: Filling) -> None:
        self._context, self._catalog, self._index, self._filling = context, context.catalog, index, filling

    def find(
        self,
        q: Annotated[str, Bounds(max_length=FIND_CHARS_MAX), About('All of its words; `"in a row"`, `begin*`.')],
        trajectory: Annotated[str | None, About("Only its history; else all trajectories.")] = None,
        before: Annotated[int, Bounds(ge=0, le=LIST_MAX << 32)] | None = None,
        limit: Annotated[int, Bounds(ge=1, le=FIND_MAX)] = 50,
    ) -> FindInfo:
        """Records of trajectories (arguments, outputs, messages) that have a text, the newest first. `before`: the `next` of the
        answer before.

        They are those that the present tenant sees. Snapshots that were committed before the call are found, unless the index
        is still being filled (`waiting`). NotFound, Ambiguous (`trajectory`); UsageError (no text)."""
        text = q
        if not text.strip():
            raise UsageError("there is nothing to look for: give a text")
        line = [] if trajectory is None else self._line(check_ref(trajectory, "trajectory"))
        is_whole = self._filling.catch_up(_CATCH_UP_S)
        query = query_of(text)
        tenant = present_tenant()
        own = None if tenant is None else self._catalog.trajectories.of_tenant(tenant)
        found = [] if query is None else self._index.find(query, line, own, before=before, limit=limit + 1)
        hits, after = [], found[limit - 1].number if len(found) > limit else None
        if query is not None:
            with closing(Excerpts(query)) as excerpts:
                deadline = time.monotonic() + _EXCERPTS_S
                for one in found[:limit]:
                    turns.give_way()
                    hit = self._hit(one, excerpts)
                    if hit is not None:
                        hits.append(hit)
                    if time.monotonic() > deadline and one is not found[-1]:
                        after = one.number
                        break
        return FindInfo(tuple(hits), after, 0 if is_whole else self._filling.waiting())

    def _line(self, ref: str) -> list[tuple[TrajectoryID, int | None]]:
        """The trajectories of a history, each with the last `seq` of its part."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        line: list[tuple[TrajectoryID, int | None]] = [(trajectory.id, None)]
        while trajectory.forked_from is not None:
            origin = self._catalog.snapshots.get(trajectory.forked_from)
            trajectory = self._catalog.trajectories.get(origin.trajectory)
            line.append((trajectory.id, origin.seq))
        return line

    def _hit(self, found: FoundText, excerpts: Excerpts) -> HitInfo | None:
        """None: it was removed meanwhile."""
        try:
            snapshot = self._catalog.snapshots.get(found.snapshot)
            name = self._catalog.trajectories.get(snapshot.trajectory).name
            excerpt, matches = excerpts.make_excerpt(text_of(self._context, snapshot, found.kind, found.part))
        except NotFound:
            return None
        return HitInfo(
            trajectory=snapshot.trajectory,
            name=name,
            snapshot=snapshot.id,
            seq=snapshot.seq,
            kind=found.kind,
            part=found.part,
            excerpt=excerpt,
            matches=matches,
            cut=found.cut,
            created_at=iso_time(snapshot.created_at_ns),
        )
