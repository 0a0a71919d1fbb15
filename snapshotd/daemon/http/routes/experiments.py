"""Forks side by side: compare them, score them, find the call that broke something, run experiments."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.experiments import BisectRequest, ExperimentRequest, ScoreRequest, Tried
from snapshotd.api.record import Json
from snapshotd.api.trajectories import ForkQueueRequest, QueuedFork
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.attending import until_gone
from snapshotd.daemon.http.decoding import experiment_request, scorer, variant
from snapshotd.daemon.http.encoding import event, row_json, run_json
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import NamedDep, Ref, ServiceDep, handles, once
from snapshotd.engine.experiments.base import Attendance, SnapshotScores
from snapshotd.scores import ScoredRun
from snapshotd.terms import NAME_PATTERN

_ERROR = ' or `{"event":"error","error"}`.'
Name = Annotated[str, PathParameter(pattern=f"^{NAME_PATTERN.pattern}$", description="The experiment's name.")]


@handles(
    operations.FORK_QUEUE,
    'Lines: `{"event":"child","index","label","trajectory","error"}` as each ends, at last '
    f'`{{"event":"result","experiment","children"}}`,{_ERROR}',
)
async def fork_queue(request: Request, ref: Ref, body: ForkQueueRequest, service: ServiceDep) -> Response:
    """Fork a snapshot into more children than run at once: each runs its program to the end, then another begins. When the
    client goes away no other begins, and those that run go on."""
    variants, attendance = tuple(map(variant, body.variants)), Attendance()

    def produce(emit: streams.Emit) -> None:
        def on_child(child: QueuedFork) -> None:
            streams.require(emit(event("child", child)))

        emit(event("result", service.engine.experiments.fork_queue(ref, body, variants, attendance, on_child)))

    return await streams.ndjson(service.streams, produce, attend=until_gone(request, attendance))


@handles(
    operations.SCORE,
    'Lines: `{"event":"run","ref","snapshot","run":{"score","exit_code","seconds","tests","error"}}` as each ends, at last '
    '`{"event":"result","rows":[{"rank","ref","snapshot","score","standard_error","passes","pass_at","error","runs"}]}`, the '
    f"highest first,{_ERROR}",
)
async def score(request: Request, body: ScoreRequest, service: ServiceDep) -> Response:
    """Run a command in a throw-away fork of each snapshot, and rank them. It ends when the client goes away."""
    wanted, attendance = scorer(body), Attendance()

    def produce(emit: streams.Emit) -> None:
        def on_run(row: SnapshotScores, run: ScoredRun) -> None:
            streams.require(emit({"event": "run", **run_json(row, run)}))

        rows = service.engine.experiments.score(body, wanted, attendance, on_run)
        emit({"event": "result", "rows": list(map(row_json, rows))})

    return await streams.ndjson(service.streams, produce, attend=until_gone(request, attendance))


@handles(
    operations.BISECT,
    'Lines: `{"event":"tried","snapshot","round","outcome","exit_code"}` as each ends, at last '
    f'`{{"event":"result","first_bad","last_good","unknown","rounds","flaky"}}`,{_ERROR}',
)
async def bisect(request: Request, body: BisectRequest, service: ServiceDep) -> Response:
    """Find the first snapshot at which a command fails, by runs in throw-away forks: exit code 0 passes, 125 cannot
    tell, everything else fails. It ends when the client goes away."""
    attendance = Attendance()

    def produce(emit: streams.Emit) -> None:
        def on_tried(one: Tried) -> None:
            streams.require(emit(event("tried", one)))

        emit(event("result", service.engine.experiments.bisect(body, attendance, on_tried)))

    return await streams.ndjson(service.streams, produce, attend=until_gone(request, attendance))


@handles(operations.CREATE_EXPERIMENT)
def create_experiment(request: Request, body: ExperimentRequest, service: ServiceDep, named: NamedDep) -> Json:
    """Begin an experiment. The daemon drives it until it ends, also after a restart. One that was stopped goes on when
    the same description is sent again; another description under the name is a `Conflict`."""
    experiments, asked, pid = service.engine.experiments, experiment_request(body), client_pid(request)
    return once(
        service,
        named,
        body,
        lambda: experiments.create(asked, namespace_pid=pid),
        lambda made: experiments.get(made[0]),
    ).json()


@handles(
    operations.EXPERIMENT_EVENTS,
    'Lines: `{"event":"experiment",...}` with all members of the experiment as it is now, `{"event":"branch",...}` with those of a '
    'branch that has changed, `{"event":"alive"}` when nothing happened for a while, at last `{"event":"ended",...}` with the whole '
    f"as it has ended,{_ERROR}",
)
async def experiment_events(experiment: Name, service: ServiceDep) -> Response:
    """Follow an experiment until it has ended."""
    events = service.engine.experiments.events
    return await streams.ndjson(service.streams, lambda emit: streams.each(emit, events(experiment)))
