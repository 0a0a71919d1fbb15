"""The verbs of experiments: variants run from one state, each several times, are scored and ranked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.client.branching.parts import client_of
from snapshotd.client.results import SnapshotInfo
from snapshotd.client.verbs import Verbs, Wait, on_this_machine
from snapshotd.errors import Conflict, NotFound

if TYPE_CHECKING:
    from snapshotd.client.branching.comparing import CompareInfo
    from snapshotd.client.branching.experiment_file import Experiment
    from snapshotd.client.branching.experiment_records import ExperimentBranch, ExperimentInfo


class Experiments(Verbs):
    """Part of `Snapshotd`. The daemon keeps what is known of an experiment; its branches are trajectories called
    EXPERIMENT.VARIANT.RUN."""

    _reconnect_s: float

    @on_this_machine
    def run_experiment(
        self, experiment: str | Path | Experiment, *, on_change: Callable[[ExperimentInfo], object] = lambda _: None
    ) -> ExperimentInfo:
        """Run an experiment, described by a TOML file, until its branches have ended and are scored, or a stop rule
        holds. `on_change` is told of each step, from several threads. When this process or the daemon goes away,
        branches run on, and the same call goes on with them; of an experiment that has ended it returns the outcome.

        A branch that cannot be forked, goes over its budget, or has no score carries its error, and the rest goes on.
        UsageError, with the line: the description is wrong. Conflict: there is another one of this name."""
        from snapshotd.client.branching.experiment_file import read_experiment
        from snapshotd.client.branching.experiments import run_experiment

        plan = read_experiment(experiment) if isinstance(experiment, str | Path) else experiment
        return run_experiment(client_of(self), plan, patience_s=self._reconnect_s, on_change=on_change)

    @on_this_machine
    def experiments(self) -> list[ExperimentInfo]:
        """All experiments, in the order of their names."""
        from snapshotd.client.branching.experiment_records import Records, names

        return [Records(client_of(self), name).info() for name in names(client_of(self))]

    @on_this_machine
    def experiment(self, name: str) -> ExperimentInfo:
        """An experiment as it is now. NotFound."""
        from snapshotd.client.branching.experiment_records import Records

        return Records(client_of(self), name).info()

    @on_this_machine
    def compare_experiment(self, name: str) -> CompareInfo:
        """The best branch of each variant, call by call, as `compare`; the best of all comes first."""
        info = self.experiment(name)
        best = [_best(info, variant.label) for variant in info.variants]
        return client_of(self).compare(
            *(one.trajectory for one in best if one is not None and one.trajectory is not None)
        )

    @on_this_machine
    def promote_experiment(
        self, name: str, branch: str | None = None, *, leave_behind: bool = False, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Make the best branch (or the one called `branch`, such as `cold.0`) the head of the trajectory that the
        experiment began from, as `promote`. Conflict: no branch passed, and none is named."""
        info = self.experiment(name)
        if branch is None:
            chosen = info.best
            if chosen is None or not chosen.passed:
                raise Conflict(f"no branch of {name} passed; name the one to promote")
        else:
            chosen = next((one for one in info.branches if f"{one.label}.{one.run}" == branch), None)
        if chosen is None or chosen.trajectory is None:
            raise NotFound(f"there is no branch {branch} of {name} that has begun")
        return client_of(self).promote(chosen.trajectory, leave_behind=leave_behind, wait=wait)

    @on_this_machine
    def stop_experiment(self, name: str) -> ExperimentInfo:
        """End an experiment: branches that run are stopped, and no other begins. Running it again goes on."""
        from snapshotd.client.branching.experiments import stop_experiment

        return stop_experiment(client_of(self), name)

    @on_this_machine
    def remove_experiment(self, name: str, *, force: bool = False) -> None:
        """Forget an experiment with its branches. Conflict: some run (unless `force`), or others were forked from
        them."""
        from snapshotd.client.branching.experiments import remove_experiment

        remove_experiment(client_of(self), name, force=force)


def _best(info: ExperimentInfo, label: str) -> ExperimentBranch | None:
    """The variant's branch to look at: the one to promote, else the first that has begun."""
    begun = [one for one in info.of(label) if one.trajectory is not None]
    return min(begun, key=lambda one: (not one.passed, -(one.score or 0.0), one.calls, one.seconds), default=None)
