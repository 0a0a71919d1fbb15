"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/experiments.py`: change that one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.client.aio.apart import whole_verb
from snapshotd.client.aio.verbs import AsyncVerbs
from snapshotd.client.experiments import Experiments as ExperimentsOfThreads
from snapshotd.client.results import SnapshotInfo
from snapshotd.client.verbs import Wait

if TYPE_CHECKING:
    from snapshotd.client.branching.comparing import CompareInfo
    from snapshotd.client.branching.experiment_file import Experiment
    from snapshotd.client.branching.experiment_records import ExperimentInfo


class AsyncExperiments(AsyncVerbs):
    """Part of `AsyncSnapshotd`. The daemon keeps what is known of an experiment; its branches are trajectories called
    EXPERIMENT.VARIANT.RUN."""

    _reconnect_s: float

    async def run_experiment(
        self, experiment: str | Path | Experiment, *, on_change: Callable[[ExperimentInfo], object] = lambda _: None
    ) -> ExperimentInfo:
        """Run an experiment, described by a TOML file, until its branches have ended and are scored, or a stop rule
        holds. `on_change` is told of each step, from several threads. When this process or the daemon goes away,
        branches run on, and the same call goes on with them; of an experiment that has ended it returns the outcome.

        A branch that cannot be forked, goes over its budget, or has no score carries its error, and the rest goes on.
        UsageError, with the line: the description is wrong. Conflict: there is another one of this name."""
        return await whole_verb(self._transport, ExperimentsOfThreads.run_experiment, experiment, on_change=on_change)

    async def experiments(self) -> list[ExperimentInfo]:
        """All experiments, in the order of their names."""
        return await whole_verb(self._transport, ExperimentsOfThreads.experiments)

    async def experiment(self, name: str) -> ExperimentInfo:
        """An experiment as it is now. NotFound."""
        return await whole_verb(self._transport, ExperimentsOfThreads.experiment, name)

    async def compare_experiment(self, name: str) -> CompareInfo:
        """The best branch of each variant, call by call, as `compare`; the best of all comes first."""
        return await whole_verb(self._transport, ExperimentsOfThreads.compare_experiment, name)

    async def promote_experiment(
        self, name: str, branch: str | None = None, *, leave_behind: bool = False, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Make the best branch (or the one called `branch`, such as `cold.0`) the head of the trajectory that the
        experiment began from, as `promote`. Conflict: no branch passed, and none is named."""
        return await whole_verb(
            self._transport, ExperimentsOfThreads.promote_experiment, name, branch, leave_behind=leave_behind, wait=wait
        )

    async def stop_experiment(self, name: str) -> ExperimentInfo:
        """End an experiment: branches that run are stopped, and no other begins. Running it again goes on."""
        return await whole_verb(self._transport, ExperimentsOfThreads.stop_experiment, name)

    async def remove_experiment(self, name: str, *, force: bool = False) -> None:
        """Forget an experiment with its branches. Conflict: some run (unless `force`), or others were forked from
        them."""
        return await whole_verb(self._transport, ExperimentsOfThreads.remove_experiment, name, force=force)
