"""The server: whose request is it?

{port}-{sandbox}.{domain} as host, or the headers E2b-Sandbox-Id and E2b-Sandbox-Port   a sandbox: port 49983 is its own
                                                                                        API, any other a server in it
/files with a signature                                                                 the sandbox that signed it
else                                                                                    the control API
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.e2b.boxes import Boxes
from snapshotd.integrations.e2b.connect import Rpc, error_of
from snapshotd.integrations.e2b.control.builds import BuildRoutes
from snapshotd.integrations.e2b.control.sandboxes import Handler, SandboxRoutes, measure
from snapshotd.integrations.e2b.control.templates import TemplateCatalog
from snapshotd.integrations.e2b.failures import WireError, answer, failure_of
from snapshotd.integrations.e2b.inside.call import InnerCall
from snapshotd.integrations.e2b.inside.entries import Entries
from snapshotd.integrations.e2b.inside.filesystem import Filesystem
from snapshotd.integrations.e2b.inside.processes import Processes
from snapshotd.integrations.e2b.inside.terminals import Terminals
from snapshotd.integrations.e2b.inside.transfers import Transfers, UploadPlaces
from snapshotd.integrations.e2b.inside.watching import DirectoryWatchers
from snapshotd.integrations.e2b.keys import AccessKeys
from snapshotd.integrations.e2b.people import People, basic_user
from snapshotd.integrations.e2b.records import Box, Records
from snapshotd.integrations.e2b.traffic import TRAFFIC_TOKEN, Traffic

ENVD_PORT = 49983
READY_S = 120.0
"""So long the start command of a template may take until its ready command passes."""
_HOST = re.compile(r"([0-9]{1,5})-([0-9a-z]{8,40})\.(.+)", re.IGNORECASE)
_READY = 'n=0; until (eval "$1"); do n=$((n + 1)); [ "$n" -lt 400 ] || exit 1; sleep 0.3; done'


@dataclass(frozen=True, slots=True)
class WireOptions:
    """`domain`: below it sandboxes have hosts. `image`: the one that the template `base` is. `network`: of sandboxes that
    do not say. `removes`: a sandbox that was killed is removed with its history."""

    domain: str
    image: str = "default"
    network: str = "bridge"
    removes: bool = False


class E2BServer:
    """An ASGI application over one daemon."""

    def __init__(self, client: AsyncSnapshotd, keys: Mapping[str, str], options: WireOptions) -> None:
        """`keys`: the API keys, each with the tenant whose sandboxes its clients make and see."""
        self._client, self._owners, self._options = client, keys, options
        self._control: ASGIApp | None = None
        self._stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await Starlette(lifespan=self._lifespan)(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            where = find_address(headers, self._options.domain)
            if where is not None:
                await self._serve_inside(*where, headers, scope, receive, send)
            elif scope["type"] == "http" and scope["path"] == "/files" and b"signature=" in scope["query_string"]:
                await self._serve_signed(scope, receive, send)
            elif scope["type"] == "http":
                assert self._control is not None
                await self._control(scope, receive, send)
            else:
                raise WireError("not_found", "no sandbox is named")
        except (WireError, SnapshotdError) as exc:
            await self._refuse(exc if isinstance(exc, WireError) else failure_of(exc), scope, receive, send)
        except ClientDisconnect:
            pass

    def stop_streams(self) -> None:
        """Streams end now, else the end of the server would wait for them."""
        self._stopping.set()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        client, records = self._client, Records(self._client)
        self._keys = AccessKeys(self._owners, await records.secret())
        self._people = People(client)
        self._traffic, self._terminals = Traffic(client), Terminals(client)
        entries = Entries(client, self._people)
        self._watchers = DirectoryWatchers(entries)
        self._processes = Processes(client, self._people, self._terminals)
        files = Filesystem(client, self._people, entries, self._watchers)
        places = UploadPlaces()
        self._transfers = Transfers(client, self._people, entries, places)
        self._methods: dict[str, Rpc] = {
            **{f"/process.Process/{name}": rpc for name, rpc in self._processes.methods.items()},
            **{f"/filesystem.Filesystem/{name}": rpc for name, rpc in files.methods.items()},
        }
        self._boxes = Boxes(client, records, self._leave, self._start, removes=self._options.removes)
        templates = TemplateCatalog(client, records, self._people, self._options.image)
        sandboxes = SandboxRoutes(
            client, records, self._boxes, templates, self._keys, self._options.domain, self._options.network
        )
        builds = BuildRoutes(client, self._people, templates, sandboxes, self._keys, places)
        self._control = Starlette(
            routes=[*builds.routes(self._with_key), *sandboxes.routes(self._with_key)],
            exception_handlers={HTTPException: _no_route, 500: _defect},
        )
        ends = asyncio.create_task(self._boxes.watch_ends())
        try:
            yield
        finally:
            ends.cancel()
            await asyncio.gather(ends, return_exceptions=True)
            await builds.close()
            await self._leave(None)

    async def _leave(self, sandbox: str | None) -> None:
        """Let go of a sandbox, or of all."""
        await self._watchers.end(sandbox)
        await self._terminals.end(sandbox)
        await self._traffic.end(sandbox)

    async def _start(self, box: Box) -> None:
        """Start the program of a sandbox's template. WireError: it is not ready in time."""
        if box.start is None:
            return
        call = InnerCall(box, await self._people.find(box, None))
        await self._processes.begin(call, ["/bin/bash", "-l", "-c", box.start], env={}, stdin=False)
        if box.ready is None:
            return
        waits = replace(call, timeout_s=READY_S)
        begun = await self._processes.begin(
            waits, ["/bin/bash", "-l", "-c", _READY, "ready", box.ready], env={}, stdin=False
        )
        async for event in self._client.command_events(box.id, begun.id):
            if event["event"] == "finished" and event["exit_code"] != 0:
                raise WireError(
                    "deadline_exceeded", f"the template's ready command did not pass within {READY_S:.0f} s"
                )

    # -- the control API -----------------------------------------------------------------------------------------------

    def _with_key(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The handler for requests with a key."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(self._keys.owner(request.headers), request)
            except SnapshotdError as exc:
                return answer(failure_of(exc))
            except WireError as exc:
                return answer(exc)

        return handle

    # -- within sandboxes ----------------------------------------------------------------------------------------------

    async def _serve_inside(
        self, sandbox: str, port: int, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        box = await self._boxes.find_reachable(sandbox)
        if port != ENVD_PORT:
            if not box.is_public:
                self._keys.check(headers.get(TRAFFIC_TOKEN), sandbox, "traffic")
            await self._boxes.ensure_running(sandbox)
            if scope["type"] == "websocket":
                await self._boxes.check_there(box)
            async with self._within(box):
                await self._traffic.pass_on(sandbox, port, scope, receive, send)
            return
        if scope["type"] != "http":
            raise WireError("not_found", "the API of a sandbox has no WebSockets")
        request = Request(scope, receive)
        if scope["path"] == "/files" and "signature" in request.query_params:
            await self._serve_signed(scope, receive, send)
            return
        if scope["path"] != "/health":
            self._keys.check(headers.get("x-access-token"), sandbox)
        box = await self._boxes.ensure_running(sandbox)  # this resumes it, so the token is checked before
        async with self._within(box):
            await (await self._answer(box, request))(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _within(self, box: Box) -> AsyncIterator[None]:
        """Inside the block, errors are those of a request within a sandbox. WireError."""
        try:
            yield
        except (WireError, SnapshotdError) as exc:
            raise await self._boxes.failure(box, exc) from exc

    async def _answer(self, box: Box, request: Request) -> Response:
        method, path = request.method, request.url.path
        rpc = self._methods.get(path)
        if rpc is not None and method == "POST":
            person = await self._people.find(box, basic_user(request.headers.get("authorization")))
            call = InnerCall.of(box, person, request.headers)
            return await rpc.answer(call, request, self._stopping, partial(self._boxes.failure, box))
        if path == "/files" and method in ("GET", "POST"):
            name = request.query_params.get("username") or basic_user(request.headers.get("authorization"))
            return await self._file(box, request, name)
        if method == "GET" and path in ("/health", "/metrics", "/envs"):
            await self._boxes.check_there(box)
        if (method, path) == ("GET", "/health"):
            return Response(status_code=204)
        if (method, path) == ("GET", "/metrics"):
            return JSONResponse(_inner_metrics(await measure(self._client, box)))
        if (method, path) == ("GET", "/envs"):
            return JSONResponse(box.env)
        raise WireError("not_found", f"the API of a sandbox has no {method} {path}")

    async def _file(self, box: Box, request: Request, name: str | None) -> Response:
        call = InnerCall(box, await self._people.find(box, name))
        return await (self._transfers.get if request.method == "GET" else self._transfers.post)(call, request)

    async def _serve_signed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A URL of a file, whose signature says whose it is."""
        request = Request(scope, receive)
        query = request.query_params
        operation = {"GET": "read", "POST": "write"}.get(request.method)
        if operation is None:
            raise WireError("not_found", f"/files has no {request.method}")
        box = self._keys.find_signer(
            await self._boxes.all_of(None),
            query.get("path", ""),
            operation,
            query.get("username", ""),
            query.get("signature", ""),
            query.get("signature_expiration"),
        )
        box = await self._boxes.ensure_running(box.id)
        async with self._within(box):
            await (await self._file(box, request, query.get("username") or None))(
                scope, receive, send
            )  # as it is signed

    async def _refuse(self, failure: WireError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": failure.message[:100]})
            return
        is_call = scope["path"] in self._methods and failure.code != "gone"
        await (error_of(failure) if is_call else answer(failure))(scope, receive, send)


def find_address(headers: Headers, domain: str) -> tuple[str, int] | None:
    """The sandbox and port that a request is for, by its host below `domain` or by headers; None: it is for none.
    WireError: there is no such port."""
    sandbox, port = headers.get("e2b-sandbox-id"), headers.get("e2b-sandbox-port", str(ENVD_PORT))
    if sandbox is None:
        found = _HOST.fullmatch(headers.get("host", ""))
        if found is None or _without_port(found[3]) != _without_port(domain):
            return None
        port, sandbox = found[1], found[2]
    if len(port) > 5 or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise WireError("invalid_argument", f"{port[:80]!r} is no port")
    return sandbox.lower(), int(port)


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]+$", "", host.lower())


def _inner_metrics(told: dict[str, Any] | None) -> dict[str, Any]:
    """The figures that `envd` tells of its sandbox."""
    if told is None:
        return {}
    return {
        "ts": told["timestampUnix"],
        "cpu_count": told["cpuCount"],
        "cpu_used_pct": told["cpuUsedPct"],
        "mem_used": told["memUsed"],
        "mem_total": told["memTotal"],
        "mem_cache": told["memCache"],
        "disk_used": told["diskUsed"],
        "disk_total": told["diskTotal"],
    }


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    missing = f"snapshotd's E2B server has no {request.method} {request.url.path}"
    return answer(WireError("unimplemented" if exc.status_code in (404, 405) else "invalid_argument", missing))


async def _defect(request: Request, exc: Exception) -> Response:
    return answer(WireError("internal", "the server has a defect; its log says more"))
