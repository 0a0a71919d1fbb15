"""Experiments: variants run from one state, each several times, are scored and ranked.

The command that runs an experiment drives it: it forks a branch, follows it to its end, scores it, records it, and begins
the next. All that it knows is recorded at the daemon (experiment_records.py), and agents run on without it. So after a
crash of the command, the daemon or the machine the same command goes on: it takes over branches that run, resumes those
that were cut off, and begins the rest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from snapshotd.client.branching.comparing import is_call, tokens_of
from snapshotd.client.branching.experiment_file import Experiment, Spending
from snapshotd.client.branching.experiment_records import FINAL, ExperimentBranch, ExperimentInfo, Records
from snapshotd.client.branching.queueing import fitting, memory_needed
from snapshotd.client.branching.scoring import SCORER_PATH, ScoredRun, Scorer, archived, at_once
from snapshotd.client.branching.variant_tables import keywords
from snapshotd.client.results import SnapshotInfo, TrajectoryInfo
from snapshotd.client.verbs import ForkPlace
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, SnapshotdError
from snapshotd.terms import number_of

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

P = ParamSpec("P")
R = TypeVar("R")
STOPPED = "it was stopped"
_LOOK_S = 1.0
_RESUMES = 3
"""Times that a branch is resumed whose sandbox went away, before it counts as failed."""
_AGAIN_S = 0.5
_PROTECTED_SHOWN = 20
_WORKSPACE = "/workspace/"


def run_experiment(
    client: Snapshotd, experiment: Experiment, *, patience_s: float, on_change: Callable[[ExperimentInfo], object]
) -> ExperimentInfo:
    """See `Snapshotd.run_experiment`."""
    for label, table in experiment.variants.items():
        keywords(
            label, dict(table), experiment.folder
        )  # a file or a secret that is missing is said before anything starts
    rule = experiment.score
    folder = None if rule.files is None else Path(experiment.folder, rule.files)
    with archived(folder) as archive:
        records = _begun(client, experiment)
        return _Driver(client, experiment, records, archive, patience_s, on_change).run()


def _begun(client: Snapshotd, experiment: Experiment) -> Records:
    """Its records; of one that was stopped, to go on with. Conflict: the name belongs to another description."""
    records = Records(client, experiment.name)
    try:
        head = records.head()
    except NotFound:
        snapshot = _source(client, experiment)
        records.begin(experiment, snapshot.id, datetime.now(UTC).isoformat())
        return records
    if head["digest"] != experiment.digest:
        raise Conflict(
            f"there is an experiment {experiment.name} with another description: give this one another `name`, or remove "
            f"that one (`snapshotd experiment rm {experiment.name}`)"
        )
    if head["ended"] == STOPPED:
        records.set_ended(None)
    return records


def _source(client: Snapshotd, experiment: Experiment) -> SnapshotInfo:
    """The snapshot that all branches begin at; of a new sandbox, its first."""
    if isinstance(experiment.source, str):
        return client.snapshot(experiment.source)
    name = f"{experiment.name}.base"
    fields = dict(experiment.source)
    if "workspace" in fields:
        fields["workspace"] = Path(experiment.folder, fields["workspace"])
    try:
        base = client.trajectory(name)
    except NotFound:
        base, _ = client.create(name=name, **fields)
    if base.name != name or base.forked_from is not None:
        raise Conflict(f"the name {name} belongs to another trajectory; give the experiment another `name`")
    client.stop(base.id)
    return client.log(base.id)[0]


class _Driver:
    """One command that runs an experiment. Several may run the same one: branches are forked once, as their names are
    unique."""

    def __init__(
        self,
        client: Snapshotd,
        experiment: Experiment,
        records: Records,
        archive: Path | None,
        patience_s: float,
        on_change: Callable[[ExperimentInfo], object],
    ) -> None:
        self._client, self._experiment, self._records, self._archive = client, experiment, records, archive
        self._patience_s, self._on_change = patience_s, on_change
        self._lock = threading.Lock()
        self._info = records.info()
        self._known = {(one.label, one.run): one for one in self._info.branches}
        self._ended = self._info.ended
        self._order = {at: index for index, at in enumerate(experiment.branches())}
        rule = experiment.score
        where = None if rule.files is None else rule.at or SCORER_PATH
        options = {"env": dict(rule.env), "timeout": rule.timeout}
        self._scorer = Scorer(rule.command, rule.kind == "number", rule.report, where, options)

    def run(self) -> ExperimentInfo:
        self._rule()
        todo = [at for at, one in self._known.items() if one.state not in FINAL]
        if self._ended is None and todo:
            for _ in at_once(todo, self._parallel(), self._branch):
                pass
        if self._ended is None and all(one.state in FINAL for one in self._known.values()):
            self._end("all branches have ended")
        return self._records.info()

    def _parallel(self) -> int:
        if self._experiment.parallel is not None:
            return self._experiment.parallel
        source = self._client.trajectory(self._client.snapshot(self._info.snapshot).trajectory)
        return fitting(self._client, memory_needed(source, self._experiment.variants))

    # -- one branch ----------------------------------------------------------------------------------------------------

    def _branch(self, at: tuple[str, int]) -> None:
        if self._has_ended() is not None:
            return
        branch = replace(self._known[at], state="running", error=None)
        try:
            branch = self._ran(at, branch)
        except SnapshotdError as exc:
            if isinstance(exc, DaemonUnavailable):
                raise
            branch = replace(branch, state="failed", error=exc.message)
        self._save(at, branch)
        self._rule()

    def _ran(self, at: tuple[str, int], branch: ExperimentBranch) -> ExperimentBranch:
        for _ in range(_RESUMES + 1):
            line = self._patient(self._started, at)
            branch = replace(branch, trajectory=line.id)
            if self._known[at].trajectory != line.id or self._known[at].state != "running":
                self._save(at, branch)
            over = self._followed(at, line)
            line = self._patient(self._client.trajectory, line.id)
            if over is None and line.status == "stopped" and (ended := self._has_ended()) is not None:
                over = ended, False
            if line.status != "interrupted" or over is not None:
                break
        branch = self._patient(self._measured, branch, line)
        why = self._over_budget(branch)
        if over is None and why is not None:
            over = why, True
        if over is not None:
            why, own = over
            return replace(branch, state="failed" if own else "stopped", error=why if own else None)
        if line.status not in ("finished", "failed"):
            return replace(branch, state="failed", error=f"its program did not end by itself: it is {line.status}")
        run = self._patient(self._scorer.attempt, self._client, line.head, self._archive)
        return self._scored(branch, run, line)

    def _scored(self, branch: ExperimentBranch, run: ScoredRun, line: TrajectoryInfo) -> ExperimentBranch:
        return replace(
            branch,
            state="scored" if run.error is None else "failed",
            error=run.error,
            score=run.score,
            passed=run.passed and not branch.protected,
            exit_code=line.exit_code,
        )

    def _started(self, at: tuple[str, int]) -> TrajectoryInfo:
        """The branch's trajectory with its program running, or ended. Repeating it is safe: the name is unique."""
        label, run = at
        experiment, name = self._experiment, f"{self._experiment.name}.{label}.{run}"
        try:
            line = self._client.trajectory(name)
        except NotFound:
            own = {**keywords(label, dict(experiment.variants[label]), experiment.folder), "name": name}
            (line,) = self._client.fork(
                self._info.snapshot,
                args=experiment.program,
                resume=experiment.resume,
                variants={label: own},
                part=ForkPlace(_experiment_id(self._info), self._order[at], len(self._order)),
            ).trajectories
            return line
        if line.name != name or line.forked_from != self._info.snapshot:
            raise Conflict(f"the name {name} belongs to another trajectory; give the experiment another `name`")
        if line.status in ("interrupted", "stopped"):
            return self._client.resume(line.id)
        return line

    def _followed(self, at: tuple[str, int], line: TrajectoryInfo) -> tuple[str, bool] | None:
        """Wait for the end of its program; stop it when a budget is used up or the experiment ends. Returns why it was
        stopped, and True if its own budget is the reason."""
        over: list[tuple[str, bool]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                with contextlib.suppress(DaemonUnavailable, NotFound):  # the events end, too, or the next look tells
                    why = self._over(at, line)
                    if why is not None:
                        over.append(why)
                        self._client.stop(line.id)
                        return

        watcher = threading.Thread(target=watch, name="experiment-watch", daemon=True)
        watcher.start()
        try:
            for _ in self._client.events(line.id):
                pass
        finally:
            done.set()
            watcher.join()
        return over[0] if over else None

    # -- budgets and stop rules ----------------------------------------------------------------------------------------

    def _over(self, at: tuple[str, int], line: TrajectoryInfo) -> tuple[str, bool] | None:
        experiment = self._experiment
        if experiment.budget.limited or experiment.stop.limited:
            branch = self._used(self._known[at], line)
            with self._lock:
                self._known[at] = branch
            why = self._over_budget(branch)
            if why is not None:
                return why, True
        self._rule()
        ended = self._has_ended()
        return None if ended is None else (ended, False)

    def _has_ended(self) -> str | None:
        """The reason why the experiment has ended, also by another command."""
        if self._ended is None:
            self._ended = self._patient(self._records.head)["ended"]
        return self._ended

    def _over_budget(self, branch: ExperimentBranch) -> str | None:
        used = branch.seconds, branch.calls, sum(branch.tokens), branch.cost
        limit = _exceeded(self._experiment.budget, *used)
        return None if limit is None else f"it used more than its budget of {limit}"

    def _rule(self) -> None:
        """End the experiment if a stop rule says so."""
        if self._ended is not None:
            return
        experiment, found = self._experiment, list(self._known.values())
        why: str | None = None
        if experiment.first_pass and (passed := next((one for one in found if one.passed), None)) is not None:
            why = f"{passed.label}.{passed.run} passed"
        elif experiment.best_of is not None and sum(one.state == "scored" for one in found) >= experiment.best_of:
            why = f"{number_of(experiment.best_of, 'branch')} scored"
        elif experiment.stop.limited:
            seconds = _since(self._info.began_at)
            calls, tokens = sum(one.calls for one in found), sum(sum(one.tokens) for one in found)
            limit = _exceeded(experiment.stop, seconds, calls, tokens, sum(one.cost for one in found))
            why = None if limit is None else f"more than {limit} were used"
        if why is not None:
            self._end(why)

    def _end(self, why: str) -> None:
        self._ended = why
        self._patient(self._records.set_ended, why)
        self._tell()

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _used(self, branch: ExperimentBranch, line: TrajectoryInfo) -> ExperimentBranch:
        own = self._client.log(line.id)
        experiment = self._experiment
        tokens = (0, 0)
        if experiment.prices != (0.0, 0.0) or experiment.budget.tokens or experiment.stop.tokens:
            tokens = tokens_of(self._client, self._client.snapshot(line.id), {one.id for one in own})
        return replace(
            branch,
            seconds=_since(line.created_at),
            calls=sum(is_call(one) for one in own),
            tokens=tokens,
            cost=sum(count * price for count, price in zip(tokens, experiment.prices, strict=True)) / 1e6,
        )

    def _measured(self, branch: ExperimentBranch, line: TrajectoryInfo) -> ExperimentBranch:
        """All that is said of a branch beside its score."""
        client, source = self._client, self._info.snapshot
        own = client.log(line.id)
        head = client.snapshot(line.head)
        tokens = tokens_of(client, head, {one.id for one in own})
        files = outside = 0
        protected: list[str] = []
        for change in client.diff(source, line.head) if line.head != source else ():
            inside = change.path.startswith(_WORKSPACE)
            files, outside = files + inside, outside + (not inside)
            if len(protected) < _PROTECTED_SHOWN and any(
                _below(change.path, one) for one in self._experiment.protected
            ):
                protected.append(change.path)
        prices = self._experiment.prices
        return replace(
            branch,
            seconds=_between(line.created_at, head.created_at) if own else 0.0,
            calls=sum(is_call(one) for one in own),
            tokens=tokens,
            cost=sum(count * price for count, price in zip(tokens, prices, strict=True)) / 1e6,
            files=files,
            lines=_lines(client, source, line.head) if files else 0,
            outside=outside,
            protected=tuple(protected),
        )

    # -- records -------------------------------------------------------------------------------------------------------

    def _save(self, at: tuple[str, int], branch: ExperimentBranch) -> None:
        with self._lock:
            self._known[at] = branch
        self._patient(self._records.save, branch)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            self._info = replace(self._info, ended=self._ended, branches=tuple(self._known.values()))
            info = self._info
        self._on_change(info)

    def _patient(self, ask: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The answer, of the next daemon if this one goes away meanwhile."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return ask(*args, **kwargs)
            except DaemonUnavailable:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_AGAIN_S)


def stop_experiment(client: Snapshotd, name: str) -> ExperimentInfo:
    """See `Snapshotd.stop_experiment`."""
    records = Records(client, name)
    info = records.info()
    if info.ended is None:
        records.set_ended(STOPPED)
    for branch in info.branches:
        if branch.state == "running" and branch.trajectory is not None:
            with contextlib.suppress(NotFound):
                client.stop(branch.trajectory)
            records.save(replace(branch, state="stopped"))
    return records.info()


def remove_experiment(client: Snapshotd, name: str, *, force: bool) -> None:
    """See `Snapshotd.remove_experiment`."""
    records = Records(client, name)
    info = records.info()
    lines = [line for line in client.trajectories() if line.name is not None and line.name.startswith(f"{name}.")]
    own = {f"{name}.{one.label}.{one.run}" for one in info.branches} | {f"{name}.base"}
    if not force and any(line.status == "running" for line in lines if line.name in own):
        raise Conflict(
            f"branches of {name} run; stop it first (`snapshotd experiment stop {name}`), or remove it by force "
            "(`snapshotd experiment rm --force`)"
        )
    for line in sorted((line for line in lines if line.name in own), key=lambda line: line.created_at, reverse=True):
        client.remove(line.id, force=force)
    records.forget()


def _experiment_id(info: ExperimentInfo) -> str:
    """The same for all branches, also of another command: it begins with the snapshot's and ends with the time's."""
    return (info.snapshot[:20] + f"{int(datetime.fromisoformat(info.began_at).timestamp()):012x}")[:32]


def _exceeded(budget: Spending, seconds: float, calls: int, tokens: int, cost: float) -> str | None:
    for limit, used, unit in (
        (budget.seconds, seconds, "seconds"),
        (budget.calls, calls, "calls"),
        (budget.tokens, tokens, "tokens"),
        (budget.cost, cost, "of cost"),
    ):
        if limit is not None and used > limit:
            return f"{limit:g} {unit}"
    return None


def _since(iso: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(iso)).total_seconds()


def _between(began: str, ended: str) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


def _below(path: str, folder: str) -> bool:
    folder = "/" + folder.strip("/")
    return path == folder or path.startswith(folder + "/")


def _lines(client: Snapshotd, a: str, b: str) -> int:
    """Lines of the patch that are added or removed."""
    count, rest = 0, b""

    def add(data: bytes) -> None:
        nonlocal count, rest
        *lines, rest = (rest + data).split(b"\n")
        count += sum(line[:1] in (b"+", b"-") and line[:4] not in (b"+++ ", b"--- ") for line in lines)

    client.patch(a, b, write=add)
    return count
