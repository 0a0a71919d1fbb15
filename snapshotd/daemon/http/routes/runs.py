"""Sandboxes and runs: start, follow, execute, stop, forget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from snapshotd.daemon.http import carrying, models, models_forks, streams
from snapshotd.daemon.http.attending import Lines, attend, until_gone
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import (
    Named,
    NamedDep,
    Ref,
    ServiceDep,
    checked_ref,
    new_router,
    once,
    once_unless_abandoned,
    step_once,
)
from snapshotd.daemon.http.wire import ATTENDED, FRAMES, LOG_MAX, PORTS, STDIN_WINDOW_BYTES, check_ref
from snapshotd.engine.base import Caller, Engine, ExecResult, Forked, OutputSink, Stream, output_event
from snapshotd.errors import SandboxFailed, UsageError
from snapshotd.types import Snapshot, Trajectory

router = new_router(dependencies=[Depends(checked_ref)])
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_EXEC_DOC = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": 'Lines: `{"event":"output","stream","data_b64"}` as it comes, at last '
        '`{"event":"result","exit_code","snapshot","call"}` or `{"event":"error","error":{"code","message"}}`.',
    }
}
_ATTENDED: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "content": {streams.NDJSON: {}},
            "description": 'As without `/attended`, and `{"event":"taken","bytes"}`: so much more of the input has gone to the command.',
        }
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {streams.NDJSON: {}},
            "description": "One JSON object per line, in chunks. The first is the body of the request without `/attended`. The others, in "
            'any order while the command runs: `{"event":"stdin","data_b64"}` '
            f"(at most {STDIN_WINDOW_BYTES} bytes that are not `taken`), "
            '`{"event":"stdin_end"}`, `{"event":"resize","rows","columns"}` (of its terminal), '
            '`{"event":"unread","stream"}` (nobody reads that stream any more: the command meets a broken pipe).',
        }
    },
}
_PORT_DOC: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "content": {FRAMES: {}},
            "description": "Bytes of the server, as they come, in frames. Frames with events: "
            '`{"event":"end"}` (the server sends no more), and last `{"event":"result"}` (both sides have ended). '
            "Without the last one the connection was cut: the server reset it, or the sandbox ended.",
        }
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {streams.BYTES: {}},
            "description": "Bytes for the server, in chunks, as they come. Their end is the end for the server, too; the answer goes on.",
        }
    },
}
PortNumber = Annotated[int, PathParameter(ge=1, le=65535, description="TCP port in the sandbox.")]
Stdin = Annotated[bool, Query(description="The command reads what the client sends; else its standard input is empty.")]
_EVENTS_DOC = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": "Lines: events `started`, `output`, `snapshot`, `warning`, `replayed` (a call was answered from the journal), "
        "`live` (a resumed program has reached the end of what is recorded), `approval` (a person is asked, or has decided), and last "
        "`finished` (or `error`: the stream failed).",
    }
}


@router.post("/sandboxes", status_code=201, tags=["runs"])
async def create(request: Request, body: models.CreateRequest, service: ServiceDep, named: NamedDep) -> models.Created:
    """Create a sandbox without an agent. It is stopped again when the client is gone before it has the answer."""
    engine = service.engine
    sandbox = replace(body.sandbox(), namespace_pid=client_pid(request))

    def recalled(made: tuple[str, ...]) -> tuple[Trajectory, Snapshot]:
        return engine.trajectory(made[0]), engine.log(made[0])[0]

    trajectory, snapshot = await once_unless_abandoned(
        request, service, named, body, lambda: engine.create(sandbox), recalled, lambda made: _stop(engine, made[0])
    )
    return models.Created(trajectory=models.Trajectory.of(trajectory), snapshot=models.Snapshot.of(snapshot))


@router.get("/sandboxes", tags=["runs"])
def sandboxes(service: ServiceDep) -> list[models.Sandbox]:
    """The live sandboxes."""
    return [models.Sandbox.of(info) for info in service.engine.sandboxes()]


@router.post("/runs", status_code=201, tags=["runs"])
async def run(
    request: Request, body: models.RunAgentRequest, service: ServiceDep, named: NamedDep
) -> models.Trajectory:
    """Start an agent; its events follow under /trajectories/{ref}/events. Stopped again when the client is gone before
    it has the answer, unless `detach`."""
    engine = service.engine
    asked = body.run()
    asked = replace(asked, sandbox=replace(asked.sandbox, namespace_pid=client_pid(request)))

    def undo(trajectory: Trajectory) -> None:
        if not body.detach:
            _stop(engine, trajectory)

    started = await once_unless_abandoned(
        request, service, named, body, lambda: engine.run(asked), lambda made: engine.trajectory(made[0]), undo
    )
    return models.Trajectory.of(started)


@router.get("/trajectories", tags=["trajectories"])
def trajectories(service: ServiceDep) -> list[models.Trajectory]:
    return [models.Trajectory.of(item) for item in service.engine.trajectories()]


@router.get("/trajectories/{ref}", tags=["trajectories"])
def trajectory(ref: Ref, service: ServiceDep) -> models.Trajectory:
    return models.Trajectory.of(service.engine.trajectory(ref))


@router.delete("/trajectories/{ref}", status_code=204, tags=["trajectories"])
def remove(ref: Ref, service: ServiceDep, force: Annotated[bool, Query()] = False) -> None:
    """Forget a trajectory and free what only it used. A tag or a snapshot is refused: it names one of them, not all."""
    service.engine.remove(ref, force=force)


@router.get("/trajectories/{ref}/log", response_model=list[models.Snapshot], tags=["trajectories"])
def log(ref: Ref, service: ServiceDep, last: Annotated[int | None, Query(ge=1, le=LOG_MAX)] = None) -> Response:
    """Its snapshots, oldest first; with `last`, only this number of the newest."""
    return streams.listed(models.Snapshot.of(item) for item in service.engine.log(ref, last))


@router.post("/trajectories/{ref}/stop", tags=["runs"])
def stop(ref: Ref, service: ServiceDep, discard: bool = False) -> models.Trajectory:
    """Take a last snapshot if anything changed and end the sandbox. `discard`: without one."""
    return models.Trajectory.of(service.engine.stop(ref, discard=discard))


@router.post("/trajectories/{ref}/snapshot", tags=["runs"])
def take_snapshot(ref: Ref, body: models.SnapshotRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Take a snapshot of a running sandbox as it is now. Processes in it run on. `Conflict`: it does not run, its
    program is being replayed, or the name is taken."""
    return step_once(
        service, named, body, lambda: service.engine.take_snapshot(ref, name=body.name, if_changed=body.if_changed)
    )


