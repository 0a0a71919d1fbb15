"""The client's results about what is done with forks. See client/results.py for the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from snapshotd.client.records import record
from snapshotd.client.results import ApiRecord, ChangeInfo, Json, SnapshotInfo
from snapshotd.scores import ScoredRun, Scores

Difference = Literal["same", "arguments", "outcome", "left", "right"]
"""How two aligned calls differ. `left`, `right`: the call is only in the first, or only in the second."""
Outcome = Literal["good", "bad", "untestable"]


@record(frozen=True)
class AlignedCall(ApiRecord):
    """One row of an alignment. `number` counts calls from 1 at the beginning of both trajectories, on the first one's
    side (for a call that is only in the second, on its side)."""

    number: int
    difference: Difference
    left: SnapshotInfo | None
    right: SnapshotInfo | None


@record(frozen=True)
class BranchInfo(ApiRecord):
    """How one side came out. Calls, failures and times are those after the fork point; files compare its head with the
    fork point, or with its first snapshot where the sides have none in common. `seconds` begin at the fork point for the
    trajectory that went on from it, and for a fork when it was made. `tokens` (in, out) are of model calls that reported
    them."""

    ref: str
    head: SnapshotInfo
    name: str | None
    status: str
    exit_code: int | None
    calls: int
    failed: int
    seconds: float
    tokens: tuple[int, int]
    added: int
    changed: int
    deleted: int

    @classmethod
    def _more(cls, data: Json) -> Json:
        return {"calls": data["call_count"]}


@record(frozen=True)
class PairInfo(ApiRecord):
    """The second of two sides against the first one."""

    first_difference: AlignedCall | None
    calls: tuple[AlignedCall, ...]
    files: tuple[ChangeInfo, ...]

    @classmethod
    def _more(cls, data: Json) -> Json:
        return {"files": tuple(map(ChangeInfo.of, data["changes"]))}


@record(frozen=True)
class CompareInfo(ApiRecord):
    """`fork_point` is the last snapshot that all have; None where they have none in common. `pairs[i]` compares
    `branches[i + 1]` with `branches[0]`."""

    fork_point: SnapshotInfo | None
    branches: tuple[BranchInfo, ...]
    pairs: tuple[PairInfo, ...]


@dataclass(frozen=True, slots=True)
class ScoreInfo(Scores):
    """One selected snapshot. `rank` begins at 1, for the highest mean; equal means share a rank, and one without a
    score has none. `snapshot` is None where the ref names none."""

    ref: str
    snapshot: SnapshotInfo | None
    runs: tuple[ScoredRun, ...]
    rank: int | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScoreInfo:
        """From a row of the API; without its runs, from a run that has ended."""
        snapshot = None if data["snapshot"] is None else SnapshotInfo.of(data["snapshot"])
        return cls(data["ref"], snapshot, tuple(map(ScoredRun.from_json, data.get("runs", ()))), data.get("rank"))


@record(frozen=True)
class Tried(ApiRecord):
    """One run: where, which round (0: both ends, the last: the border again), how it ended."""

    snapshot: SnapshotInfo
    round: int
    outcome: Outcome
    exit_code: int


@record(frozen=True)
class BisectInfo(ApiRecord):
    """`first_bad` is the snapshot whose call broke it, `last_good` the one before which passed. `unknown` lie between
    them and could not be tested: the call of each may have broken it as well. `rounds` counts those of the search.
    `flaky`: the same snapshot passed in one run and failed in another, or a later one passed again."""

    first_bad: SnapshotInfo
    last_good: SnapshotInfo
    unknown: tuple[SnapshotInfo, ...]
    tried: tuple[Tried, ...]
    rounds: int
    flaky: bool

    def counts(self, snapshot: SnapshotInfo) -> tuple[int, int]:
        """How many runs at a snapshot passed, and how many there were."""
        runs = [one for one in self.tried if one.snapshot.id == snapshot.id]
        return sum(one.outcome == "good" for one in runs), len(runs)
