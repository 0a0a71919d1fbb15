"""The verbs of experiments: variants run from one state, each several times, are scored and ranked."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshotd.api import operations
from snapshotd.api.history import PromoteRequest
from snapshotd.api.record import replace
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.client.local.arguments import wrong
from snapshotd.client.twofold import closing, verb
from snapshotd.client.verbs.base import VerbPart, Wait
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound

if TYPE_CHECKING:
    from snapshotd.api.experiments import CompareInfo
    from snapshotd.client.branching.experiment_file import Experiment
    from snapshotd.scores import ExperimentInfo

_AGAIN_S = 0.5


class ExperimentVerbs(VerbPart):
    """Part of `Snapshotd`. The daemon drives experiments, and keeps what is known of them; their branches are trajectories
    called EXPERIMENT.VARIANT.RUN."""

    @verb
    async def create_experiment(self, experiment: str | Path | Experiment) -> ExperimentInfo:
        """Begin an experiment, described by a TOML file, and return. The daemon runs it until its branches have ended and
        are scored, or a stop rule holds, also after a restart. With the description of an experiment
        that was stopped, that experiment goes on.

        A branch that cannot be forked, goes over its budget, or has no score carries its error, and the rest goes on.
        UsageError, with the line: the description is wrong. LimitExceeded: its files are too large. Conflict: there is
        another one of this name."""
        from snapshotd.client.branching.experiment_file import Experiment, read_experiment

        if not isinstance(experiment, str | Path | Experiment):
            raise wrong("experiment", experiment, "the path of a TOML file, or an Experiment")
        plan = experiment if isinstance(experiment, Experiment) else read_experiment(experiment)
        body = plan.request()
        if isinstance(body["source"], dict):
            self._check_paths(body["source"])
        return _info(await self._transport.request(*operations.CREATE_EXPERIMENT.at(), body=body, once=True))

    @verb
    async def follow_experiment(
        self, name: str, *, on_change: Callable[[ExperimentInfo], object] = lambda _: None
    ) -> ExperimentInfo:
        """Wait until an experiment has ended. `on_change` is told how it stands, first and after each step. When the
        daemon goes away, the next one is followed; DaemonUnavailable when for SNAPSHOTD_RECONNECT_S seconds none
        answers. NotFound."""
        deadline = None
        info: ExperimentInfo | None = None
        while True:
            try:
                async with closing(await self._transport.lines(*operations.EXPERIMENT_EVENTS.at(name))) as events:
                    async for event in events:
                        deadline = None
                        if event["event"] == "alive":
                            continue
                        info = _apply_event(info, event)
                        on_change(info)
                        if event["event"] == "ended":
                            return info
                lost = DaemonUnavailable(f"the daemon has ended; the next one goes on with the experiment {name}")
            except DaemonUnavailable as exc:
                lost = exc
            deadline = deadline or time.monotonic() + self._reconnect_s
            if time.monotonic() >= deadline:
                raise lost
            await self._transport.links.pause(_AGAIN_S)

    @verb
    async def run_experiment(
        self, experiment: str | Path | Experiment, *, on_change: Callable[[ExperimentInfo], object] = lambda _: None
    ) -> ExperimentInfo:
        """As `create_experiment`, and wait until it has ended, as `follow_experiment`. It runs on without this process; the
        same call follows it again, and of one that has ended it returns the outcome."""
        return await self.follow_experiment((await self.create_experiment(experiment)).name, on_change=on_change)

    @verb
    async def experiments(self) -> list[ExperimentInfo]:
        """All experiments, in the order of their names."""
        return [_info(item) for item in await self._transport.request(*operations.EXPERIMENTS.at())]

    @verb
    async def experiment(self, name: str) -> ExperimentInfo:
        """An experiment as it is now. NotFound."""
        return _info(await self._transport.request(*operations.EXPERIMENT.at(name)))

    @verb
    async def compare_experiment(self, name: str) -> CompareInfo:
        """The best branch of each variant, call by call, as `compare`; the best of all comes first."""
        info = await self.experiment(name)
        best = [info.best_of(variant.label) for variant in info.variants]
        refs = [one.trajectory for one in best if one is not None and one.trajectory is not None]
        return await self._transport.call(operations.COMPARE, body={"refs": refs})

    @verb
    async def promote_experiment(
        self, name: str, branch: str | None = None, *, leave_behind: bool = False, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Make the best branch (or the one called `branch`, such as `cold.0`) the head of the trajectory that the
        experiment began from, as `promote`. Conflict: no branch passed, and none is named."""
        info = await self.experiment(name)
        if branch is None:
            chosen = info.best
            if chosen is None:
                raise Conflict(f"no branch of {name} has a score, so none is the best; name the one to promote")
            if not chosen.passed:
                raise Conflict(f"no branch of {name} passed; name the one to promote (the best is {chosen.called})")
        else:
            chosen = next((one for one in info.branches if one.called == branch), None)
            if chosen is None:
                raise NotFound(
                    f"{name} has no branch {branch}; its branches are called VARIANT.RUN, as its status lists them"
                )
        if chosen.trajectory is None:
            raise Conflict(f"the branch {chosen.called} of {name} has not begun, so there is nothing to promote")
        return await self._step(operations.PROMOTE, chosen.trajectory, PromoteRequest(leave_behind=leave_behind), wait)

    @verb
    async def stop_experiment(self, name: str) -> ExperimentInfo:
        """End an experiment: branches that run are stopped, and no other begins. Running it again goes on."""
        return _info(await self._transport.request(*operations.STOP_EXPERIMENT.at(name)))

    @verb
    async def remove_experiment(self, name: str, *, force: bool = False) -> None:
        """Forget an experiment with its branches. Conflict: some run (unless `force`), or others were forked from
        them."""
        query = {"force": force or None}
        await self._transport.call(operations.REMOVE_EXPERIMENT, name, query=query)


def _info(data: Any) -> ExperimentInfo:
    from snapshotd.scores import ExperimentInfo  # only then: they are for few

    return ExperimentInfo.from_json(data)


def _apply_event(info: ExperimentInfo | None, event: dict[str, Any]) -> ExperimentInfo:
    """An experiment after one of its events."""
    from snapshotd.scores import ExperimentBranch

    if info is None or event["event"] != "branch":
        return _info(event)
    branch = ExperimentBranch.from_json(event)
    at = (branch.label, branch.run)
    branches = tuple(branch if (one.label, one.run) == at else one for one in info.branches)
    return replace(info, branches=branches)
