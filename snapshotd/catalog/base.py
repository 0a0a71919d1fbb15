"""The catalog: the database of images, trajectories, snapshots, calls, conversations and tags.

It is the commit point of the product: a snapshot exists exactly when its row does, and `commit_snapshot` writes the row, the
tool call, the new messages and the trajectory's new head in one transaction. Everything a row refers to (sealed layers, blobs)
is complete before that. Layers and blobs that no row refers to are rubbish.

Durability: every method that writes survives `kill -9` of the process on return. It survives power loss after the next
`flush()`, which the engine calls before it reports a snapshot as stored.
Concurrency: all methods are thread-safe; there is one writer. Reads see the latest commit.
Errors: NotFound, Ambiguous, Conflict as each method says; DataLoss when the file is damaged; VersionMismatch when it was
written by a newer version; OutOfSpace when the disk is full (nothing changed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from snapshotd.types import (
    BlobID,
    ExperimentID,
    FileChanges,
    Image,
    ImageID,
    LayerID,
    Message,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """Everything that is recorded with one snapshot: `messages` are those it added to its parent's conversation."""

    snapshot: Snapshot
    messages: tuple[Message, ...] = ()
    record: RecordID | None = None


class Catalog(ABC):
    """See the module's text for what holds for all methods."""

    @abstractmethod
    def close(self) -> None:
        """Release the database. Idempotent. Any other call afterwards is a defect."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything committed so far is durable against power loss."""

    # -- small facts ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def get_meta(self, key: str) -> str | None:
        """A named fact of this state directory (instance id, boot id), or None."""

    @abstractmethod
    def set_meta(self, key: str, value: str) -> None:
        """Set or replace a named fact."""

    # -- images --------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_image(self, image: Image) -> None:
        """Record an image. An older image of the same name loses its name to the new one (and is listed by id only, name "")."""

    @abstractmethod
    def images(self) -> list[Image]:
        """All images, newest first."""

    @abstractmethod
    def find_image(self, ref: str) -> Image:
        """By exact name, or unique id prefix (>= 4 characters). NotFound, Ambiguous."""

    @abstractmethod
    def remove_image(self, image_id: ImageID) -> None:
        """Forget an image. Conflict (naming one user) while a trajectory uses it; NotFound."""

    @abstractmethod
    def set_image_tree(self, image_id: ImageID, tree: TreeID) -> None:
        """Record that an image's files are in the repository. Not an error when it is gone."""

    # -- trajectories --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_trajectories(self, items: Sequence[tuple[Trajectory, Snapshot | None]]) -> None:
        """Record new trajectories, all or none. With a snapshot: it is the first one and the head. Without one (a fork): the head
        is the existing snapshot `forked_from`. Conflict when a name is taken."""

    @abstractmethod
    def get_trajectory(self, trajectory_id: TrajectoryID) -> Trajectory:
        """By exact id. NotFound."""

    @abstractmethod
    def trajectories(self, status: TrajectoryStatus | None = None) -> list[Trajectory]:
        """All, or those in one status; oldest first."""

    @abstractmethod
    def set_status(self, trajectory_id: TrajectoryID, status: TrajectoryStatus, exit_code: int | None = None) -> None:
        """Change a trajectory's status (and exit code, if given). NotFound."""

    @abstractmethod
    def remove_trajectory(self, trajectory_id: TrajectoryID) -> None:
        """Forget a trajectory with its snapshots, calls, messages and tags. NotFound; Conflict while a fork of one of its snapshots
        exists (the message names it), or while a captured snapshot elsewhere has one of its snapshots as `base` (after a rewind to it).
        Snapshots elsewhere that are not captured lose such a base. Layers and blobs are the caller's to collect."""

    @abstractmethod
    def restore_rows(self, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]) -> None:
        """Add what was recorded elsewhere, or earlier, as it is: states, trees, records and tags included; all or none. Parents and bases
        come before the snapshots that name them, or are here already; so do images. A trajectory's `head` is one of its own snapshots or
        its `forked_from`. Conflict when an id, name or tag is taken; NotFound for what is named and is nowhere."""

    # -- snapshots -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def commit_snapshot(self, snapshot: Snapshot, messages: Sequence[Message], *, expected_head: SnapshotID) -> None:
        """The commit point. Adds the snapshot with its call, appends `messages` to the trajectory's conversation and moves the head,
        together or not at all. `snapshot.messages` must equal the parent's plus len(messages).
        Conflict when the head is not `expected_head`; the message names the head."""

    @abstractmethod
    def get_snapshot(self, snapshot_id: SnapshotID) -> Snapshot:
        """By exact id, tags included. NotFound."""

    @abstractmethod
    def snapshots(self, trajectory_id: TrajectoryID, last: int | None = None) -> list[Snapshot]:
        """The trajectory's own snapshots by `seq`; a fork's do not include the ones it began from. With `last`, only that many of the
        newest; the cost then does not depend on how many there are."""

    @abstractmethod
    def count_snapshots(self, trajectory_id: TrajectoryID) -> int:
        """How many the trajectory has of its own. NotFound."""

    @abstractmethod
    def all_snapshots(self) -> Iterator[Snapshot]:
        """Every snapshot, oldest first, without holding them all in memory."""

    @abstractmethod
    def set_files(self, snapshot_id: SnapshotID, files: FileChanges) -> None:
        """Record the background count of changed files. Not an error when the snapshot is gone."""

    @abstractmethod
    def set_state(self, snapshot_ids: Iterable[SnapshotID], state: SnapshotState) -> None:
        """Record durability. Unknown ids are ignored. Whatever does not become `stored` has no tree afterwards."""

    @abstractmethod
    def unstored(self) -> list[SnapshotID]:
        """Snapshots in state `captured`, oldest first: what the archive has still to do. Cost: those, not all."""

    @abstractmethod
    def set_stored(self, snapshot_id: SnapshotID, tree: TreeID, record: RecordID) -> None:
        """Record that a snapshot is in the repository, with its tree and record: state `stored`. Only a captured (or lost) snapshot
        changes. Not an error when it is gone. Durable after `flush`."""

    @abstractmethod
    def set_pruned(self, snapshot_ids: Iterable[SnapshotID]) -> None:
        """Give up the files of stored snapshots: state `pruned`, no tree. Others are left as they are. Unknown ids are ignored."""

    @abstractmethod
    def record(self, snapshot_id: SnapshotID) -> RecordID | None:
        """The record of a snapshot that is, or was, stored; None if it never was. NotFound."""

    @abstractmethod
    def set_record(self, snapshot_id: SnapshotID, record: RecordID) -> None:
        """Another record takes the place of one that is damaged. Not an error when the snapshot is gone."""

    @abstractmethod
    def forget_outputs(self, blobs: Iterable[BlobID]) -> None:
        """Outputs that are damaged for good: no call refers to them any more."""

    @abstractmethod
    def own_messages(self, snapshot_id: SnapshotID) -> list[Message]:
        """The messages that this snapshot added to its parent's conversation. NotFound."""

    @abstractmethod
    def conversation(self, snapshot_id: SnapshotID) -> Iterator[Message]:
        """The conversation up to a snapshot, from its beginning, across forks. NotFound."""

    @abstractmethod
    def resolve_snapshot(self, ref: str) -> Snapshot:
        """By tag, unique id prefix (>= 4 characters), or a trajectory's name or unique id prefix (its head).
        A tag wins over a name, a name over a prefix. NotFound; Ambiguous lists up to five candidates."""

    @abstractmethod
    def resolve_trajectory(self, ref: str) -> Trajectory:
        """By name, unique id prefix, or the tag or unique id prefix of one of its snapshots. NotFound; Ambiguous."""

    @abstractmethod
    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False) -> None:
        """Give a snapshot a tag. Conflict when another snapshot has it, unless `move`; UsageError when the name is malformed."""

    @abstractmethod
    def untag(self, name: str) -> None:
        """Remove a tag. NotFound."""

    @abstractmethod
    def tags(self) -> dict[str, SnapshotID]:
        """Every tag and what it names."""

    # -- what is referenced --------------------------------------------------------------------------------------------------

    @abstractmethod
    def referenced_layers(self) -> set[LayerID]:
        """Every layer that a snapshot's stack contains."""

    @abstractmethod
    def referenced_blobs(self) -> set[BlobID]:
        """Every blob that a call refers to."""

    @abstractmethod
    def unstored_blobs(self) -> set[BlobID]:
        """The blobs that calls of captured snapshots refer to: what must stay in the spool."""

    @abstractmethod
    def referenced_trees(self) -> set[TreeID]:
        """The trees of all snapshots and images."""

    @abstractmethod
    def referenced_records(self) -> set[RecordID]:
        """The records of all snapshots."""

    @abstractmethod
    def experiment(self, experiment_id: ExperimentID) -> list[Trajectory]:
        """The trajectories of an experiment, in the order they were forked. NotFound when there are none."""
