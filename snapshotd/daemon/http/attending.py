"""The client's part while its command runs: the input that it sends, the output streams that it has stopped reading,
and its presence."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request

from snapshotd.api.commands import TerminalSize
from snapshotd.api.wire import BODY_MAX_BYTES, STDIN_WINDOW_BYTES
from snapshotd.engine.base import Caller
from snapshotd.errors import LimitExceeded, UsageError

log = logging.getLogger("snapshotd.daemon")
_SIZE = TypeAdapter(TerminalSize)


class Leaving(Protocol):
    """Work for a client."""

    def leave(self) -> None:
        """The client is gone."""


class Lines:
    """A request's body, line by line, as it comes."""

    def __init__(self, request: Request) -> None:
        self._pieces = request.stream()
        self._rest = b""

    async def first(self) -> bytes:
        """The first line. UsageError, LimitExceeded."""
        async for line in self.rest():
            return line
        raise UsageError("the request has no line; the first says what to execute")

    async def rest(self) -> AsyncIterator[bytes]:
        """The other lines, until the body ends. ClientDisconnect, LimitExceeded."""
        while True:
            line, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest = rest
                yield line
                continue
            if len(line) > BODY_MAX_BYTES:
                raise LimitExceeded(
                    f"a line of the request is longer than {BODY_MAX_BYTES >> 20} MiB; put long arguments into a file"
                )
            try:
                self._rest += await anext(self._pieces)
            except StopAsyncIteration:
                return


async def attend(request: Request, caller: Caller, lines: Lines) -> None:
    """Pass the client's `lines` on until it is gone, and report its end."""
    try:
        async for line in lines.rest():
            _pass_on(json.loads(line), caller)
        await _disconnect(request)
    except ClientDisconnect:
        pass
    except (LimitExceeded, ValueError, KeyError, TypeError, RecursionError) as exc:
        log.warning(
            "a client sent a line that is no part of the API; its connection is given up",
            extra={"fields": {"reason": repr(exc)[:200]}},
        )
    finally:
        caller.leave()


async def until_gone(request: Request, what: Leaving) -> None:
    """Report the end of a client that says no more."""
    with contextlib.suppress(ClientDisconnect):
        await _disconnect(request)
    what.leave()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _pass_on(event: dict[str, Any], caller: Caller) -> None:
    match event["event"]:
        case "stdin":
            data = base64.b64decode(event["data_b64"], validate=True)
            if caller.waiting_bytes + len(data) > STDIN_WINDOW_BYTES:
                raise ValueError("more input than was asked for")
            caller.send(data)
        case "stdin_end":
            caller.end_input()
        case "resize":
            size = _SIZE.validate_python({"rows": event["rows"], "columns": event["columns"]})
            caller.resize(size.rows, size.columns)
        case "unread" if event["stream"] in ("stdout", "stderr"):
            caller.close_output(event["stream"])
        case _:
            raise ValueError("no such event")
