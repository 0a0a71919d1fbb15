"""Branching: compare forks, score them, find the call that broke something, run experiments."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path as PathParameter
from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.daemon.http import models_branching as words
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.attending import until_gone
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import NamedDep, ServiceDep, new_router, once
from snapshotd.daemon.http.wire import check_ref
from snapshotd.engine.branches import Attendance, SnapshotScores, Tried
from snapshotd.scores import ScoredRun
from snapshotd.terms import NAME_PATTERN

router = new_router(tags=["branching"])


def _lines_doc(lines: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {streams.NDJSON: {}}, "description": f'Lines: {lines} or `{{"event":"error","error"}}`.'}}


_SCORE_DOC = _lines_doc(
    '`{"event":"run","ref","snapshot","run":{"score","exit_code","seconds","tests","error"}}` as each ends, at last '
    '`{"event":"result","rows":[{"rank","ref","snapshot","score","standard_error","passes","pass_at","error","runs"}]}`, the '
    "highest first,"
)
_BISECT_DOC = _lines_doc(
    '`{"event":"tried","snapshot","round","outcome","exit_code"}` as each ends, at last '
    '`{"event":"result","first_bad","last_good","unknown","rounds","flaky"}`,'
)

_EVENTS_DOC = _lines_doc(
    '`{"event":"experiment",...}` with all members of the experiment as it is now, `{"event":"branch",...}` with those of a '
    'branch that has changed, `{"event":"alive"}` when nothing happened for a while, at last `{"event":"ended",...}` with the whole '
    "as it has ended,"
)
Name = Annotated[str, PathParameter(pattern=f"^{NAME_PATTERN.pattern}$", description="The experiment's name.")]


@router.post("/compare")
def compare(body: words.CompareRequest, service: ServiceDep) -> words.Comparison:
    """Trajectories or snapshots side by side: calls aligned from the last snapshot that all have, files, and how each
    came out."""
    return words.Comparison.of(service.engine.branching.compare(list(map(check_ref, body.refs))))


@router.post("/score", response_class=Response, responses=_SCORE_DOC)
async def score(request: Request, body: words.ScoreRequest, service: ServiceDep) -> Response:
    """Run a command in a throw-away fork of each snapshot, and rank them. It ends when the client goes away."""
    asked, attendance = body.request(), Attendance()

    def produce(emit: streams.Emit) -> None:
        def on_run(row: SnapshotScores, run: ScoredRun) -> None:
            streams.require(emit({"event": "run", **words.scored_json(row, run)}))

        rows = service.engine.branching.score(asked, attendance, on_run)
        emit({"event": "result", "rows": [words.row_json(row) for row in rows]})

    return await streams.ndjson(service.streams, produce, attend=until_gone(request, attendance))


@router.post("/bisect", response_class=Response, responses=_BISECT_DOC)
async def bisect(request: Request, body: words.BisectRequest, service: ServiceDep) -> Response:
    """Find the first snapshot at which a command fails, by runs in throw-away forks: exit code 0 passes, 125 cannot
    tell, everything else fails. It ends when the client goes away."""
    asked, attendance = body.request(), Attendance()

    def produce(emit: streams.Emit) -> None:
        def on_tried(tried: Tried) -> None:
            streams.require(emit({"event": "tried", **words.tried_json(tried)}))

        found = service.engine.branching.bisect(asked, attendance, on_tried)
        emit({"event": "result", **words.bisection_json(found)})

    return await streams.ndjson(service.streams, produce, attend=until_gone(request, attendance))


@router.post("/experiments", status_code=201)
def create_experiment(
    request: Request, body: words.ExperimentRequest, service: ServiceDep, named: NamedDep
) -> words.Experiment:
    """Begin an experiment. The daemon drives it until it ends, also after a restart. One that was stopped goes on when
    the same description is sent again; another description under the name is a `Conflict`."""
    branching, asked = service.engine.branching, body.request(client_pid(request))
    found = once(
        service, named, body, lambda: branching.create_experiment(asked), lambda made: branching.experiment(made[0])
    )
    return words.Experiment.of(found)


@router.get("/experiments")
def experiments(service: ServiceDep) -> list[words.Experiment]:
    """All experiments, in the order of their names."""
    return [words.Experiment.of(info) for info in service.engine.branching.experiments()]


@router.get("/experiments/{name}")
def experiment(name: Name, service: ServiceDep) -> words.Experiment:
    """An experiment as it is now."""
    return words.Experiment.of(service.engine.branching.experiment(name))


@router.get("/experiments/{name}/events", response_class=Response, responses=_EVENTS_DOC)
async def experiment_events(name: Name, service: ServiceDep) -> Response:
    """Follow an experiment until it has ended."""
    events = service.engine.branching.experiment_events
    return await streams.ndjson(service.streams, lambda emit: streams.each(emit, events(name)))


@router.post("/experiments/{name}/stop")
def stop_experiment(name: Name, service: ServiceDep) -> words.Experiment:
    """End it: branches that run are stopped, and no other begins."""
    return words.Experiment.of(service.engine.branching.stop_experiment(name))


@router.delete("/experiments/{name}", status_code=204)
def remove_experiment(name: Name, service: ServiceDep, force: Annotated[bool, Query()] = False) -> None:
    """Forget it with its branches. `force`: branches that run, too."""
    service.engine.branching.remove_experiment(name, force=force)
