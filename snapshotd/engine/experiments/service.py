"""Comparisons, scores, bisections and experiments: each is made of the verbs of other services, and keeps their rules. The
experiments of a state directory, and the drivers of those that have not ended."""

from __future__ import annotations

import base64
import builtins
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from snapshotd.api.experiments import Bisection, BisectRequest, CompareInfo, ScoreRequest, Tried
from snapshotd.api.record import ApiRecord, Json, encode, encode_given, without_defaults
from snapshotd.api.trajectories import (
    CreateRequest,
    ForkQueueRequest,
    QueuedFork,
    QueueInfo,
    RemoveQuery,
    SandboxFields,
)
from snapshotd.api.wire import check_ref
from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import Event, Variant
from snapshotd.engine.experiments.base import Attendance, Env, ExperimentRequest, Scorer, SnapshotScores
from snapshotd.engine.experiments.bisecting import bisect
from snapshotd.engine.experiments.comparing import compare
from snapshotd.engine.experiments.driving import Driver, find_trajectory, info_of, name_taken
from snapshotd.engine.experiments.earlier import adopt
from snapshotd.engine.experiments.parts import Services
from snapshotd.engine.experiments.queueing import fork_queue
from snapshotd.engine.experiments.scoring import check_scorer, digest_files, score
from snapshotd.engine.requests import present, without_key
from snapshotd.engine.runs.forks import check_name
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import Conflict, NotFound, SnapshotdError, UsageError
from snapshotd.scores import STOPPED, ExperimentBranch, ExperimentInfo, ScoredRun
from snapshotd.terms import number_of
from snapshotd.types import (
    Experiment,
    ExperimentID,
    Snapshot,
    SnapshotID,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter


BRANCHES_MAX = 10_000
_log = logging.getLogger(__name__)


class ExperimentService:
    """Thread-safe. `on_...` is called from several threads, and ends the work by raising. `start` it before the first
    request; `close` it before the engine."""

    def __init__(self, services: Services, catalog: Catalog, secrecy: Secrecy) -> None:
        self._services, self._catalog, self._secrecy = services, catalog, secrecy
        self._table = catalog.experiments
        self._drivers: dict[str, Driver] = {}
        self._lock = threading.Lock()
        """Guards `_drivers`."""
        self._changing = threading.Lock()
        """Held while an experiment is made or removed, which may take minutes."""
        self._closed = False
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Go on with the experiments of an earlier daemon."""
        adopt(self._catalog)
        for record in self._table.list():
            if record.ended is None and record.description is not None:
                try:
                    self._drive(record)
                except (SnapshotdError, ValueError) as exc:  # one that cannot be read keeps no daemon from starting
                    # The error of a value may quote it, and it may be a secret.
                    facts = {"experiment": record.name, "error": type(exc).__name__}
                    _log.error("an experiment cannot go on", extra={"fields": facts})
                    self._table.set_ended(record.name, f"{STOPPED}: its description cannot be read")

    def close(self) -> None:
        """Drive no experiment any more; branches run on. Idempotent."""
        with self._lock:
            self._closed = True
            drivers = list(self._drivers.values())
        for driver in drivers:
            driver.close()

    # -- verbs ------------------------------------------------------------------------------------------------------------

    def fork_queue(
        self,
        ref: str,
        request: ForkQueueRequest,
        variants: tuple[Variant, ...],
        attendance: Attendance,
        on_child: Callable[[QueuedFork], object],
    ) -> QueueInfo:
        """Fork a snapshot into more children than run at once: each runs its program to the end, then another begins.
        `on_child` is told of each that has ended. When one does not start, those that did are removed, and its error is
        raised, unless the request says to keep going. When the client goes away no other begins, and those that run go
        on. UsageError before anything starts."""
        return fork_queue(self._services, ref, request, variants, attendance, on_child)

    def compare(self, refs: Sequence[str]) -> CompareInfo:
        """Trajectories or snapshots side by side: calls aligned from the last snapshot that all have, files, and how each
        came out.

        Each is compared with the first. UsageError: fewer than two. NotFound: one was removed meanwhile."""
        return compare(self._services, list(map(check_ref, refs)))

    def score(
        self,
        request: ScoreRequest,
        scorer: Scorer,
        attendance: Attendance,
        on_run: Callable[[SnapshotScores, ScoredRun], object],
    ) -> tuple[SnapshotScores, ...]:
        """Run a command in a throw-away fork of each snapshot, and rank them. `on_run` is told of each run as it ends,
        with the row that it belongs to. A run without a score carries its error, and the rest goes on. UsageError before
        anything runs."""
        return score(self._services, request, scorer, attendance, on_run)

    def bisect(self, request: BisectRequest, attendance: Attendance, on_tried: Callable[[Tried], object]) -> Bisection:
        """The first snapshot of a line at which a command fails, by runs in throw-away forks. Exit code 0 passes, 125
        cannot tell, everything else fails. UsageError: the command fails at the good end, or passes at the bad one."""
        return bisect(self._services, request, attendance, on_tried)

    def create(self, request: ExperimentRequest, *, namespace_pid: int = 0) -> ExperimentInfo:
        """Begin an experiment, and return. It is driven until its branches have ended and are scored, or a stop rule
        holds; a daemon that starts goes on with it. One of the same name and description goes on if it was stopped; it is
        the answer in any case. A branch that cannot be forked, goes over its budget, or has no score carries its error,
        and the rest goes on. Secrets of variants are kept as those of trajectories are. Conflict: there is one of this
        name with another description, or its new sandbox's name belongs to another trajectory. `namespace_pid`: as
        `RunService.create`."""
        _check(request)
        digests = _digests(request)
        with self._changing:
            known = None
            with contextlib.suppress(NotFound):
                known = self._table.get(request.name)
            if known is None:
                self._begin(request, digests, namespace_pid)
            else:
                self._go_on(known, request, digests)
            return self.get(request.name)

    def list(self) -> builtins.list[ExperimentInfo]:
        """All experiments, in the order of their names."""
        return [self._info(record) for record in self._table.list()]

    def get(self, name: str) -> ExperimentInfo:
        """An experiment as it is now.

        NotFound; so do all that take `name`."""
        return self._info(self._table.get(name))

    def events(self, name: str) -> Iterator[Event]:
        """The whole `experiment` as it is now, each `branch` that changes from now on, and at last the whole as it has
        `ended` (that alone, if it has). `alive`: nothing has happened for some seconds. Without `ended` the daemon has
        ended."""
        record = self._table.get(name)
        driver = self._driver(name)
        return iter([{"event": "ended", **self._info(record).json()}]) if driver is None else driver.events()

    def stop(self, name: str) -> ExperimentInfo:
        """End it: branches that run are stopped, and no other begins.

        Returns when they have."""
        self._table.get(name)
        if (driver := self._driver(name)) is not None:
            driver.stop()
        return self.get(name)

    def remove(self, name: str, *, force: bool = False) -> None:
        """Forget it with its branches. `force`: branches that run, too.

        And the sandbox that was made for it. Conflict: some run (unless `force`), or others were forked from them; nothing is
        changed then."""
        with self._changing:
            record = self._table.get(name)
            own = self._trajectories(record)
            running = [line.shown_name for line in own if line.status is TrajectoryStatus.RUNNING]
            if (running or self._driver(name) is not None) and not force:
                raise Conflict(
                    f"{', '.join(running[:5]) or 'a branch'} of the experiment {name} runs: stop it first (`snapshotd experiment stop "
                    f"{name}`, or `snapshotd stop` for one that runs by itself), or remove all by force (`snapshotd experiment rm --force`)"
                )
            self._services.runs.check_removable(line.id for line in own)  # before anything ends that would stay
            self.stop(name)
            own = self._trajectories(record)  # some have begun meanwhile
            self._services.runs.check_removable(line.id for line in own)
            for line in own:
                self._services.runs.remove(line.id, RemoveQuery(force=force))
            self._table.remove(name)
            self._secrecy.forget(TrajectoryID(record.id))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _trajectories(self, record: Experiment) -> builtins.list[Trajectory]:
        """The experiment's branches, and the sandbox that was made for it, newest first. A trajectory that only has such a name
        is not among them."""
        known = {one.trajectory for one in self._table.branches(record.name)}
        found = self._services.snapshots.trajectories()[::-1]
        return [line for line in found if line.id in known or line.experiment == record.id]

    def _driver(self, name: str) -> Driver | None:
        """The experiment's driver, if it is at work."""
        with self._lock:
            driver = self._drivers.get(name)
            return None if driver is None or driver.settled else driver

    def _info(self, record: Experiment) -> ExperimentInfo:
        driver = self._driver(record.name)
        return info_of(record, self._table.branches(record.name)) if driver is None else driver.info()

    def _begin(self, request: ExperimentRequest, digests: Sequence[str], namespace_pid: int) -> None:
        # The same request has the same id, so that the sandbox is known which one that was cut off has made.
        identity, snapshot = self._source(
            request, [ExperimentID(one[: len(new_id())]) for one in digests], namespace_pid
        )
        record = Experiment(
            id=identity,
            name=request.name,
            snapshot=snapshot.id,
            began_at_ns=time.time_ns(),
            digest=digests[0],
            description=self._describe(identity, snapshot.id, request),
        )
        branches = [ExperimentBranch(*at) for at in request.branches()]
        self._table.add(record, branches, files=request.scorer.files, request=present())
        self._drive(record)

    def _go_on(self, known: Experiment, request: ExperimentRequest, digests: Sequence[str]) -> None:
        """Go on with an experiment that has the description of the request. Conflict: it has another description."""
        if known.description is None:
            same = {(one.label, one.run) for one in self._table.branches(known.name)} == set(request.branches())
        else:
            same = known.digest in digests
        if not same:
            raise Conflict(
                f"there is an experiment {known.name} with another description: give this one another `name`, or remove "
                f"that one (`snapshotd experiment rm {known.name}`)"
            )
        driver = self._driver(known.name)
        if known.ended is not None and not (known.ended.startswith(STOPPED) and driver is None):
            return
        # Its secrets, which the digest leaves out, may have other values now.
        described = self._describe(known.id, known.snapshot, request)
        self._table.describe(known.name, digests[0], described, request.scorer.files)
        if driver is not None:
            driver.set_variants(request.variants)
        else:
            self._table.set_ended(known.name, None)
            self._drive(self._table.get(known.name))

    def _drive(self, record: Experiment) -> None:
        described = self._secrecy.apart(TrajectoryID(record.id)).reveal(record.description)
        request = _codec().validate_json(json.dumps(described))
        scorer = replace(request.scorer, files=self._table.files(record.name))

        def let_go() -> None:
            with self._lock:
                if self._drivers.get(record.name) is driver:
                    del self._drivers[record.name]

        request = replace(request, scorer=scorer)
        driver = Driver(self._services, self._table, record, request, self._conceal_for(record, request), let_go)
        with self._lock:
            if self._closed:
                return
            self._drivers[record.name] = driver
            driver.start()
            if self._listener is None:
                args = (self._services.watch(),)
                self._listener = threading.Thread(target=self._listen, args=args, name="experiments", daemon=True)
                self._listener.start()

    def _listen(self, events: Iterator[dict[str, Any]]) -> None:
        """Drivers look at their branches when a program ends. The events end with the engine."""
        for event in events:
            if event["event"] in ("finished", "lost"):
                with self._lock:
                    drivers = [driver for driver in self._drivers.values() if not driver.settled]
                for driver in drivers:
                    driver.wake()

    def _conceal_for(self, record: Experiment, request: ExperimentRequest) -> Callable[[str], str]:
        """Conceals the secrets of all variants and of the source in an error that is recorded."""
        source = self._services.snapshots.get(record.snapshot).trajectory
        own = self._secrecy.apart(TrajectoryID(record.id), _secrets_of(request))
        inherited = self._secrecy.of(self._services.snapshots.trajectory(source))
        return lambda text: inherited.conceal_text(own.conceal_text(text))

    def _describe(self, identity: ExperimentID, source: SnapshotID, request: ExperimentRequest) -> Any:
        """A description as it is recorded, without secrets and the scorer's files."""
        bare = replace(request, source=source, scorer=replace(request.scorer, files=None))
        funnel = self._secrecy.apart(TrajectoryID(identity), _secrets_of(request))
        return funnel.conceal(_codec().dump_python(bare, mode="json"))

    def _source(
        self, request: ExperimentRequest, identities: Sequence[ExperimentID], namespace_pid: int
    ) -> tuple[ExperimentID, Snapshot]:
        """The experiment's id, and the snapshot that all branches begin at; of a new sandbox, its first. The id is the first
        of `identities`, or that of them which the sandbox has already."""
        identity = identities[0]
        if not isinstance(request.source, SandboxFields):
            return identity, self._services.snapshots.get(request.source)
        name = f"{request.name}.base"
        base = find_trajectory(self._services, name)
        if base is None:
            # The key of the request that is at work stands for the experiment, and not for the sandbox.
            with without_key():
                wanted = CreateRequest(**{**vars(request.source), "name": name})
                base, _ = self._services.runs.create(wanted, namespace_pid=namespace_pid, experiment=identity)
        elif base.experiment is None or base.experiment not in identities:
            raise name_taken(name)
        else:
            identity = base.experiment
        self._services.runs.stop(base.id)
        return identity, self._services.snapshots.log(base.id)[0]


def _secrets_of(request: ExperimentRequest) -> Env:
    """The secrets of all variants, each value once."""
    secrets: dict[str, str] = {}
    for name, value in {pair: None for one in request.variants for pair in one.secrets}:
        secrets[f"{name}-{len(secrets)}" if name in secrets else name] = value
    return tuple(secrets.items())


@cache
def _codec() -> TypeAdapter[ExperimentRequest]:
    from pydantic import TypeAdapter  # most daemons never need it

    return TypeAdapter(ExperimentRequest)


def _digests(request: ExperimentRequest) -> tuple[str, ...]:
    """The digest by which the same description is known again, and those that earlier versions made of it. They leave out
    secrets, because they are recorded, and the times of the scorer's files.

    Fields that have their defaults are left out, too, so that a later field changes no digest. In the earlier form they
    have to be those of then: it must not get new ones."""
    bare = replace(
        request,
        source=_without_secrets(request.source) if isinstance(request.source, SandboxFields) else request.source,
        variants=tuple(replace(one, secrets=tuple((name, "") for name, _ in one.secrets)) for one in request.variants),
        scorer=replace(request.scorer, files=digest_files(request.scorer.files)),
    )
    given = json.dumps(bare, default=_encode_given, sort_keys=True).encode()
    if isinstance(bare.source, SandboxFields):
        bare = replace(bare, source=json.dumps(bare.source, default=encode))
    return tuple(hashlib.sha256(one).hexdigest() for one in (given, _codec().dump_json(bare)))


def _encode_given(value: Any) -> Json | str:
    """The JSON of a dataclass or of bytes, without what has its default."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, ApiRecord):
        return encode_given(value)
    return without_defaults(value, {item.name: getattr(value, item.name) for item in fields(value)})


def _without_secrets(source: SandboxFields) -> SandboxFields:
    return replace(
        source,
        secrets=dict.fromkeys(source.secrets, ""),
        providers=tuple(replace(one, api_key=None) for one in source.providers),
    )


def _check(request: ExperimentRequest) -> None:
    """Check that a description makes sense. UsageError."""
    check_name(request.name)
    check_scorer(request.scorer)
    labels = [one.label for one in request.variants]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError("an experiment has one variant at least, and none of them twice")
    if len(labels) * request.repeat > BRANCHES_MAX:
        count = number_of(len(labels) * request.repeat, "branch")
        raise UsageError(f"{count} are more than {BRANCHES_MAX}; repeat fewer times")
    for label in labels:
        check_name(f"{request.name}.{label}.{request.repeat - 1}")
    if not (request.resume or request.args is not None or all(one.args is not None for one in request.variants)):
        raise UsageError("the branches have nothing to run: give arguments of a program, or let it resume")
    if request.prices == (0.0, 0.0) and (request.budget.cost is not None or request.stop.cost is not None):
        raise UsageError("a limit of cost needs prices of a million tokens, in and out")
