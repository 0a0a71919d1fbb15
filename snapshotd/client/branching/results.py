"""The client's results about what is done with forks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snapshotd.api.experiments import Bisection, Tried
from snapshotd.api.record import record
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.scores import ScoredRun, Scores


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
class BisectInfo(Bisection):
    """A bisection with the runs that it is known from, in the order in which they ended."""

    tried: tuple[Tried, ...] = ()

    def counts(self, snapshot: SnapshotInfo) -> tuple[int, int]:
        """How many runs at a snapshot passed, and how many there were."""
        runs = [one for one in self.tried if one.snapshot.id == snapshot.id]
        return sum(one.outcome == "good" for one in runs), len(runs)
