"""The parts of a catalog that have an interface of their own. The text of `base.py` holds for their methods, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from snapshotd.scores import ExperimentBranch
from snapshotd.types import (
    Approval,
    ApprovalID,
    ApprovalStatus,
    CallID,
    CallStatus,
    Compensation,
    Experiment,
    Image,
    ImageID,
    JournalEntry,
    LayerID,
    Message,
    ModelUse,
    RecordID,
    RequestKey,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    StoredValue,
    Trajectory,
    TrajectoryID,
    TreeID,
)


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """Everything that is recorded with one snapshot. `messages`: the ones it added to the conversation that it
    continues, which it takes over up to `snapshot.messages - len(messages)`; `entries`: the journal entries it binds,
    in the order in which they began; `state`: None if it is the state of the snapshot that it continues."""

    snapshot: Snapshot
    messages: tuple[Message, ...] = ()
    record: RecordID | None = None
    entries: tuple[JournalEntry, ...] = ()
    state: dict[str, Any] | None = None


class OtherCatalogs(Protocol):
    """The other catalogs of a fleet, for refs of people."""

    def find(self, wanted: Literal["snapshot", "trajectory"], ref: str) -> bool:
        """Bring the thing that a ref means there into this catalog. False: it means nothing there. Ambiguous, Unavailable."""

    def refresh(self, trajectory: TrajectoryID) -> bool:
        """Bring what is new there of a trajectory: later snapshots, those without files, that it was removed. True: look again."""


class OtherRows(ABC):
    """Rows that come from another catalog of a fleet, or are to be another trajectory's."""

    @abstractmethod
    def look_up_in(self, catalogs: OtherCatalogs) -> None:
        """From now on, refs that mean nothing here are looked up there, too."""

    @abstractmethod
    def add_missing(
        self,
        images: Iterable[Image],
        trajectories: Sequence[Trajectory],
        snapshots: Iterable[SnapshotRow],
        approvals: Sequence[Approval] = (),
        compensations: Sequence[Compensation] = (),
    ) -> None:
        """Add those rows that are not here, all or none; so it can be repeated. The order is that of `Catalog.restore_rows`. A
        name or tag that is taken here is left out. A trajectory that is here gets the status, exit code, network and
        environment of the given one, and its head, unless that is an earlier snapshot. Approvals and compensations are as they
        are given afterwards."""

    @abstractmethod
    def choose_unneeded(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """Choose the ones of `snapshots` that are here, and whose files no tag, head, fork, beginning of a program or pending approval here
        needs, in the same order."""

    @abstractmethod
    def split_trajectory(self, trajectory_id: TrajectoryID, first: SnapshotID, side: TrajectoryID) -> None:
        """Make a new trajectory `side`, a nameless fork, of a trajectory's own snapshots from `first` on, with their
        conversation, journal, approvals and compensations. The rest is interrupted; where nothing is left, the trajectory itself
        becomes `side`. Not an error when that was done. NotFound."""


class ImageTable(ABC):
    """The images that sandboxes begin on."""

    @abstractmethod
    def add(self, image: Image) -> None:
        """Record an image. An older image of the same name loses its name to the new one (and is listed by id only,
        name "")."""

    @abstractmethod
    def list(self) -> list[Image]:
        """All images, newest first."""

    @abstractmethod
    def find(self, ref: str) -> Image:
        """By exact name, or unique id prefix (>= 4 characters). NotFound, Ambiguous."""

    @abstractmethod
    def remove(self, image_id: ImageID) -> None:
        """Forget an image. Conflict (naming one user) while a trajectory uses it; NotFound."""

    @abstractmethod
    def set_tree(self, image_id: ImageID, tree: TreeID) -> None:
        """Record that an image's files are in the repository. Not an error when it is gone."""


class RequestTable(ABC):
    """Requests with an idempotency key, and what each has made. A row is kept for a day."""

    @abstractmethod
    def add(self, request: RequestKey | None, made: Sequence[str]) -> None:
        """Record the ids of what a request has made, where that is not in the catalog. The catalog's methods with a
        parameter `request` do the same in their own transaction. None: the request has no key, and nothing is recorded."""

    @abstractmethod
    def find(self, request: RequestKey) -> tuple[str, ...] | None:
        """The ids of what the request has made (snapshots of a step or tag, trajectories, a command); None: nothing, or
        it was a day ago. Conflict: the key is another request's."""

    @abstractmethod
    def forget(self, request: RequestKey) -> None:
        """The request has made nothing that stays. Not an error when it is not recorded."""


class ApprovalTable(ABC):
    """Questions to a person, and the decisions. They go with their trajectory."""

    @abstractmethod
    def add(self, approval: Approval) -> None:
        """Conflict: the id exists. NotFound: its trajectory or snapshot."""

    @abstractmethod
    def list(self, status: ApprovalStatus | None = None, trajectory_id: TrajectoryID | None = None) -> list[Approval]:
        """Oldest first."""

    @abstractmethod
    def find(self, ref: str) -> Approval:
        """By unique id prefix (>= 4 characters), of a trajectory that the present tenant sees. NotFound, Ambiguous."""

    @abstractmethod
    def of_entry(self, trajectory_id: TrajectoryID, entry_id: CallID) -> Approval | None:
        """The latest approval that was asked for a call of a trajectory."""

    @abstractmethod
    def decide(
        self,
        approval_id: ApprovalID,
        status: ApprovalStatus,
        *,
        at_ns: int,
        by: str | None,
        reason: str | None,
        edited: tuple[Any] | None = None,
    ) -> Approval:
        """Pending becomes `status`. Conflict: it was decided already (the message says how and by whom). NotFound."""

    @abstractmethod
    def move(self, approval_id: ApprovalID, entry_id: CallID) -> None:
        """The same question is asked again by a resumed program, under another call."""


class Compensations(ABC):
    """Compensations of irreversible calls, at most one each. A compensation goes with its trajectory; that of an
    ancestor's call stays with the call, and belongs to the ancestor from then on."""

    @abstractmethod
    def begin(self, compensation: Compensation) -> None:
        """Conflict: the call has one already, with any outcome."""

    @abstractmethod
    def end(
        self, entry_id: CallID, status: CallStatus, *, at_ns: int, exit_code: int | None, error: str | None
    ) -> None:
        """NotFound: none is open."""

    @abstractmethod
    def forget(self, entry_id: CallID) -> None:
        """The open one has done nothing, so another may begin. NotFound: none is open."""

    @abstractmethod
    def get(self, entry_id: CallID) -> Compensation | None: ...

    @abstractmethod
    def of_trajectory(self, trajectory_id: TrajectoryID) -> list[Compensation]:
        """All of a trajectory."""


class KeyValues(ABC):
    """The key-value store across trajectories: outlives runs, and every trajectory. Versions of a key begin at 1 and
    only grow, also across deletion. An expired value reads as if it were not there, and `sweep` removes it."""

    @abstractmethod
    def put(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        now_ns: int,
        expires_at_ns: int | None = None,
        expected_version: int | None = None,
        request: str | None = None,
    ) -> StoredValue:
        """A new version. `expected_version` 0: the key must not exist; else the version it must have. Conflict (naming
        the version). `request`, here and below: the caller's name for this change. The caller repeats it when it does
        not know if the change was made; a change that was made is not made again, and gets the same answer."""

    @abstractmethod
    def get(self, tenant: str, namespace: str, key: str, *, now_ns: int, version: int | None = None) -> StoredValue:
        """NotFound."""

    @abstractmethod
    def delete(
        self,
        tenant: str,
        namespace: str,
        key: str,
        *,
        now_ns: int,
        expected_version: int | None = None,
        request: str | None = None,
    ) -> None:
        """Recorded as a version. NotFound, Conflict."""

    @abstractmethod
    def search(
        self,
        tenant: str,
        namespace: str,
        *,
        now_ns: int,
        prefix: str = "",
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[StoredValue]:
        """The newest versions in order of their keys: keys that begin with `prefix` and come behind `after`, in
        `namespace` and those below it ("a" has "a/b" below it). `where`: fields (dotted paths) of the value that must
        equal these JSON scalars."""

    @abstractmethod
    def history(self, tenant: str, namespace: str, key: str) -> list[StoredValue]:
        """All versions that are kept, newest first; empty if there are none."""

    @abstractmethod
    def sweep(self, *, now_ns: int, keep_versions: int) -> int:
        """Remove expired values, and versions of a key beyond the newest `keep_versions`. Returns their number."""


class ExperimentTable(ABC):
    """Experiments, and one record for each of their branches. They outlive trajectories and snapshots that they name.
    NotFound: there is no experiment of a name."""

    @abstractmethod
    def add(
        self,
        experiment: Experiment,
        branches: Sequence[ExperimentBranch],
        *,
        files: bytes | None = None,
        request: RequestKey | None = None,
    ) -> None:
        """Record a new one with all its branches, in the order in which they begin, as what `request` has made. Conflict:
        there is one of this name."""

    @abstractmethod
    def list(self) -> Sequence[Experiment]:
        """All that the present tenant sees, in the order of their names."""

    @abstractmethod
    def get(self, name: str) -> Experiment:
        """NotFound also where the present tenant does not see the snapshot that it began from. The other methods look at
        no tenant."""

    @abstractmethod
    def files(self, name: str) -> bytes | None:
        """The scorer's files."""

    @abstractmethod
    def branches(self, name: str) -> Sequence[ExperimentBranch]:
        """In the order in which they begin."""

    @abstractmethod
    def describe(self, name: str, digest: str, description: Any, files: bytes | None) -> None:
        """Record the description anew: of one that came from an earlier version, or whose secrets have other values."""

    @abstractmethod
    def set_ended(self, name: str, why: str | None) -> None:
        """Record why no other branch begins; None: some may again."""

    @abstractmethod
    def save(self, name: str, branch: ExperimentBranch) -> None:
        """Record a branch anew. NotFound: the experiment has none of its label and run."""

    @abstractmethod
    def of_trajectory(self, trajectory_id: TrajectoryID) -> tuple[str, ExperimentBranch] | None:
        """The name of the experiment that a trajectory is a branch of, and that branch."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget it with its branches' records."""


@dataclass(frozen=True, slots=True)
class TrajectoryTotals:
    """A trajectory's own snapshots added up. `newest`: the one taken last. `file_bytes`: content of the files that they added
    or changed, as far as it is counted. `layers`: those that they added, which need not be on disk."""

    snapshots: int
    newest: SnapshotID
    file_bytes: int
    layers: Sequence[LayerID]
    model: ModelUse


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The part of a snapshot that its journal entries tell. `side_effect`: of its call; None if that is in no journal.
    `sub_agent`: the one that made the call; None if the agent itself did. `model`: the model calls before it."""

    side_effect: SideEffect | None = None
    sub_agent: str | None = None
    model: ModelUse | None = None


class NumberedSnapshot(NamedTuple):
    """A snapshot and the number of its row. A later one has a greater number; where the newest are removed, their numbers are
    given again."""

    pk: int
    id: SnapshotID
    trajectory: TrajectoryID
    seq: int


class Figures(ABC):
    """Reads over many rows: lists, sums, counts. Each method reads in pages, so that a step never waits for more than one page."""

    @abstractmethod
    def totals(self, only: TrajectoryID | None = None) -> dict[TrajectoryID, TrajectoryTotals]:
        """Every trajectory that has snapshots of its own, or one. Cost: the snapshots that came since the last call, since the
        sums are kept in memory."""

    @abstractmethod
    def facts(self, snapshot_ids: Sequence[SnapshotID]) -> dict[SnapshotID, CallFacts]:
        """The facts of snapshots. One that has none, or does not exist, is left out."""

    @abstractmethod
    def rows(self, after: int, limit: int) -> list[NumberedSnapshot]:
        """The first snapshots in rows above `after`."""

    @abstractmethod
    def states(self) -> Mapping[SnapshotState, int]:
        """Number of snapshots in each state, also 0."""
