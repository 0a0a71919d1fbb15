"""The catalog: the database of images, trajectories, snapshots, calls, conversations and tags.

It is the commit point of the product: a snapshot exists exactly when its row does, and `commit_snapshot` writes the
row, the tool call, the new messages and the trajectory's new head in one transaction. Everything a row refers to
(sealed layers, blobs) is complete before that. Layers and blobs that no row refers to are rubbish.

Durability: every method that writes survives `kill -9` of the process on return. It survives power loss after the next
`flush()`, which the engine calls before it reports a snapshot as stored.
Concurrency: all methods are thread-safe; there is one writer. Reads see the latest commit.
Errors: NotFound, Ambiguous, Conflict as each method says; DataLoss when the file is damaged; VersionMismatch when it
was written by a newer version; OutOfSpace when the disk is full (nothing changed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from snapshotd.catalog.parts import CallFacts, NumberedSnapshot, OtherCatalogs, SnapshotRow, TrajectoryTotals
from snapshotd.catalog.tables.approvals import ApprovalTable, Compensations
from snapshotd.catalog.tables.experiments import ExperimentTable
from snapshotd.catalog.tables.figures import Figures
from snapshotd.catalog.tables.images import ImageTable
from snapshotd.catalog.tables.others import OtherRows
from snapshotd.catalog.tables.requests import RequestTable
from snapshotd.catalog.tables.values import KeyValues
from snapshotd.catalog.tenancy import as_tenant, own_tenant, present_tenant
from snapshotd.types import (
    BlobID,
    CallID,
    Ended,
    FileChanges,
    Image,
    JournalEntry,
    LayerID,
    Message,
    Network,
    RecordID,
    RequestKey,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
)

__all__ = [
    "CallFacts",
    "Catalog",
    "ExperimentTable",
    "KeyValues",
    "NumberedSnapshot",
    "OtherCatalogs",
    "SnapshotRow",
    "TrajectoryTotals",
    "as_tenant",
    "own_tenant",
    "present_tenant",
]


class Catalog(ABC):
    """The module's text holds for all methods."""

    def __init__(self) -> None:
        self._listener: Callable[[TrajectoryID], object] = lambda _: None

    @abstractmethod
    def close(self) -> None:
        """Release the database. Idempotent. Any other call afterwards is a defect."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything committed so far is durable against power loss."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Put what was committed into the catalog's main file, as far as no other process reads an earlier state."""

    # -- small facts ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def problems(self) -> list[str]:
        """The damages in the catalog's own file, in words; [] if there are none. Reads the whole of it."""

    @abstractmethod
    def get_meta(self, key: str) -> str | None:
        """A named fact of this state directory (instance id, boot id), or None."""

    @abstractmethod
    def set_meta(self, key: str, value: str) -> None:
        """Set or replace a named fact."""

    # -- trajectories --------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_trajectories(
        self, items: Sequence[tuple[Trajectory, Snapshot | None]], *, request: RequestKey | None = None
    ) -> None:
        """Record new trajectories, all or none, as what `request` (if any) has made. With a snapshot: it is the first
        one and the head. Without one (a fork): the head is the existing snapshot `forked_from`. Conflict when a name is
        taken, by another trajectory or as a tag."""

    def notify(self, listener: Callable[[TrajectoryID], object]) -> None:
        """Call `listener` from now on after a trajectory began, changed its status, or was removed, in place of an earlier
        listener. It must not block or raise."""
        self._listener = listener

    @abstractmethod
    def get_trajectory(self, trajectory_id: TrajectoryID) -> Trajectory:
        """The trajectory of this id. NotFound."""

    @abstractmethod
    def trajectories(self, status: TrajectoryStatus | None = None) -> list[Trajectory]:
        """All, or those in one status; oldest first."""

    @abstractmethod
    def trajectories_of(self, tenant: str, among: TrajectoryID | None = None) -> set[TrajectoryID]:
        """The ids of a tenant's trajectories: all, or the one of `among` if it is one. They have no user's folder."""

    @abstractmethod
    def set_status(self, trajectory_id: TrajectoryID, status: TrajectoryStatus, exit_code: int | None = None) -> None:
        """Change a trajectory's status (and exit code, if given). NotFound."""

    @abstractmethod
    def set_began(self, trajectory_id: TrajectoryID, snapshot_id: SnapshotID) -> None:
        """Record at which snapshot the trajectory's program was started from the top. NotFound."""

    @abstractmethod
    def set_network(self, trajectory_id: TrajectoryID, network: Network) -> None:
        """Replace the network that a trajectory's sandbox reaches. NotFound."""

    @abstractmethod
    def set_env(self, trajectory_id: TrajectoryID, env: tuple[tuple[str, str], ...]) -> None:
        """Replace the environment of a trajectory's commands. NotFound."""

    @abstractmethod
    def draw_fence(self, trajectory_id: TrajectoryID) -> int:
        """A new fence for the trajectory's writer: a holder of an older, smaller one cannot write any more. NotFound."""

    @abstractmethod
    def check_removable(self, trajectory_id: TrajectoryID, gone: Collection[TrajectoryID] = ()) -> None:
        """Raises the errors that `remove_trajectory` would raise now, or once those of `gone` are removed; changes nothing."""

    @abstractmethod
    def remove_trajectory(self, trajectory_id: TrajectoryID) -> None:
        """Forget a trajectory with its snapshots, calls, messages and tags. NotFound; Conflict while a fork of one of
        its snapshots exists (the message names it), or while a captured snapshot elsewhere has one of its snapshots as
        `base` (after a rewind to it). Snapshots elsewhere that are not captured lose such a base. The caller collects
        layers and blobs."""

    @abstractmethod
    def removed_trajectories(self) -> set[TrajectoryID]:
        """Ids of trajectories that were removed, until `forget_removed`: packs that a crash has left may hold them."""

    @abstractmethod
    def forget_removed(self, trajectories: Collection[TrajectoryID]) -> None:
        """Forget even the ids of removed trajectories: no pack holds them."""

    @abstractmethod
    def restore_rows(
        self, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]
    ) -> None:
        """Add rows that were recorded elsewhere, or earlier, unchanged: states, trees, records and tags included; all
        or none. Parents and bases come before the snapshots that name them, or are here already; so do images. A
        trajectory's `head` is one of its own snapshots or its `forked_from`. Conflict when an id, name or tag is taken;
        NotFound for a named row that does not exist."""

    # -- snapshots -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def commit_snapshot(
        self,
        snapshot: Snapshot,
        messages: Sequence[Message],
        *,
        expected_head: SnapshotID,
        entries: Sequence[JournalEntry] = (),
        ended: Ended | None = None,
        state: dict[str, Any] | None = None,
        fence: int | None = None,
        request: RequestKey | None = None,
    ) -> None:
        """The commit point. Adds the snapshot with its call, appends `messages` to the conversation, ends the journal
        entry `ended`, adds `entries` (complete ones, that had no beginning of their own), binds every ended entry of
        the line that no snapshot binds yet, saves `state` (None: unchanged), records the snapshot as what `request` has made
        and moves the head: together or not at all.

        The conversation continues the one of `snapshot.continues` and keeps `snapshot.messages - len(messages)` of its
        messages: all of them, or with `snapshot.follows` any number. With `follows` a new line of conversation and
        journal begins there, and unbound entries stay with the old line for good.
        Conflict when the head is not `expected_head`, or `fence` is older than the trajectory's; the message names the
        head. NotFound: `ended` is no open entry. UsageError: a tag could be taken for an id."""

    @abstractmethod
    def get_snapshot(self, snapshot_id: SnapshotID) -> Snapshot:
        """The snapshot of this id, with its tags. NotFound."""

    @abstractmethod
    def get_snapshots(self, snapshot_ids: Iterable[SnapshotID]) -> dict[SnapshotID, Snapshot]:
        """The snapshots with these ids, as far as they exist, read in pages."""

    @abstractmethod
    def snapshots(
        self, trajectory_id: TrajectoryID, last: int | None = None, *, before: int | None = None
    ) -> list[Snapshot]:
        """The trajectory's own snapshots by `seq`; a fork's do not include the ones it began from. With `before`, only
        those whose `seq` is smaller; with `last`, only that many of the newest. The cost then does not depend on how
        many there are."""

    @abstractmethod
    def count_snapshots(self, trajectory_id: TrajectoryID) -> int:
        """Number of the trajectory's own snapshots. NotFound."""

    @abstractmethod
    def all_snapshots(self) -> Iterator[Snapshot]:
        """Every snapshot, oldest first, without holding them all in memory."""

    @abstractmethod
    def set_files(self, snapshot_id: SnapshotID, files: FileChanges) -> None:
        """Record the background count of changed files. Not an error when the snapshot is gone."""

    @abstractmethod
    def set_state(self, snapshot_ids: Iterable[SnapshotID], state: SnapshotState) -> None:
        """Record durability. Unknown ids are ignored. A snapshot in any other state than `stored` has no tree afterwards."""

    @abstractmethod
    def unstored(self) -> list[SnapshotID]:
        """Snapshots in state `captured`, oldest first: the archive's remaining work. Cost: proportional to these, not to all."""

    @abstractmethod
    def set_stored(self, snapshot_id: SnapshotID, tree: TreeID, record: RecordID, warnings: Sequence[str] = ()) -> None:
        """Record that a snapshot is in the repository, with its tree, its record, and warnings about files that the
        tree lacks: state `stored`. Only a captured (or lost) snapshot changes. Not an error when it is gone. Durable
        after `flush`."""

    @abstractmethod
    def set_pruned(self, snapshot_ids: Iterable[SnapshotID]) -> None:
        """Give up the files of stored snapshots: state `pruned`, no tree. Others are left as they are. Unknown ids are
        ignored."""

    @abstractmethod
    def record(self, snapshot_id: SnapshotID) -> RecordID | None:
        """The record of a snapshot that is, or was, stored; None if it never was. NotFound."""

    @abstractmethod
    def set_record(self, snapshot_id: SnapshotID, record: RecordID) -> None:
        """Replace a snapshot's record, which is damaged, by another one. Not an error when the snapshot is gone."""

    @abstractmethod
    def forget_outputs(self, blobs: Mapping[BlobID, int | None], *, spooled: bool = False) -> None:
        """Give up outputs that are damaged for good; `blobs` has their lengths (None: unknown). Calls that refer to them
        have them as `damaged` from now on. Calls of captured snapshots stay as they are, since their outputs are in the
        spool. `spooled`: the outputs in the spool are damaged, so only calls of captured snapshots change."""

    @abstractmethod
    def own_messages(self, snapshot_id: SnapshotID) -> list[Message]:
        """The messages that this snapshot added to the conversation that it continues. NotFound."""

    @abstractmethod
    def conversation(self, snapshot_id: SnapshotID, start: int = 0) -> Iterator[Message]:
        """The conversation up to a snapshot, from message number `start`, across forks and rewinds. NotFound. Cost: the
        messages that it yields, and one query per fork or rewind on the way."""

    @abstractmethod
    def state(self, snapshot_id: SnapshotID) -> dict[str, Any]:
        """The agent's state as it was saved with a snapshot, or with the nearest one that it continues; {} at the
        beginning. NotFound."""

    @abstractmethod
    def own_state(self, snapshot_id: SnapshotID) -> dict[str, Any] | None:
        """The agent's state if this snapshot changed it; None if it has the state of the snapshot that it continues.
        NotFound."""

    # -- journals ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_entry(self, trajectory_id: TrajectoryID, entry: JournalEntry, *, fence: int | None = None) -> None:
        """Record an intent (with `status`: a complete entry) at the end of the trajectory's journal. Survives `kill -9`
        on return. Conflict: the id exists, or `fence` is older than the trajectory's; NotFound; UsageError: the id is
        no id."""

    @abstractmethod
    def end_entry(self, trajectory_id: TrajectoryID, ended: Ended, *, fence: int | None = None) -> None:
        """Record the outcome of an open entry without a snapshot; the next one binds it. NotFound: it is not open (any
        more), or another trajectory's. Conflict as `begin_entry`."""

    @abstractmethod
    def entry(self, entry_id: CallID) -> JournalEntry:
        """The journal entry of this id. NotFound."""

    @abstractmethod
    def find_entry(self, ref: str) -> tuple[TrajectoryID, JournalEntry]:
        """The journal entry of this id or unique prefix (>= 4 characters). NotFound, Ambiguous."""

    @abstractmethod
    def own_entries(self, snapshot_id: SnapshotID) -> list[JournalEntry]:
        """The entries that a snapshot binds, in the order in which they began. NotFound."""

    @abstractmethod
    def journal(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> Iterator[JournalEntry]:
        """The journal up to a snapshot, in the order in which entries began, across forks and rewinds; with `since`,
        only the entries bound after that snapshot (if it lies on the way; else all). NotFound."""

    @abstractmethod
    def left_running(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> list[JournalEntry]:
        """The calls that ran where the way to a snapshot leaves a line, by a rewind or a fork, and at the snapshot
        itself. They began before and ended after that, or never, so `journal` lacks them. NotFound."""

    @abstractmethod
    def unbound(self, trajectory_id: TrajectoryID) -> list[JournalEntry]:
        """The entries of the trajectory's present line that no snapshot binds: open ones, and the ones that ended since
        the head. NotFound."""

    # -- parts, for whose methods the module's text holds, too ----------------------------------------------------------
    images: ImageTable
    requests: RequestTable
    approvals: ApprovalTable
    compensations: Compensations
    values: KeyValues
    experiments: ExperimentTable
    figures: Figures
    others: OtherRows

    @abstractmethod
    def resolve_snapshot(self, ref: str) -> Snapshot:
        """By tag, unique id prefix (>= 4 characters), or a trajectory's name or unique id prefix (its head); the present tenant
        finds its own. An exact id wins over all, a tag or name over a prefix. NotFound; Ambiguous lists up to five candidates,
        or both that an older version gave one name; so it is for a name and a prefix that are the same."""

    @abstractmethod
    def resolve_trajectory(self, ref: str) -> Trajectory:
        """The trajectory that a ref means: its name, unique id prefix, or the tag or unique id prefix of one of its snapshots. Errors as
        `resolve_snapshot`."""

    @abstractmethod
    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False, request: RequestKey | None = None) -> None:
        """Give a snapshot a tag. Conflict when another snapshot has it, unless `move`, or when a trajectory has that
        name, or a tenant that is not the present one; UsageError when it is malformed, or could be taken for an id."""

    @abstractmethod
    def untag(self, name: str) -> None:
        """Remove a tag. NotFound."""

    @abstractmethod
    def tags(self) -> dict[str, SnapshotID]:
        """Every tag and its snapshot."""

    # -- what is referenced --------------------------------------------------------------------------------------------

    @abstractmethod
    def referenced_layers(self) -> set[LayerID]:
        """Every layer that a snapshot's stack contains."""

    @abstractmethod
    def unstored_blobs(self) -> set[BlobID]:
        """The blobs that calls of captured snapshots refer to: they must stay in the spool."""

    @abstractmethod
    def referenced_records(self) -> set[RecordID]:
        """The records of all snapshots."""
