"""Histories of other nodes: brought here from the fleet's catalog, and this node's own that another one took over.

    1 this node's index knows of all packs that are published (merge)
    2 the images that are not here are written from the repository
    3 one transaction in this node's catalog adds the rows that are missing, with their ids                  <- the commit point
    4 the marks say that they are published, and that another node may go on with them

The rows of a snapshot bring those before it, and what they stand on in other trajectories: a fork's origin, and what a rewind
went back to. Files stay in the bucket until they are read, and then only the parts that are. A crash leaves images that are
kept, and rows that the next attempt finds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from snapshotd.catalog.base import OtherCatalogs
from snapshotd.engine.context import Context
from snapshotd.engine.history.effects import compensated_call
from snapshotd.engine.journal.replay import PROMOTED, origin_of
from snapshotd.engine.node.copying import needed_by, rows_of
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.errors import Conflict, DataLoss, NotFound, Unavailable
from snapshotd.failpoints import hit
from snapshotd.fleet.base import Claim, IntentState, OwnedTrajectory, RecordedIntent, Taken
from snapshotd.types import (
    CallID,
    Compensation,
    EntryKind,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TreeID,
    short,
)

REFRESH_S = 1.0
"""Time for which a history of another node may be behind the fleet's catalog where somebody looks at it."""
_log = logging.getLogger(__name__)


