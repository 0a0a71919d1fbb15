"""Sums and counts in the catalog's database.

The sums of trajectories are kept in memory, up to the row number of a snapshot. Rows come in the order of their numbers,
and what a commit binds is complete then, so the next call adds the rows above. Two things happen to older rows: files are
counted later (those snapshots are looked at again), and a trajectory is removed, whose row numbers SQLite gives anew (the
mark goes back).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.parts import CallFacts, NumberedSnapshot, TrajectoryTotals
from snapshotd.kernel import turns
from snapshotd.types import LayerID, ModelUse, SideEffect, SnapshotID, SnapshotState, TrajectoryID

_PAGE = 200
"""Snapshots at a time: the details of a model call, its parameters among them, may be long."""
_STATES_PAGE = 5000
_COUNTS = ("input_tokens", "output_tokens", "cached_tokens")
_AMOUNT_MAX = 1e15
"""Reported amounts beyond this, or below 0, are no amounts."""

_OWN = """
SELECT s.pk, t.id, s.id, s.seq, s.files_bytes, s.own_layers, CASE WHEN s.own_layers > 0 THEN k.layers END
FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory JOIN stacks k ON k.pk = s.stack WHERE s.pk > ? ORDER BY s.pk LIMIT ?
"""
_MODEL_CALLS = """
SELECT e.snapshot, e.began_at_ns, e.ended_at_ns, e.details -> 'usage' FROM entries e INDEXED BY entries_by_snapshot
WHERE e.snapshot > ? AND e.snapshot <= ? AND e.kind = 'model'
"""
_MODEL_CALLS_OF = """
SELECT s.id, e.began_at_ns, e.ended_at_ns, e.details -> 'usage'
FROM json_each(?) j CROSS JOIN snapshots s CROSS JOIN entries e WHERE s.id = j.value AND e.snapshot = s.pk AND e.kind = 'model'
"""
_CALLS_OF = """
SELECT s.id, e.side_effect, e.details ->> 'sub_agent'
FROM json_each(?) j CROSS JOIN snapshots s CROSS JOIN entries e WHERE s.id = j.value AND e.id = s.call_id
"""


class _Use:
    """Model calls that are being added up."""

    def __init__(self) -> None:
        self.calls = self.duration_ns = 0
        self.counts = Counter[str]()
        self.cost: float | None = None

    def add(self, began_ns: int, ended_ns: int | None, usage: str | None) -> None:
        self.calls += 1
        self.duration_ns += max(0, (ended_ns or began_ns) - began_ns)
        reported = None if usage is None else json.loads(usage)
        if not isinstance(reported, dict):
            return
        for name in _COUNTS:
            self.counts[name] += int(_amount(reported.get(name)) or 0)
        cost = _amount(reported.get("cost_usd"))
        if cost is not None:
            self.cost = (self.cost or 0.0) + cost

    def sum(self) -> ModelUse:
        counts = {name: self.counts[name] for name in _COUNTS}
        return ModelUse(self.calls, self.duration_ns, **counts, cost_usd=self.cost)


def _amount(value: Any) -> float | None:
    """Programs report what they like."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= _AMOUNT_MAX else None


@dataclass(slots=True)
class _Own:
    """A trajectory's snapshots that are being added up."""

    snapshots: int = 0
    newest: tuple[int, SnapshotID] = (-1, SnapshotID(""))
    file_bytes: int = 0
    layers: list[LayerID] = field(default_factory=list)
    model: _Use = field(default_factory=_Use)

    def sum(self) -> TrajectoryTotals:
        return TrajectoryTotals(self.snapshots, self.newest[1], self.file_bytes, self.layers, self.model.sum())


