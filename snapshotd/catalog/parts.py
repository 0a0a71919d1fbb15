"""Records of the catalog that are not the whole product's, and what it asks of other catalogs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from snapshotd.types import (
    JournalEntry,
    LayerID,
    Message,
    ModelUse,
    RecordID,
    SideEffect,
    Snapshot,
    SnapshotID,
    TrajectoryID,
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
