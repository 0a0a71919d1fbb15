"""A terminal on a throw-away fork of a snapshot, over a WebSocket.

The page sends texts, each a JSON object: first `{"rows", "columns"}`, then `{"stdin": BASE64}` and `{"rows", "columns"}`
again when its size changes. It gets the terminal's output as bytes, and as texts `{"taken": BYTES}` (as much of the input
has gone to the shell), and last `{"exit_code": N}` or `{"error": SENTENCE}`. The fork ends with the connection.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from snapshotd.api.operations import EXEC_SNAPSHOT_ATTENDED
from snapshotd.client.transport import Conversation, Transport
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.terms import SHELL

MESSAGE_MAX_BYTES = 1 << 20
"""Largest message of the page: a window of input as base64 is smaller."""
_SIZE_MAX = 0xFFFF
"""As TerminalSize has it."""


async def serve_terminal(socket: WebSocket) -> None:
    """Run a shell until it, the fork or the connection ends."""
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        try:
            await _run_shell(socket)
        except SnapshotdError as exc:
            await _say(socket, {"error": exc.message})
        except ValueError:
            await _say(socket, {"error": "the page sent no size of its terminal; load it anew"})
        await socket.close()


async def _run_shell(socket: WebSocket) -> None:
    """Run a shell in a fork, and pass keys and output on. Errors of the daemon; ValueError: the page's first message is no
    size; WebSocketDisconnect."""
    transport: Transport = socket.app.state.transport
    request = {"argv": SHELL, "env": {"TERM": "xterm-256color"}, "terminal": _size(await socket.receive_json())}
    path = EXEC_SNAPSHOT_ATTENDED.to(socket.path_params["ref"])
    async with await transport.converse(path, request, query={"stdin": True}) as talk:
        typing = asyncio.create_task(_pass_keys(socket, talk))
        try:
            await _pass_output(socket, talk)
        finally:
            typing.cancel()
            await asyncio.wait([typing])


async def _pass_keys(socket: WebSocket, talk: Conversation) -> None:
    """Pass the page's messages on to the shell. The fork ends when the page goes away, or sends anything else."""
    try:
        while True:
            await talk.say(json.dumps(_event(await socket.receive_json())).encode())
    except (WebSocketDisconnect, UsageError, ValueError):
        talk.break_off()


async def _pass_output(socket: WebSocket, talk: Conversation) -> None:
    async for event in await talk.events():
        match event["event"]:
            case "output":
                await socket.send_bytes(base64.b64decode(event["data_b64"]))
            case "taken":
                await _say(socket, {"taken": event["bytes"]})
            case "result":
                await _say(socket, {"exit_code": event["exit_code"]})


def _event(message: Any) -> dict[str, Any]:
    """Return the daemon's event for a message of the page. UsageError: it is none."""
    match message:
        case {"stdin": str(text)}:
            try:
                base64.b64decode(text, validate=True)
            except binascii.Error:
                raise UsageError("the input is no base64") from None
            return {"event": "stdin", "data_b64": text}
        case {"rows": _, "columns": _}:
            return {"event": "resize", **_size(message)}
    raise UsageError("no such message")


def _size(message: Any) -> dict[str, int]:
    """Return the rows and columns that a message names. ValueError: it names none."""
    match message:
        case {"rows": int(rows), "columns": int(columns)} if 0 < rows <= _SIZE_MAX and 0 < columns <= _SIZE_MAX:
            return {"rows": rows, "columns": columns}
    raise ValueError("no size")


async def _say(socket: WebSocket, message: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(message))
