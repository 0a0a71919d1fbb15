"""Comparisons, scores, bisections and experiments: each is made of the verbs of other services, and keeps their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import Event
from snapshotd.engine.experiments.base import (
    Attendance,
    Bisection,
    BisectRequest,
    Comparison,
    ExperimentRequest,
    ScoreRequest,
    SnapshotScores,
    Tried,
)
from snapshotd.engine.experiments.bisecting import bisect
from snapshotd.engine.experiments.comparing import compare
from snapshotd.engine.experiments.driven import Experiments
from snapshotd.engine.experiments.parts import Services
from snapshotd.engine.experiments.scoring import score
from snapshotd.engine.secrecy import Secrecy
from snapshotd.scores import ExperimentInfo, ScoredRun


class ExperimentService:
    """Thread-safe. `on_...` is called from several threads, and ends the work by raising."""

    def __init__(self, services: Services, catalog: Catalog, secrecy: Secrecy) -> None:
        self._services, self._experiments = services, Experiments(services, catalog, secrecy)

    def compare(self, refs: Sequence[str]) -> Comparison:
        """Two or more trajectories or snapshots, call by call from the last snapshot that all have, each against the
        first; and how each came out. UsageError: fewer than two. NotFound: one was removed meanwhile."""
        return compare(self._services, refs)

    def score(
        self, request: ScoreRequest, attendance: Attendance, on_run: Callable[[SnapshotScores, ScoredRun], object]
    ) -> tuple[SnapshotScores, ...]:
        """Run a command in a throw-away fork of each snapshot, and rank them. `on_run` is told of each run as it ends,
        with the row that it belongs to. A run without a score carries its error, and the rest goes on. UsageError before
        anything runs."""
        return score(self._services, request, attendance, on_run)

    def bisect(self, request: BisectRequest, attendance: Attendance, on_tried: Callable[[Tried], object]) -> Bisection:
        """The first snapshot of a line at which a command fails, by runs in throw-away forks. Exit code 0 passes, 125
        cannot tell, everything else fails. UsageError: the command fails at the good end, or passes at the bad one."""
        return bisect(self._services, request, attendance, on_tried)

    def create(self, request: ExperimentRequest) -> ExperimentInfo:
        """Begin an experiment, and return. It is driven until its branches have ended and are scored, or a stop rule
        holds; a daemon that starts goes on with it. One of the same name and description goes on if it was stopped; it is
        the answer in any case. A branch that cannot be forked, goes over its budget, or has no score carries its error,
        and the rest goes on. Secrets of variants are kept as those of trajectories are. Conflict: there is one of this
        name with another description, or its new sandbox's name belongs to another trajectory."""
        return self._experiments.create(request)

    def list(self) -> list[ExperimentInfo]:
        """In the order of their names."""
        return self._experiments.infos()

    def get(self, name: str) -> ExperimentInfo:
        """As it is now. NotFound; so do all that take `name`."""
        return self._experiments.info(name)

    def events(self, name: str) -> Iterator[Event]:
        """The whole `experiment` as it is now, each `branch` that changes from now on, and at last the whole as it has
        `ended` (that alone, if it has). `alive`: nothing has happened for some seconds. Without `ended` the daemon has
        ended."""
        return self._experiments.events(name)

    def stop(self, name: str) -> ExperimentInfo:
        """End it: branches that run are stopped, and no other begins. Returns when they have."""
        return self._experiments.stop(name)

    def remove(self, name: str, *, force: bool = False) -> None:
        """Forget it with its branches, and the sandbox that was made for it. Conflict: some run (unless `force`), or others
        were forked from them; nothing is changed then."""
        self._experiments.remove(name, force=force)

    def start(self) -> None:
        """Go on with the experiments of an earlier daemon."""
        self._experiments.start()

    def close(self) -> None:
        """Drive no experiment any more; branches run on. Idempotent."""
        self._experiments.close()
