"""The driver of one experiment: it forks a branch, follows it to its end, scores it, records it, and begins the next.

All that it knows is recorded in the catalog, and agents run on without it. So the driver of a daemon that starts goes on:
it takes over branches that run, resumes those that were cut off, and begins the rest. A branch is a trajectory called
EXPERIMENT.VARIANT.RUN, so that one which was forked before that was recorded is found again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

from snapshotd.api.trajectories import ForkRequest
from snapshotd.at_once import at_once
from snapshotd.catalog.base import ExperimentTable
from snapshotd.engine.base import Event, ForkPlace, Variant
from snapshotd.engine.experiments.base import Attendance, ExperimentRequest
from snapshotd.engine.experiments.measuring import measure_end, measure_use
from snapshotd.engine.experiments.parts import Services, count_fitting, full_disk_named
from snapshotd.engine.experiments.scoring import Scoring
from snapshotd.errors import Conflict, NotFound, OutOfSpace, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.scores import FINAL, STOPPED, ExperimentBranch, ExperimentInfo, ScoredRun
from snapshotd.types import Experiment, Trajectory, TrajectoryStatus

ALIVE_S = 5.0
"""A follower hears that often that nothing has happened."""
_starting = threading.Semaphore(8)
"""Held while the sandbox of a branch starts, of any experiment. More at the same time would only queue for processors, and a
stop would have to wait for all of them."""
_LOOK_S = 1.0
"""How often budgets are looked at."""
_ROOM_S = 2.0
"""How often work is tried again for which the disk had no room."""
_RESUMES = 3
"""Times that a branch is resumed whose sandbox went away, before it counts as failed."""
_log = logging.getLogger(__name__)
_At = tuple[str, int]


class _LeftOff(Exception):  # noqa: N818 - not a failure: the next daemon goes on
    """The daemon ends, or the experiment has ended before the branch began."""


class Driver:
    """Drives one experiment, in a thread of its own and one for each branch at work. Several may follow it."""

    def __init__(
        self,
        services: Services,
        table: ExperimentTable,
        record: Experiment,
        request: ExperimentRequest,
        conceal: Callable[[str], str],
        on_settled: Callable[[], object],
    ) -> None:
        """`conceal`: for the errors of branches, which may quote secrets. `on_settled` is called when nothing of it is at
        work any more."""
        self._services, self._table, self._record, self._request = services, table, record, request
        self._changed = threading.Condition()
        self._known: dict[_At, ExperimentBranch] = {(one.label, one.run): one for one in table.branches(record.name)}
        self._changes: list[ExperimentBranch] = []
        self._ended = record.ended
        self._leaving, self.settled = threading.Event(), False
        self._attendance = Attendance()
        self._scoring = Scoring(services, request.scorer, self._attendance)
        self._conceal, self._on_settled = conceal, on_settled
        self._thread = threading.Thread(target=self._run, name="experiment", daemon=True)

    # -- for others ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the experiment: its branches are stopped. Returns when they have."""
        self._end(STOPPED)
        self._attendance.leave()
        self._thread.join()

    def close(self) -> None:
        """Leave off; branches run on. Returns when nothing of it is at work."""
        self._leaving.set()
        self._attendance.leave()
        self.wake()
        self._thread.join()

    def set_variants(self, variants: Iterable[Variant]) -> None:
        """Give branches that begin from now on these variants: the same ones with other values of secrets."""
        self._request = replace(self._request, variants=tuple(variants))

    def wake(self) -> None:
        """Look at the branches now, and not only after `_LOOK_S`."""
        with self._changed:
            self._changed.notify_all()

    def info(self) -> ExperimentInfo:
        with self._changed:
            return info_of(replace(self._record, ended=self._ended), self._known.values())

    def events(self) -> Iterator[Event]:
        """See `ExperimentService.events`."""
        with self._changed:
            at = len(self._changes)
        yield {"event": "experiment", **self.info().json()}
        while True:
            with self._changed:
                told = self._changed.wait_for(lambda at=at: len(self._changes) > at or self.settled, ALIVE_S)  # type: ignore[misc]
                new, settled = self._changes[at:], self.settled
            at += len(new)
            yield from ({"event": "branch", **one.json()} for one in new)
            if settled:
                if not self._leaving.is_set():
                    yield {"event": "ended", **self.info().json()}
                return
            if not told:
                yield {"event": "alive"}

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except _LeftOff:
            pass
        except SnapshotdError as exc:
            self._give_up(exc.message)
        except Exception as exc:  # noqa: BLE001 - the top of a thread
            _log.exception("an experiment could not go on")
            self._give_up(repr(exc))
        finally:
            with self._changed:
                self.settled = True
                self._changed.notify_all()
            self._on_settled()

    def _give_up(self, why: str) -> None:
        _log.error("an experiment could not go on", extra={"fields": {"experiment": self._record.name, "why": why}})
        try:
            self._end(f"{STOPPED}: {why}")
        except SnapshotdError:
            _log.exception("nor could that be recorded; the next daemon goes on with it")

    def _drive(self) -> None:
        self._with_room(self._apply_stop_rules)
        todo = [at for at, one in self._known.items() if one.state not in FINAL]
        if self._ended is None and todo:
            for _ in at_once(todo, self._parallel(), self._branch):
                pass
        if self._leaving.is_set():
            raise _LeftOff
        if self._ended is None:
            self._with_room(lambda: self._end("all branches have ended"))

    def _parallel(self) -> int:
        if self._request.parallel is not None:
            return self._request.parallel
        source = self._services.snapshots.trajectory(self._services.snapshots.get(self._record.snapshot).trajectory)
        return count_fitting(self._request.variants, source)

    # -- one branch ----------------------------------------------------------------------------------------------------

    def _branch(self, at: _At) -> None:
        if self._leaving.is_set() or self._ended is not None:
            return
        with contextlib.suppress(_LeftOff):
            self._with_room(lambda: self._save(at, self._try_branch(at)), at)
            self._with_room(self._apply_stop_rules)

    def _try_branch(self, at: _At) -> ExperimentBranch:
        """The branch as it has ended. Repeating it is safe: it goes on with what is there. OutOfSpace, _LeftOff."""
        try:
            return self._follow_to_end(at, replace(self._known[at], state="running", error=None))
        except OutOfSpace:
            raise
        except SnapshotdError as exc:
            if self._leaving.is_set():
                raise _LeftOff from exc
            return replace(self._known[at], state="failed", error=exc.message)

    def _with_room(self, work: Callable[[], object], at: _At | None = None) -> None:
        """Do some work, again and again until the disk has room for it. The branch `at` says so meanwhile. _LeftOff: the
        daemon or the experiment ends before."""
        while True:
            try:
                with full_disk_named():
                    work()
                return
            except OutOfSpace as exc:
                with self._changed:
                    if at is not None:
                        self._show(at, replace(self._known[at], error=f"it waits for room on the disk: {exc.message}"))
                    if self._changed.wait_for(lambda: self._leaving.is_set() or self._ended is not None, _ROOM_S):
                        if at is not None and self._known[at].state == "running" and not self._leaving.is_set():
                            with contextlib.suppress(OutOfSpace):
                                self._save(at, replace(self._known[at], state="stopped"))
                        raise _LeftOff from exc

    def _follow_to_end(self, at: _At, branch: ExperimentBranch) -> ExperimentBranch:
        for _ in range(_RESUMES + 1):
            with _starting:
                if self._leaving.is_set() or (self._ended is not None and self._known[at].state == "waiting"):
                    raise _LeftOff
                line = self._start_branch(at)
            hit("engine.experiment.forked")
            branch = replace(branch, trajectory=line.id)
            if self._known[at].trajectory != line.id or self._known[at].state != "running":
                self._save(at, branch)
            over = self._wait_until_over(at, line)
            line = self._services.snapshots.trajectory(line.id)
            if over is None and line.status is TrajectoryStatus.STOPPED and self._ended is not None:
                over = self._ended, False
            if line.status is not TrajectoryStatus.INTERRUPTED or over is not None:
                break
            self._check_room(line)
        branch = measure_end(self._services, self._request, branch, line, self._record.snapshot)
        why = self._over_budget(branch)
        if over is None and why is not None:
            over = why, True
        if over is not None:
            why, own = over
            return replace(branch, state="failed" if own else "stopped", error=why if own else None)
        if line.status not in (TrajectoryStatus.FINISHED, TrajectoryStatus.FAILED):
            return replace(branch, state="failed", error=f"its program did not end by itself: it is {line.status}")
        run = self._scoring.attempt(line.head)
        if self._attendance.gone:  # the command was ended, so what it said is no score
            if self._leaving.is_set():
                raise _LeftOff
            return replace(branch, state="stopped")
        hit("engine.experiment.scored")
        return _with_score(branch, run, line)

    def _check_room(self, line: Trajectory) -> None:
        """Raise OutOfSpace if the branch's run was interrupted because the disk was full."""
        full: str | None = None
        for event in self._services.runs.events(line.id, follow=False):
            if event["event"] == "started":  # again
                full = None
            elif event["event"] == "warning" and event.get("code") == OutOfSpace.__name__:
                full = event["message"]
        if full is not None:
            raise OutOfSpace(full)

    def _start_branch(self, at: _At) -> Trajectory:
        """The branch's trajectory with its program running, or ended. Repeating it is safe: the name is unique."""
        (label, run), record = at, self._record
        name = f"{record.name}.{label}.{run}"
        line = find_trajectory(self._services, name)
        if line is None:
            part = ForkPlace(record.id, list(self._known).index(at), len(self._known))
            request = self._request
            variant = replace(next(one for one in request.variants if one.label == label), name=name)
            asked = ForkRequest(args=request.args, resume=request.resume)
            (line,) = self._services.branching.fork(record.snapshot, asked, (variant,), part).trajectories
            return line
        if line.experiment != record.id and line.id != self._known[at].trajectory:
            raise name_taken(name)
        if line.status in (TrajectoryStatus.INTERRUPTED, TrajectoryStatus.STOPPED):
            return self._services.runs.resume(line.id)
        return line

    def _wait_until_over(self, at: _At, line: Trajectory) -> tuple[str, bool] | None:
        """Wait for the end of its program; stop it when a budget is used up or the experiment ends. Returns why it was
        stopped, and True if its own budget is the reason."""
        head = None
        while True:
            now = self._services.snapshots.trajectory(line.id)
            if now.status is not TrajectoryStatus.RUNNING:
                deque(self._services.runs.events(line.id, follow=True), 0)  # its sandbox has ended, too, then
                return None
            over = self._check_budgets(at, now, steps=now.head != head)
            head = now.head
            if over is not None:
                self._services.runs.stop(line.id)
                return over
            with self._changed:
                if self._leaving.is_set():
                    raise _LeftOff
                if self._ended is None:
                    self._changed.wait(_LOOK_S)

    # -- budgets and stop rules ----------------------------------------------------------------------------------------

    def _check_budgets(self, at: _At, line: Trajectory, *, steps: bool) -> tuple[str, bool] | None:
        """Apply the branch's budget and the stop rules, and return as `_wait_until_over`. `steps`: the branch has taken some since
        the last look."""
        request, branch = self._request, self._known[at]
        if request.budget.limited or request.stop.limited:
            if steps:
                tokens = request.prices != (0.0, 0.0) or bool(request.budget.tokens or request.stop.tokens)
                branch = measure_use(self._services, request, branch, line, tokens=tokens)
            branch = replace(branch, seconds=(time.time_ns() - line.created_at_ns) / 1e9)
            with self._changed:
                self._known[at] = branch
            why = self._over_budget(branch)
            if why is not None:
                return why, True
        self._apply_stop_rules()
        return None if self._ended is None else (self._ended, False)

    def _over_budget(self, branch: ExperimentBranch) -> str | None:
        limit = self._request.budget.find_exceeded(branch.seconds, branch.calls, sum(branch.tokens), branch.cost)
        return None if limit is None else f"it used more than its budget of {limit}"

    def _apply_stop_rules(self) -> None:
        """End the experiment if a stop rule says so."""
        if self._ended is not None:
            return
        with self._changed:
            found = list(self._known.values())
        why = self._request.why_ended(found, (time.time_ns() - self._record.began_at_ns) / 1e9)
        if why is not None:
            self._end(why)

    # -- records -------------------------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        with self._changed:
            if self._ended is None:
                self._table.set_ended(self._record.name, why)
                self._ended = why
            self._changed.notify_all()

    def _save(self, at: _At, branch: ExperimentBranch) -> None:
        if branch.error is not None:
            branch = replace(branch, error=self._conceal(branch.error))
        with self._changed:
            self._table.save(self._record.name, branch)
            self._show(at, branch)

    def _show(self, at: _At, branch: ExperimentBranch) -> None:
        """Tell followers, without a record. The caller holds `_changed`."""
        if branch != self._known[at]:
            self._known[at] = branch
            self._changes.append(branch)
            self._changed.notify_all()


def info_of(record: Experiment, branches: Iterable[ExperimentBranch]) -> ExperimentInfo:
    """An experiment for people. A branch that waits where no other begins is skipped."""
    ended = record.ended is not None
    shown = (replace(one, state="skipped") if ended and one.state == "waiting" else one for one in branches)
    seconds, rest = divmod(record.began_at_ns, 1_000_000_000)
    began_at = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1000:06d}Z"
    return ExperimentInfo(record.name, record.snapshot, began_at, record.ended, tuple(shown))


def _with_score(branch: ExperimentBranch, run: ScoredRun, line: Trajectory) -> ExperimentBranch:
    return replace(
        branch,
        state="scored" if run.error is None else "failed",
        error=run.error,
        score=run.score,
        passed=run.passed and not branch.protected,
        exit_code=line.exit_code,
    )


def find_trajectory(services: Services, name: str) -> Trajectory | None:
    """The trajectory of this very name. Conflict: something else is called so."""
    try:
        line = services.snapshots.trajectory(name)
    except NotFound:
        return None
    if line.name != name:
        raise name_taken(name)
    return line


def name_taken(name: str) -> Conflict:
    return Conflict(f"the name {name} belongs to another trajectory; give the experiment another `name`")
