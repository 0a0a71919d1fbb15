"""Commands in the background of a sandbox: start, list, follow, signal, write to."""

from __future__ import annotations

import base64
import binascii
import signal
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response

from snapshotd.daemon.http import models, models_commands, streams
from snapshotd.daemon.http.routes.shared import (
    NamedDep,
    Ref,
    ServiceDep,
    checked_ref,
    new_router,
    once_unless_abandoned,
)
from snapshotd.engine.base import CommandInfo
from snapshotd.errors import Conflict, SandboxFailed, UsageError
from snapshotd.types import CallStatus, short

router = new_router(dependencies=[Depends(checked_ref)], tags=["runs"])
CommandRef = Annotated[str, PathParameter(description="Unique prefix of the command's id.")]
_EVENTS_DOC = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": "Lines: events `started`, `output`, `warning`, and last `finished` with the command's `status`, `exit_code`, "
        "`snapshot` and `error` (or `error`: the stream failed).",
    }
}


@router.post("/trajectories/{ref}/commands", status_code=201)
async def start_command(
    request: Request, ref: Ref, body: models_commands.BackgroundRequest, service: ServiceDep, named: NamedDep
) -> models_commands.Command:
    """Run a command in the background, as a tool call whose snapshot is taken when it ends. It is killed when the client
    is gone before it has the answer."""
    engine = service.engine
    argv = tuple(body.argv)
    models.check_argv(argv)
    env = models.environment(body.env)

    def start() -> CommandInfo:
        return engine.runs.exec_in_background(
            ref,
            argv,
            cwd=body.cwd,
            env=env,
            user=body.user,
            stdin=body.stdin,
            timeout_s=body.timeout_s,
            idle_timeout_s=body.idle_timeout_s,
        )

    def undo(info: CommandInfo) -> None:
        try:
            engine.runs.signal_command(info.trajectory, info.id, signal.SIGKILL)
        except Conflict:
            pass  # it has ended by itself

    def recalled(made: tuple[str, ...]) -> CommandInfo:
        info = engine.runs.command(ref, made[0])
        if info.status is CallStatus.UNKNOWN:
            raise SandboxFailed(
                f"the command {short(info.id)} may have run: the daemon was killed while it started the command, or the sandbox "
                "was lost; look at the files before you start it again"
            )
        return info

    started = await once_unless_abandoned(request, service, named, body, start, recalled, undo)
    return models_commands.Command.of(started)


@router.get("/trajectories/{ref}/commands")
def commands(ref: Ref, service: ServiceDep) -> list[models_commands.Command]:
    """Its background commands: those that run, and the newest of those that have ended, oldest first."""
    return [models_commands.Command.of(info) for info in service.engine.runs.commands(ref)]


@router.get("/trajectories/{ref}/commands/{command}")
def command(ref: Ref, command: CommandRef, service: ServiceDep) -> models_commands.Command:
    return models_commands.Command.of(service.engine.runs.command(ref, command))


@router.get("/trajectories/{ref}/commands/{command}/events", response_class=Response, responses=_EVENTS_DOC)  # type: ignore[arg-type]
async def command_events(
    ref: Ref, command: CommandRef, service: ServiceDep, follow: Annotated[bool, Query()] = True
) -> Response:
    """The events of a command from the beginning; with `follow`, until it has finished."""
    engine = service.engine
    return await streams.ndjson(
        service.streams,
        lambda emit: streams.each(
            emit, map(models_commands.event_json, engine.runs.command_events(ref, command, follow=follow))
        ),
    )


@router.post("/trajectories/{ref}/commands/{command}/signal")
def signal_command(
    ref: Ref, command: CommandRef, body: models_commands.SignalRequest, service: ServiceDep
) -> models_commands.Command:
    """Send a signal to a command's process group; the one that kills, to all that it started."""
    return models_commands.Command.of(service.engine.runs.signal_command(ref, command, body.signal))


@router.post("/trajectories/{ref}/commands/{command}/stdin")
def write_command(
    ref: Ref, command: CommandRef, body: models_commands.WriteRequest, service: ServiceDep
) -> models_commands.WriteAnswer:
    """Write to a command's standard input. The answer may take some seconds if the command does not read."""
    try:
        data = base64.b64decode(body.data_b64, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"the data is not base64 ({exc}); encode its bytes") from exc
    return models_commands.WriteAnswer(bytes=service.engine.runs.write_command(ref, command, data, end=body.end))
