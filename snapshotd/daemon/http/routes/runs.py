"""Sandboxes and runs: start, follow, execute, stop, forget."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.commands import ExecRequest
from snapshotd.api.snapshots import LogQuery
from snapshotd.api.trajectories import CreatedInfo, CreateRequest, ForkRequest, RunAgentRequest
from snapshotd.api.wire import STDIN_WINDOW_BYTES, check_ref
from snapshotd.daemon.http import carrying, encoding, streams
from snapshotd.daemon.http.attending import Lines, attend, until_gone
from snapshotd.daemon.http.decoding import check, variant
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.problems import load_json
from snapshotd.daemon.http.routes.shared import Named, NamedDep, Ref, ServiceDep, handles, once, once_unless_abandoned
from snapshotd.engine import records
from snapshotd.engine.base import STREAMS, Caller, ExecResult, Forked, OutputSink, Stream, output_event
from snapshotd.engine.engine import Engine
from snapshotd.errors import SandboxFailed, UsageError
from snapshotd.types import Snapshot, Trajectory

_EXEC_SAYS = (
    'Lines: `{"event":"output","stream","data_b64"}` as it comes, at last '
    '`{"event":"result","exit_code","snapshot","call"}` or `{"event":"error","error":{"code","message"}}`.'
)
_ATTENDED_SAYS = (
    'As without `/attended`, and `{"event":"taken","bytes"}`: so much more of the input has gone to the command.'
)
_ATTENDED_TAKES = (
    "One JSON object per line, in chunks. The first is the body of the request without `/attended`. The others, in "
    'any order while the command runs: `{"event":"stdin","data_b64"}` '
    f"(at most {STDIN_WINDOW_BYTES} bytes that are not `taken`), "
    '`{"event":"stdin_end"}`, `{"event":"resize","rows","columns"}` (of its terminal), '
    '`{"event":"unread","stream"}` (nobody reads that stream any more: the command meets a broken pipe).'
)
_EXEC_REQUEST = TypeAdapter(ExecRequest)
PortNumber = Annotated[int, PathParameter(ge=1, le=65535, description="TCP port in the sandbox.")]
Stdin = Annotated[bool, Query(description="The command reads what the client sends; else its standard input is empty.")]


@handles(operations.CREATE)
async def create(request: Request, body: CreateRequest, service: ServiceDep, named: NamedDep) -> CreatedInfo:
    """Create a sandbox without an agent. It is stopped again when the client is gone before it has the answer."""
    engine = service.engine
    pid = client_pid(request)

    def recall(made: tuple[str, ...]) -> tuple[Trajectory, Snapshot]:
        return engine.snapshots.trajectory(made[0]), engine.snapshots.log(made[0])[0]

    trajectory, snapshot = await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.runs.create(body, namespace_pid=pid),
        recall,
        lambda made: _stop(engine, made[0]),
    )
    return CreatedInfo(records.trajectory(trajectory), records.snapshot(snapshot))


@handles(operations.RUN_AGENT)
async def run(request: Request, body: RunAgentRequest, service: ServiceDep, named: NamedDep) -> Trajectory:
    """Start an agent; its events follow under /trajectories/{ref}/events. Stopped again when the client is gone before
    it has the answer, unless `detach`."""
    engine = service.engine
    pid = client_pid(request)

    def undo(trajectory: Trajectory) -> None:
        if not body.detach:
            _stop(engine, trajectory)

    return await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.runs.run(body, namespace_pid=pid),
        lambda made: engine.snapshots.trajectory(made[0]),
        undo,
    )


@handles(operations.LOG)
def log(ref: Ref, query: LogQuery, service: ServiceDep) -> Response:
    """Its snapshots, oldest first; with `before`, only those whose `seq` is smaller; with `last`, only this number of the newest."""
    found = service.engine.snapshots.log(ref, query)
    return streams.answer_list(service.engine.snapshots.look_at(found))


@handles(
    operations.EVENTS,
    says="Lines: events `started`, `output`, `snapshot`, `warning`, `replayed` (a call was answered from the journal), "
    "`live` (a resumed program has reached the end of what is recorded), `approval` (a person is asked, or has decided), and last "
    "`finished` (or `error`: the stream failed).",
)
async def events(ref: Ref, service: ServiceDep, follow: Annotated[bool, Query()] = True) -> Response:
    """The events of its run from the beginning; with `follow`, until it has finished."""
    return await streams.ndjson(
        service.streams,
        lambda emit: streams.each(
            emit, map(encoding.run_event, service.engine.runs.events(ref, follow=follow and emit.is_heard))
        ),
    )


@handles(operations.EXEC, says=_EXEC_SAYS)
async def exec_in_trajectory(
    request: Request, ref: Ref, body: ExecRequest, service: ServiceDep, named: NamedDep
) -> Response:
    """Run a command as a tool call. It goes on, and its snapshot is taken, when the client goes away."""
    return await _exec(request, _in_trajectory(service.engine, body), ref, body, service, named)


@handles(operations.EXEC_ATTENDED, says=_ATTENDED_SAYS, takes=_ATTENDED_TAKES)
async def attended_exec_in_trajectory(
    request: Request, ref: Ref, service: ServiceDep, named: NamedDep, stdin: Stdin = False
) -> Response:
    """The same for a client that goes on to speak while the command runs."""
    lines = Lines(request)
    body = _body(await lines.first())
    return await _exec(request, _in_trajectory(service.engine, body), ref, body, service, named, stdin, lines)


@handles(operations.EXEC_SNAPSHOT, says=_EXEC_SAYS)
async def exec_in_snapshot(request: Request, ref: Ref, body: ExecRequest, service: ServiceDep) -> Response:
    """Run a command in a throw-away fork of a snapshot. It ends when the client goes away."""
    return await _exec(request, _in_snapshot(service.engine, body), ref, body, service, None)


@handles(operations.EXEC_SNAPSHOT_ATTENDED, says=_ATTENDED_SAYS, takes=_ATTENDED_TAKES)
async def attended_exec_in_snapshot(request: Request, ref: Ref, service: ServiceDep, stdin: Stdin = False) -> Response:
    """The same for a client that goes on to speak while the command runs."""
    lines = Lines(request)
    body = _body(await lines.first())
    return await _exec(request, _in_snapshot(service.engine, body), ref, body, service, None, stdin, lines)


@handles(
    operations.CONNECT,
    says="Bytes of the server, as they come, in frames. Frames with events: "
    '`{"event":"end"}` (the server sends no more), and last `{"event":"result"}` (both sides have ended). '
    "Without the last one the connection was cut: the server reset it, or the sandbox ended.",
    takes="Bytes for the server, in chunks, as they come. Their end is the end for the server, too; the answer goes on.",
)
async def connect(request: Request, ref: Ref, port: PortNumber, service: ServiceDep) -> Response:
    """A connection to a server on the loopback of a running sandbox. It is cut when the client goes away."""
    return await carrying.carry(
        request, service.connections, lambda ended: service.engine.runs.connect(ref, port, ended)
    )


@handles(operations.FORK)
async def fork(request: Request, ref: Ref, body: ForkRequest, service: ServiceDep, named: NamedDep) -> Forked:
    """Start `n` new trajectories from one snapshot, all or none."""
    engine = service.engine
    variants = tuple(map(variant, body.variants))

    def recall(made: tuple[str, ...]) -> Forked:
        forks = tuple(map(engine.snapshots.trajectory, made))
        assert forks[0].experiment is not None
        return Forked(forks[0].experiment, forks)

    return await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.branching.fork(ref, body, variants),
        recall,
        lambda made: _stop(engine, *made.trajectories),
    )


def _body(line: bytes) -> ExecRequest:
    try:
        load_json(line)
        body = _EXEC_REQUEST.validate_json(line)
    except json.JSONDecodeError as exc:
        detail = {"type": "json_invalid", "loc": ("body", exc.pos), "ctx": {"error": exc.msg}}
        raise RequestValidationError([detail]) from exc
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc
    check(body)
    return body


def _in_trajectory(engine: Engine, body: ExecRequest) -> Callable[..., ExecResult]:
    if body.if_head is not None:
        check_ref(body.if_head)
    return engine.runs.exec


def _in_snapshot(engine: Engine, body: ExecRequest) -> Callable[..., ExecResult]:
    if body.if_head is not None:
        raise UsageError("a throw-away fork has no head to compare with; leave out `if_head`, or name a trajectory")
    if body.idle_timeout_s is not None:
        raise UsageError("a throw-away fork ends with its command; leave out `idle_timeout_s`, or name a trajectory")
    return engine.runs.exec_snapshot


async def _exec(
    request: Request,
    method: Callable[..., ExecResult],
    ref: str,
    body: ExecRequest,
    service: ServiceDep,
    named: Named | None,
    stdin: bool = False,
    lines: Lines | None = None,
) -> Response:
    """`named`: None for one that makes nothing."""
    if body.terminal is not None and lines is None and not (named is not None and named.recall):
        raise UsageError("a terminal needs a client that attends to it; use the path that ends with `/attended`")
    size = None if body.terminal is None else (body.terminal.rows, body.terminal.columns)
    caller = Caller(gives_input=stdin, terminal=size)

    def produce(emit: streams.Emit) -> None:
        def sink(stream: Stream, data: bytes) -> None:
            emit(output_event(stream, data))  # False when the client is gone: the command goes on all the same

        caller.on_taken(lambda count: emit({"event": "taken", "bytes": count}))

        def execute() -> ExecResult:
            return method(ref, body, sink=sink, caller=caller)

        def recall(made: tuple[str, ...]) -> ExecResult:
            return _answer_again(service.engine, made[0], sink)

        done = execute() if named is None else once(service, named, body, execute, recall)
        emit(encoding.event("result", done))

    attending = until_gone(request, caller) if lines is None else attend(request, caller, lines)
    return await streams.ndjson(service.streams, produce, attend=attending)


def _answer_again(engine: Engine, snapshot: str, sink: OutputSink) -> ExecResult:
    """A command that was executed, from its snapshot; what it has printed goes to `sink`. SandboxFailed as then."""
    taken = engine.snapshots.get(snapshot)
    for stream in STREAMS:
        for data in engine.snapshots.output(taken.id, stream):
            sink(stream, data)
    if taken.call.exit_code is None:
        raise SandboxFailed(
            "the command has ended and its exit code is lost; its output and files are with its snapshot"
        )
    return ExecResult(taken.call.exit_code, taken, taken.call)


def _stop(engine: Engine, *trajectories: Trajectory) -> None:
    for item in trajectories:
        engine.runs.stop(item.id)
