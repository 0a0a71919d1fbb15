"""Commands in the background of a sandbox: start, list, follow, signal, write to."""

from __future__ import annotations

import signal
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.commands import BackgroundRequest, InputInfo, InputRequest
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import data_bytes
from snapshotd.daemon.http.encoding import command_event
from snapshotd.daemon.http.routes.shared import CommandRef, NamedDep, Ref, ServiceDep, handles, once_unless_abandoned
from snapshotd.engine.base import CommandInfo
from snapshotd.errors import Conflict, SandboxFailed
from snapshotd.types import CallStatus, short

ServiceName = Annotated[str, PathParameter(max_length=64)]


@handles(operations.START_COMMAND)
async def start_command(
    request: Request, ref: Ref, body: BackgroundRequest, service: ServiceDep, named: NamedDep
) -> CommandInfo:
    """Run a command in the background, as a tool call whose snapshot is taken when it ends. It is killed when the client
    is gone before it has the answer. A `service` is ready when the answer comes, and a snapshot that declares it is taken:
    it is started again wherever a sandbox begins from a later one."""
    engine = service.engine

    def start() -> CommandInfo:
        return engine.runs.exec_in_background(ref, body)

    def undo(info: CommandInfo) -> None:
        if info.service is not None:
            engine.runs.remove_service(info.trajectory, info.service)
            return
        try:
            engine.runs.signal_command(info.trajectory, info.id, signal.SIGKILL)
        except Conflict:
            pass  # it has ended by itself

    def recall(made: tuple[str, ...]) -> CommandInfo:
        info = engine.runs.command(ref, made[0] if body.service is None else body.service.name)
        if body.service is None and info.status is CallStatus.UNKNOWN:
            raise SandboxFailed(
                f"the command {short(info.id)} may have run: the daemon was killed while it started the command, or the sandbox "
                "was lost; look at the files before you start it again"
            )
        return info

    return await once_unless_abandoned(request, service, named, body, start, recall, undo)


@handles(
    operations.COMMAND_EVENTS,
    says="Lines: events `started`, `output`, `warning`, and last `finished` with the command's `status`, `exit_code`, "
    "`snapshot` and `error` (or `error`: the stream failed).",
)
async def command_events(
    ref: Ref, command: CommandRef, service: ServiceDep, follow: Annotated[bool, Query()] = True
) -> Response:
    """The events of a command from the beginning; with `follow`, until it has finished."""
    engine = service.engine
    return await streams.ndjson(
        service.streams,
        lambda emit: streams.each(
            emit, map(command_event, engine.runs.command_events(ref, command, follow=follow and emit.is_heard))
        ),
    )


@handles(operations.WRITE_COMMAND)
def write_command(ref: Ref, command: CommandRef, body: InputRequest, service: ServiceDep) -> InputInfo:
    """Write to a command's standard input. The answer may take some seconds if the command does not read."""
    data = data_bytes(body.data_b64, "the data", "encode its bytes")
    return InputInfo(service.engine.runs.write_command(ref, command, data, end=body.end))