@router.get("/trajectories/{ref}/events", response_class=Response, responses=_EVENTS_DOC, tags=["runs"])  # type: ignore[arg-type]
async def events(ref: Ref, service: ServiceDep, follow: Annotated[bool, Query()] = True) -> Response:
    """The events of its run from the beginning; with `follow`, until it has finished."""
    return await streams.ndjson(
        service.streams,
        lambda emit: streams.each(emit, map(models.event_json, service.engine.events(ref, follow=follow))),
    )


@router.post("/trajectories/{ref}/exec", response_class=Response, responses=_EXEC_DOC, tags=["runs"])  # type: ignore[arg-type]
async def exec_in_trajectory(
    request: Request, ref: Ref, body: models.ExecRequest, service: ServiceDep, named: NamedDep
) -> Response:
    """Run a command as a tool call. It goes on, and its snapshot is taken, when the client goes away."""
    return await _exec(request, _in_trajectory(service.engine, body), ref, body, service, named)


@router.post("/trajectories/{ref}/exec" + ATTENDED, tags=["runs"], **_ATTENDED)
async def attended_exec_in_trajectory(
    request: Request, ref: Ref, service: ServiceDep, named: NamedDep, stdin: Stdin = False
) -> Response:
    """The same for a client that goes on to speak while the command runs."""
    lines = Lines(request)
    body = _body(await lines.first())
    return await _exec(request, _in_trajectory(service.engine, body), ref, body, service, named, stdin, lines)


@router.post("/snapshots/{ref}/exec", response_class=Response, responses=_EXEC_DOC, tags=["runs"])  # type: ignore[arg-type]
async def exec_in_snapshot(request: Request, ref: Ref, body: models.ExecRequest, service: ServiceDep) -> Response:
    """Run a command in a throw-away fork of a snapshot. It ends when the client goes away."""
    return await _exec(request, _in_snapshot(service.engine, body), ref, body, service, None)


@router.post("/snapshots/{ref}/exec" + ATTENDED, tags=["runs"], **_ATTENDED)
async def attended_exec_in_snapshot(request: Request, ref: Ref, service: ServiceDep, stdin: Stdin = False) -> Response:
    """The same for a client that goes on to speak while the command runs."""
    lines = Lines(request)
    body = _body(await lines.first())
    return await _exec(request, _in_snapshot(service.engine, body), ref, body, service, None, stdin, lines)


