"""`Branching` over an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import Engine, Event
from snapshotd.engine.branches import (
    Attendance,
    Bisection,
    BisectRequest,
    Branching,
    Comparison,
    ExperimentRequest,
    ScoreRequest,
    SnapshotScores,
    Tried,
)
from snapshotd.engine.branching.bisecting import bisect
from snapshotd.engine.branching.comparing import compare
from snapshotd.engine.branching.experiments import Experiments
from snapshotd.engine.branching.scoring import score
from snapshotd.engine.secrecy import Secrecy
from snapshotd.scores import ExperimentInfo, ScoredRun


class LocalBranching(Branching):
    """See `branches.Branching`."""

    def __init__(self, engine: Engine, catalog: Catalog, secrecy: Secrecy) -> None:
        self._engine, self._experiments = engine, Experiments(engine, catalog, secrecy)

    def compare(self, refs: Sequence[str]) -> Comparison:
        return compare(self._engine, refs)

    def score(
        self, request: ScoreRequest, attendance: Attendance, on_run: Callable[[SnapshotScores, ScoredRun], object]
    ) -> tuple[SnapshotScores, ...]:
        return score(self._engine, request, attendance, on_run)

    def bisect(self, request: BisectRequest, attendance: Attendance, on_tried: Callable[[Tried], object]) -> Bisection:
        return bisect(self._engine, request, attendance, on_tried)

    def create_experiment(self, request: ExperimentRequest) -> ExperimentInfo:
        return self._experiments.create(request)

    def experiments(self) -> list[ExperimentInfo]:
        return self._experiments.infos()

    def experiment(self, name: str) -> ExperimentInfo:
        return self._experiments.info(name)

    def experiment_events(self, name: str) -> Iterator[Event]:
        return self._experiments.events(name)

    def stop_experiment(self, name: str) -> ExperimentInfo:
        return self._experiments.stop(name)

    def remove_experiment(self, name: str, *, force: bool = False) -> None:
        self._experiments.remove(name, force=force)

    def start(self) -> None:
        self._experiments.start()

    def close(self) -> None:
        self._experiments.close()