class NodeTakeover(OtherCatalogs):
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        archiver: Archiver,
        merge: Callable[[], None],
        write_image: Callable[[TreeID, Path], None],
        shared: SharedHistory,
        claims: Claims,
        marks: PublishedMarks,
    ) -> None:
        """`merge`: has this node's index know everything that is published. `write_image`: writes an image's root from
        its stored tree."""
        self._context, self._catalog, self._archiver = context, context.catalog, archiver
        self._merge, self._write_image = merge, write_image
        self._shared, self._claims, self._marks = shared, claims, marks
        self._bringing = threading.Lock()
        """One at a time: two could add the same rows."""
        self._looked: dict[TrajectoryID, float] = {}

    # -- names ---------------------------------------------------------------------------------------------------------

    def find(self, wanted: Literal["snapshot", "trajectory"], ref: str) -> bool:
        catalog = self._shared.catalog
        try:
            is_line = wanted == "trajectory"
            found = catalog.refs.find_snapshot(catalog.refs.find_trajectory(ref).head if is_line else ref)
        except NotFound:
            return False
        except Unavailable as exc:
            raise Unavailable(
                f"{ref[:80]!r} is not on this node, and other nodes cannot be asked: {exc.message}"
            ) from exc
        if found.trajectory in self._catalog.trajectories.removed():
            return False
        self._bring(found)
        return True

    def refresh(self, trajectory: TrajectoryID) -> bool:
        """See `OtherCatalogs`. While the database is away, what is here has to do."""
        now = time.monotonic()
        if not self._marks.is_foreign(trajectory) or now - self._looked.get(trajectory, -REFRESH_S) < REFRESH_S:
            return False
        self._looked[trajectory] = now
        try:
            head = self._shared.catalog.trajectories.get(trajectory).head
        except NotFound:
            return self._forget(trajectory)
        except Unavailable as exc:
            _log.info("trajectory %s is shown as it is known here: %s", short(trajectory), exc.message)
            return False
        try:
            self._bring(self._shared.catalog.snapshots.get(head))
        except (NotFound, Unavailable) as exc:
            _log.info("trajectory %s is shown as it is known here: %s", short(trajectory), exc.message)
        return True

    def _forget(self, trajectory: TrajectoryID) -> bool:
        """Remove a trajectory that its owner has removed from the fleet. False: it stays here."""
        if self._marks.count_unpublished(trajectory):
            return False
        try:
            self._catalog.trajectories.remove(trajectory)
        except Conflict as exc:
            _log.warning("the fleet has removed %s, and it stays here: %s", short(trajectory), exc.message)
            return False
        self._marks.set_published(trajectory, -1)
        self._marks.set_foreign(trajectory, foreign=False)
        return True

    # -- bringing ------------------------------------------------------------------------------------------------------

    def bring(self, trajectory: TrajectoryID) -> None:
        """Make this node's catalog have a trajectory with all that is published of it, its head being the published one.
        Idempotent. NotFound, Unavailable."""
        catalog = self._shared.catalog
        try:
            head = catalog.snapshots.get(catalog.trajectories.get(trajectory).head)
        except NotFound:
            if self._marks.published_seq(trajectory) < 0:
                raise NotFound(
                    f"nothing of trajectory {short(trajectory)} was published before its node ended, so it cannot go on here: "
                    "start it again from what it was forked from"
                ) from None
            raise
        self._marks.set_foreign(trajectory, foreign=True)  # claimed already, and not whole before its rows are here
        self._bring(head)
        self._marks.set_foreign(trajectory, foreign=False)

    def _bring(self, snapshot: Snapshot) -> None:
        shared = self._shared
        with self._bringing:
            trajectories, snapshots = needed_by(shared.catalog, snapshot)
            here = self._catalog.snapshots.get_many(one.id for one in snapshots)
            missing = [one for one in snapshots if one.id not in here]
            others = [one for one in trajectories if not self._is_own(one.id)]
            if missing:
                self._merge()
                hit("engine.takeover.merged")
                self._adopt_images(trajectories, missing)
                self._check(missing)
            self._catalog.others.add_missing(
                [],
                [one for one in others if missing or one.id == snapshot.trajectory],
                rows_of(shared.catalog, missing),
                shared.catalog.approvals.list(None, snapshot.trajectory),
                shared.catalog.compensations.of_trajectory(snapshot.trajectory),
            )
            pruned = [one.id for one in snapshots if one.state is SnapshotState.PRUNED and one.id in here]
            self._catalog.snapshots.set_pruned(one for one in pruned if here[one].state is SnapshotState.STORED)
            hit("engine.takeover.added")
            seqs: dict[TrajectoryID, int] = {}
            for one in snapshots:
                seqs[one.trajectory] = max(one.seq, seqs.get(one.trajectory, -1))
            for line in others:
                self._marks.set_published(line.id, max(seqs[line.id], self._marks.published_seq(line.id)))
                self._marks.set_foreign(line.id, foreign=True)

    def _is_own(self, trajectory: TrajectoryID) -> bool:
        """True for a trajectory that this node goes on with: here is more of it than in the fleet's catalog."""
        return (
            trajectory in self._claims.claims() and not self._marks.is_foreign(trajectory) and self._knows(trajectory)
        )

    def _knows(self, trajectory: TrajectoryID) -> bool:
        try:
            self._catalog.trajectories.get(trajectory)
        except NotFound:
            return False
        return True

    def _adopt_images(self, trajectories: Sequence[Trajectory], snapshots: Sequence[Snapshot]) -> None:
        needed = {one.spec.image for one in trajectories} | {one.stack.image for one in snapshots}
        for image in needed - {image.id for image in self._context.images.list()}:
            row = self._shared.catalog.images.find(image)
            if row.tree is None:
                raise DataLoss(f"image {short(image)} is in the fleet's catalog without its files: look at its node")
            tree = row.tree
            self._context.images.adopt(row, lambda root, tree=tree: self._write_image(tree, root))  # type: ignore[misc]

    def _check(self, snapshots: Sequence[Snapshot]) -> None:
        """DataLoss: the index does not know a tree of a published snapshot."""
        for one in snapshots:
            if one.tree is not None and not self._context.repo.contains(one.tree):
                raise DataLoss(
                    f"snapshot {short(one.id)} is published, and the bucket has no tree {one.tree} of it: "
                    "run `snapshotd check` on the node that made it"
                )

    # -- what another node took over -----------------------------------------------------------------------------------

    def is_incomplete(self, trajectory: TrajectoryID) -> bool:
        """True for another node's trajectory that was shown here and that `bring` has not completed."""
        return self._marks.is_foreign(trajectory)

    def count_unpublished(self, trajectory: TrajectoryID) -> int:
        """The number of its snapshots in this node's catalog that are not published."""
        return self._marks.count_unpublished(trajectory)

    def branch_off(self, row: OwnedTrajectory) -> Claim | None:
        """Make a side branch of this node's unpublished snapshots of a trajectory that was taken over; None: it has none.
        Its trajectory has its published head afterwards. Idempotent, also after a crash."""
        trajectory = row.trajectory
        self._catch_up(row)
        left = self._marks.find_unpublished(trajectory)
        if not left:
            return None
        side = TrajectoryID(hashlib.blake2s(f"side branch {trajectory} {left[0].id}".encode()).hexdigest()[:32])
        lost = Claim(trajectory, self._shared.node, 0, 0)  # an owner's fence begins with 1
        claim = self._claims.branch_off(replace(row, head=left[0].parent), lost, side)
        self._catalog.others.split_trajectory(trajectory, left[0].id, side)
        self._marks.set_foreign(trajectory, foreign=True)
        return claim

    def _catch_up(self, row: OwnedTrajectory) -> None:
        """Note what is published and was not noted before a crash."""
        for one in reversed(self._marks.find_unpublished(row.trajectory)):
            if self._shared.coordination.find_published([one.id]):
                self._marks.set_published(row.trajectory, one.seq)
                return

    def intend(self, taken: Taken) -> None:
        """Write the calls that may have happened, and that no published snapshot has, into this node's journal, so that
        `resume` asks about them."""
        # a call that has happened, as a person or a side branch said, may be one that this line lacks: what it gave was lost
        # with a node
        doubted = (IntentState.UNDECIDED, IntentState.HAPPENED)
        intents = [one for one in self._shared.coordination.intents(taken.claim.trajectory) if one.state in doubted]
        if not intents:
            return
        trajectory = self._catalog.trajectories.get(taken.claim.trajectory)
        entries = [*self._catalog.journal.read(trajectory.head), *self._catalog.journal.unbound(trajectory.id)]
        here = {entry.id for entry in entries} | {origin_of(entry) for entry in entries}
        for one in intents:
            if one.call in here:
                continue
            entry = _entry_of(one, taken.claim.fence, trajectory.head)
            made_up_for = compensated_call(one.call, entry.name, entry.arguments)
            if made_up_for is not None:
                self._note_compensation(trajectory.id, one.call, made_up_for)
                continue
            try:
                self._catalog.journal.begin(trajectory.id, entry)
            except Conflict as exc:
                _log.info("%s", exc.message)

    def _note_compensation(self, trajectory: TrajectoryID, intent: CallID, call: CallID) -> None:
        """Note a compensation that began on the other node and may have ended there: it does not run again, and nobody
        is asked."""
        if self._catalog.compensations.get(call) is None:
            self._catalog.compensations.begin(Compensation(call, trajectory, None, time.time_ns()))
        self._shared.coordination.decide_intent(intent, happened=True)


def _entry_of(intent: RecordedIntent, fence: int, after: SnapshotID) -> JournalEntry:
    """The journal entry of an irreversible call that began on another node, as far as the fleet knows it. It has an id of its own
    for each owner of the trajectory: side branches may have the call itself, and the entries of earlier owners."""
    said = json.loads(intent.said or "{}")
    return JournalEntry(
        CallID(hashlib.blake2s(f"doubted call {intent.call} {intent.trajectory} {fence}".encode()).hexdigest()[:32]),
        EntryKind.TOOL,
        said.get("name", "unknown"),
        said.get("arguments"),
        after,
        time.time_ns(),
        SideEffect.IRREVERSIBLE,
        said.get("key"),
        details={PROMOTED: intent.call},
    )
