"""Pins in the fleet's database for what this node uses of other nodes' histories: what is being read, what sandboxes stand on, and
what forks began from that no other node knows yet. The fleet neither gives up nor removes what is pinned.

A pin is got before the first use, and prolonged while that lasts. While PostgreSQL is away, uses begin without one: what the
fleet removes meanwhile keeps its bytes for the grace (repo/fleet/base.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from snapshotd.engine.context import Context
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.errors import NotFound, Unavailable
from snapshotd.fleet.base import SECOND_NS
from snapshotd.types import Snapshot, SnapshotID, SnapshotState, short

PIN_S = 3600
LOOK_S = 60.0
"""Time between two looks at what is used."""
_log = logging.getLogger(__name__)


class NodePins:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        shared: SharedHistory,
        claims: Claims,
        marks: PublishedMarks,
        stood_on: Callable[[], set[SnapshotID]],
    ) -> None:
        """`stood_on`: the snapshots that sandboxes stand on."""
        self._context, self._catalog = context, context.catalog
        self._shared, self._claims, self._marks, self._stood_on = shared, claims, marks, stood_on
        self._lock = threading.Lock()
        self._held: dict[SnapshotID, float] = {}
        """Until when (monotonic) the fleet keeps them, at least."""
        self._look_at = 0.0

    def hold(self, snapshot: Snapshot) -> None:
        """Pin a snapshot of another node before it is used. NotFound: the fleet has removed it."""
        if not self._choose_foreign([snapshot]):
            return
        try:
            with self._lock:
                self._pin(snapshot.id)
        except Unavailable as exc:
            _log.info("snapshot %s is used without a pin: %s", short(snapshot.id), exc.message)
            self._look_at = 0.0

    def renew(self) -> None:
        """Prolong the pins of what is used, and give up the others, if that is due. Unavailable."""
        if time.monotonic() < self._look_at:
            return
        with self._lock:  # a use that begins meanwhile waits, and finds what is left
            used = self._find_used()
            for snapshot in used:
                try:
                    self._pin(snapshot)
                except NotFound as exc:
                    _log.error("what is used here was removed while this node was away: %s", exc.message)
            done = self._held.keys() - used
            if done:
                self._shared.collection.unpin(self._shared.node, sorted(done))
            for one in done:
                del self._held[one]
            self._look_at = time.monotonic() + LOOK_S

    def _pin(self, snapshot: SnapshotID) -> None:
        until = time.monotonic() + PIN_S
        if self._held.get(snapshot, 0.0) > until - PIN_S / 2:
            return
        self._shared.collection.pin(self._shared.node, [snapshot], PIN_S * SECOND_NS)
        self._held[snapshot] = until

    def _find_used(self) -> set[SnapshotID]:
        with self._context.pins.frozen() as read:
            ids = read | self._stood_on()
        new = (one for one in self._catalog.trajectories.list() if self._marks.published_seq(one.id) < 0)
        ids.update(one.forked_from for one in new if one.forked_from is not None)
        return {one.id for one in self._choose_foreign(self._catalog.snapshots.get_many(ids).values())}

    def _choose_foreign(self, snapshots: Iterable[Snapshot]) -> list[Snapshot]:
        """Choose the ones whose files another node may give up."""
        claimed = self._claims.claims()
        return [
            one
            for one in snapshots
            if one.state is not SnapshotState.PRUNED and one.trajectory not in claimed and self._marks.is_published(one)
        ]