@router.post("/trajectories/{ref}" + PORTS + "{port}", tags=["runs"], **_PORT_DOC)
async def connect(request: Request, ref: Ref, port: PortNumber, service: ServiceDep) -> Response:
    """A connection to a server on the loopback of a running sandbox. It is cut when the client goes away."""
    return await carrying.carried(request, service.connections, lambda ended: service.engine.connect(ref, port, ended))


@router.post("/snapshots/{ref}/fork", status_code=201, tags=["runs"])
async def fork(
    request: Request, ref: Ref, body: models_forks.ForkRequest, service: ServiceDep, named: NamedDep
) -> models.ForkAnswer:
    """Start `n` new trajectories from one snapshot, all or none."""
    engine = service.engine
    args = None if body.args is None else tuple(body.args)
    models.check_argv(args or ())
    variants = tuple(item.variant() for item in body.variants)

    def recalled(made: tuple[str, ...]) -> Forked:
        forks = tuple(map(engine.trajectory, made))
        assert forks[0].experiment is not None
        return Forked(forks[0].experiment, forks)

    forked = await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.fork(
            ref,
            body.count,
            args=args,
            name=body.name,
            resume=body.resume,
            variants=variants,
            idle_timeout_s=body.idle_timeout_s,
            part=None if body.part is None else body.part.part(),
        ),
        recalled,
        lambda made: _stop(engine, *made.trajectories),
    )
    return models.ForkAnswer.of(forked)


def _body(line: bytes) -> models.ExecRequest:
    try:
        return models.ExecRequest.model_validate_json(line)
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc


def _in_trajectory(engine: Engine, body: models.ExecRequest) -> Callable[..., ExecResult]:
    head = None if body.if_head is None else check_ref(body.if_head)
    return functools.partial(engine.exec, expected_head=head, idle_timeout_s=body.idle_timeout_s)


def _in_snapshot(engine: Engine, body: models.ExecRequest) -> Callable[..., ExecResult]:
    if body.if_head is not None:
        raise UsageError("a throw-away fork has no head to compare with; leave out `if_head`, or name a trajectory")
    if body.idle_timeout_s is not None:
        raise UsageError("a throw-away fork ends with its command; leave out `idle_timeout_s`, or name a trajectory")
    return engine.exec_snapshot


async def _exec(
    request: Request,
    method: Callable[..., ExecResult],
    ref: str,
    body: models.ExecRequest,
    service: ServiceDep,
    named: Named | None,
    stdin: bool = False,
    lines: Lines | None = None,
) -> Response:
    """`named`: None for one that makes nothing."""
    argv = tuple(body.argv)
    models.check_argv(argv)
    env = models.environment(body.env)
    if body.terminal is not None and lines is None and not (named is not None and named.recall):
        raise UsageError("a terminal needs a client that attends to it; use the path that ends with `/attended`")
    size = None if body.terminal is None else (body.terminal.rows, body.terminal.columns)
    caller = Caller(gives_input=stdin, terminal=size)

    def produce(emit: streams.Emit) -> None:
        def sink(stream: Stream, data: bytes) -> None:
            emit(output_event(stream, data))  # False when the client is gone: the command goes on all the same

        caller.on_taken(lambda count: emit({"event": "taken", "bytes": count}))

        def execute() -> ExecResult:
            return method(
                ref, argv, cwd=body.cwd, env=env, user=body.user, sink=sink, caller=caller, timeout_s=body.timeout_s
            )

        def recalled(made: tuple[str, ...]) -> ExecResult:
            return _recorded(service.engine, made[0], sink)

        done = execute() if named is None else once(service, named, body, execute, recalled)
        snapshot = None if done.snapshot is None else models.Snapshot.of(done.snapshot)
        call = models.Tool.of(done.call)
        emit({"event": "result", "exit_code": done.exit_code, "snapshot": snapshot, "call": call})

    attending = until_gone(request, caller) if lines is None else attend(request, caller, lines)
    return await streams.ndjson(service.streams, produce, attend=attending)


def _recorded(engine: Engine, snapshot: str, sink: OutputSink) -> ExecResult:
    """A command that was executed, from its snapshot; what it has printed goes to `sink`. SandboxFailed as then."""
    taken = engine.snapshot(snapshot)
    for stream in STREAMS:
        for data in engine.output(taken.id, stream):
            sink(stream, data)
    if taken.call.exit_code is None:
        raise SandboxFailed(
            "the command has ended and its exit code is lost; its output and files are with its snapshot"
        )
    return ExecResult(taken.call.exit_code, taken, taken.call)


def _stop(engine: Engine, *trajectories: Trajectory) -> None:
    for item in trajectories:
        engine.stop(item.id)
