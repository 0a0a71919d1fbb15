"""Snapshots and files as resources: what a client attaches to a conversation without a tool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError

from snapshotd.api.record import encode
from snapshotd.errors import LimitExceeded, NotFound, SnapshotdError
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.reach import Reach

JSON = "application/json"
R = TypeVar("R")


def add_resources(server: MCPServer[Any], reach: Reach) -> None:
    """Add the list of sandboxes, a trajectory's history, a snapshot, and a file in one."""

    @server.resource("snapshotd://trajectories", title="Sandboxes", mime_type=JSON)
    async def trajectories() -> str:
        """All sandboxes, newest first."""
        return await _read_or_fail(lambda: _list_json(reach))

    @server.resource("snapshotd://trajectories/{trajectory}", title="The history of a sandbox", mime_type=JSON)
    async def history(trajectory: str) -> str:
        """Its newest 100 snapshots, oldest first."""

        async def text() -> str:
            info = await reach.trajectory(trajectory)
            return _json([answers.snapshot_of(one).model_dump() for one in await reach.client.log(info.id, last=100)])

        return await _read_or_fail(text)

    @server.resource("snapshotd://snapshots/{snapshot}", title="A snapshot", mime_type=JSON)
    async def one_snapshot(snapshot: str) -> str:
        """All that is recorded of a snapshot and its call."""

        async def text() -> str:
            return json.dumps(await reach.snapshot(snapshot), default=encode, indent=1)

        return await _read_or_fail(text)

    @server.resource("snapshotd://files/{snapshot}/{+path}", title="A file in a snapshot", mime_type="text/plain")
    async def file(snapshot: str, path: str) -> str | bytes:
        """A file of at most 1 MiB, by its path without the first slash. Text as it is, else as a blob."""

        async def content() -> str | bytes:
            info = await reach.snapshot(snapshot)
            pieces: AsyncIterator[bytes] = reach.client.read_file(info.id, f"/{path}")
            data, end = await answers.bytes_part(pieces, 0, answers.TEXT_MAX_BYTES)
            if end is not None:
                raise LimitExceeded(
                    f"/{path} has more than {answers.TEXT_MAX_BYTES} bytes; read it in parts with the tool `read_file`"
                )
            try:
                return data.decode()
            except UnicodeDecodeError:
                return data

        return await _read_or_fail(content)


async def _list_json(reach: Reach) -> str:
    return _json(
        [
            answers.TrajectoryAnswer.model_validate(info).model_dump()
            for info in (await reach.trajectories())[: answers.ITEMS]
        ]
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=1)


async def _read_or_fail(read: Callable[[], Awaitable[R]]) -> R:
    """Read the content of a resource. Errors become those of the protocol."""
    try:
        return await read()
    except NotFound as exc:
        raise ResourceNotFoundError(exc.message) from exc
    except SnapshotdError as exc:
        raise ResourceError(f"{exc.code}: {exc.message}") from exc