class Figures:
    """Reads over many rows: lists, sums, counts. Each method reads in pages, so that a step never waits for more than one page."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db
        self._one_at_a_time = threading.Lock()
        self._mark = 0
        self._own: dict[TrajectoryID, _Own] = {}
        self._uncounted: dict[int, TrajectoryID] = {}
        """Rows of snapshots whose files were not counted when they were added."""

    def totals(self, only: TrajectoryID | None = None) -> dict[TrajectoryID, TrajectoryTotals]:
        """Every trajectory that has snapshots of its own, or one. Cost: the snapshots that came since the last call, since the
        sums are kept in memory."""
        with self._one_at_a_time:
            while self._add_page():
                turns.give_way()
            self._add_counted()
            with self._db.lock:
                chosen = self._own if only is None else self._own.keys() & {only}
                return {trajectory: self._own[trajectory].sum() for trajectory in chosen}

    def forget(self, trajectory_id: TrajectoryID) -> None:
        """The trajectory was just removed, by a holder of the database's lock."""
        self._own.pop(trajectory_id, None)
        self._uncounted = {pk: line for pk, line in self._uncounted.items() if line != trajectory_id}
        row = self._db.read_one("SELECT max(pk) FROM snapshots")
        self._mark = min(self._mark, (row and row[0]) or 0)

    def _add_page(self) -> bool:
        """Add the next snapshots. False when there are none."""
        with self._db.lock:
            page = self._db.read(_OWN, (self._mark, _PAGE))
            if not page:
                return False
            calls = self._db.read(_MODEL_CALLS, (self._mark, page[-1][0]))
            of = {row[0]: self._add(row) for row in page}
            for pk, *call in calls:
                of[pk].model.add(*call)
            self._mark = page[-1][0]
        return True

    def _add(self, row: Row) -> _Own:
        pk, trajectory, snapshot, seq, file_bytes, own_layers, layers = row
        own = self._own.setdefault(trajectory, _Own())
        own.snapshots += 1
        own.newest = max(own.newest, (seq, snapshot))
        own.file_bytes += file_bytes or 0
        if file_bytes is None:
            self._uncounted[pk] = trajectory
        if layers is not None:
            own.layers += json.loads(layers)[:own_layers]
        return own

    def _add_counted(self) -> None:
        with self._db.lock:
            found = self._db.read(
                "SELECT pk, files_bytes FROM snapshots WHERE files_bytes IS NOT NULL"
                " AND pk IN (SELECT CAST(value AS BIGINT) FROM json_each(?))",
                (rows.encode_json(list(self._uncounted)),),
            )
            for pk, file_bytes in found:
                self._own[self._uncounted.pop(pk)].file_bytes += file_bytes

    def facts(self, snapshot_ids: Sequence[SnapshotID]) -> dict[SnapshotID, CallFacts]:
        """The facts of snapshots. One that has none, or does not exist, is left out."""
        uses: dict[SnapshotID, _Use] = {}
        calls: dict[SnapshotID, tuple[SideEffect, str | None]] = {}
        for ids in _pages(snapshot_ids):
            turns.give_way()
            for snapshot, *call in self._db.read(_MODEL_CALLS_OF, (ids,)):
                uses.setdefault(snapshot, _Use()).add(*call)
            for snapshot, effect, sub_agent in self._db.read(_CALLS_OF, (ids,)):
                calls[snapshot] = SideEffect(effect), None if sub_agent is None else str(sub_agent)
        return {
            snapshot: CallFacts(effect, sub_agent, uses[snapshot].sum() if snapshot in uses else None)
            for snapshot in {**uses, **calls}
            for effect, sub_agent in [calls.get(snapshot, (None, None))]
        }

    def rows(self, after: int, limit: int) -> list[NumberedSnapshot]:
        """The first snapshots in rows above `after`."""
        found = self._db.read(
            "SELECT s.pk, s.id, t.id, s.seq FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
            " WHERE s.pk > ? ORDER BY s.pk LIMIT ?",
            (after, limit),
        )
        return [NumberedSnapshot(*row) for row in found]

    def states(self) -> Mapping[SnapshotState, int]:
        """Number of snapshots in each state, also 0."""
        found = dict.fromkeys(SnapshotState, 0)
        last = 0
        while page := self._db.read(
            "SELECT state, count(*), max(pk)"
            " FROM (SELECT state, pk FROM snapshots WHERE pk > ? ORDER BY pk LIMIT ?) AS page GROUP BY state",
            (last, _STATES_PAGE),
        ):
            for state, count, _ in page:
                found[SnapshotState(state)] += count
            last = max(row[2] for row in page)
            turns.give_way()
        return found


def _pages(snapshot_ids: Sequence[SnapshotID]) -> Iterator[str]:
    for at in range(0, len(snapshot_ids), _PAGE):
        yield rows.encode_json(list(snapshot_ids[at : at + _PAGE]))
