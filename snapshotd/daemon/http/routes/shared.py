"""The parts that the route modules share: how a handler is registered, the service, refs from the URL, and requests
that are made once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Depends, Header, Query, Request
from fastapi import Path as PathParameter
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from snapshotd.api.operation import Operation
from snapshotd.api.record import Json, encode_given, encode_masked, types_of
from snapshotd.api.service import ErrorAnswer
from snapshotd.api.wire import API_PREFIX, KEY_HEADER, RECALL_HEADER, check_ref
from snapshotd.catalog.base import as_tenant, present_tenant
from snapshotd.daemon.access.access import Access
from snapshotd.daemon.access.audit import Audit
from snapshotd.daemon.access.principals import PRINCIPAL, Principal
from snapshotd.daemon.access.tokens import Tokens
from snapshotd.daemon.http.carrying import ConnectionLimit
from snapshotd.daemon.http.counting import RequestCounts
from snapshotd.daemon.http.decoding import check
from snapshotd.daemon.http.encoding import json_bytes
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.problems import check_query, load_json
from snapshotd.daemon.http.streams import JSON, StreamLimit, answer_list
from snapshotd.daemon.http.watching import Watchers
from snapshotd.engine.base import Opener
from snapshotd.engine.engine import Engine
from snapshotd.errors import UsageError
from snapshotd.kernel import turns
from snapshotd.types import RequestKey, Snapshot

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """The objects that the handlers share."""

    engine: Engine
    state_dir: pathlib.Path
    pid: int
    request_stop: Callable[[], None] = lambda: None
    streams: StreamLimit = field(default_factory=StreamLimit)
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)
    watchers: Watchers = field(default_factory=Watchers)
    requests: RequestCounts = field(default_factory=RequestCounts)
    access: Access = field(init=False)
    audit: Audit | None = None
    """None: the daemon listens for no other machine."""
    listening: str = ""
    """The address at which other machines reach it; empty: none does."""
    fingerprint: str = ""
    """The fingerprint of its certificate."""

    def __post_init__(self) -> None:
        self.access = Access(Tokens(self.state_dir / "tokens.json"))


class OperationRoute(Route):
    """The route of an operation. FastAPI's, which takes a request apart, is made for the first one: to make all of them takes a
    fifth of the daemon's start."""

    def __init__(self, operation: Operation[Any], handler: Callable[..., Any], **options: Any) -> None:
        """`options`: of FastAPI's route."""
        super().__init__(API_PREFIX + operation.path, handler)
        self.methods = {operation.method}
        self.operation, self._options = operation, {**options, "methods": [operation.method]}

    @functools.cached_property
    def _answering(self) -> _JsonRoute:
        return _JsonRoute(self.operation, self.path, self.endpoint, self._options)

    def described(self) -> APIRoute:
        """FastAPI's route with the forms of its answers, for the description."""
        return APIRoute(self.path, self.endpoint, **self._options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._answering
        await self._answering.handle(scope, receive, send)


class _JsonRoute(APIRoute):
    """A route for callers with the scope of its operation, who see the things of their tenant. `decoding.check` looks at the body
    before the handler gets it. `json_bytes` encodes its answers, and not FastAPI, which refuses some text that a program may
    record. So only the description needs their forms."""

    def __init__(
        self, operation: Operation[Any], path: str, endpoint: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self.operation = operation

        def encoded(answer: Any) -> Any:
            if answer is None or isinstance(answer, Response):
                return answer
            return (
                answer_list(answer)
                if isinstance(answer, list)
                else Response(json_bytes(answer), operation.status, media_type=JSON)
            )

        def checked(given: dict[str, Any]) -> dict[str, Any]:
            if operation.query is not None:
                given["query"] = operation.query(**{name: given.pop(name) for name in types_of(operation.query)})
            check(given.get("body"))
            check(given.get("query"))
            return given

        if inspect.iscoroutinefunction(endpoint):

            @functools.wraps(endpoint)
            async def answering(*args: Any, **kwargs: Any) -> Any:
                return encoded(await endpoint(*args, **checked(kwargs)))
        else:

            @functools.wraps(endpoint)
            def answering(*args: Any, **kwargs: Any) -> Any:
                return encoded(endpoint(*args, **checked(kwargs)))

        super().__init__(path, answering, **{**options, "response_model": None, "responses": None})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Principal = scope["state"][PRINCIPAL]
        caller.check_scope(self.operation.scope)
        with as_tenant(caller.tenant):
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, known = super().get_route_handler(), {field.alias for field in self.dependant.query_params}

        async def strictly(request: Request) -> Response:
            check_query(request.query_params.multi_items(), known)
            return await handle(_Strict(request.scope, request.receive))

        return strictly


class _Strict(Request):
    """A request in whose JSON each name stands once."""

    async def json(self) -> Any:
        return load_json(await self.body())


ROUTES: list[OperationRoute] = []
"""All routes, which every app has."""
_ERROR: dict[int | str, Any] = {"default": {"model": ErrorAnswer, "description": "An error, as one sentence."}}
H = TypeVar("H", bound=Callable[..., Any])


def handles(
    operation: Operation[Any], says: str | None = None, takes: str | None = None, about: str | None = None
) -> Callable[[H], H]:
    """Registers the handler of an operation. It returns values of the engine (`engine/records.py`), records, or the Response
    that streams the answer. `says`, `takes`: description of a streamed answer, and of a streamed body. `about`: that of the
    operation, in place of the handler's docstring."""
    options: dict[str, Any] = {
        "response_model": operation.answer,
        "openapi_extra": {"x-scope": operation.scope},
        "responses": _ERROR,
    }
    if isinstance(operation.answer, str):
        described: dict[str, Any] = {"content": {operation.answer: {}}, "description": says or "Raw bytes."}
        options |= {"response_model": None, "response_class": Response, "responses": {**_ERROR, 200: described}}
    if operation.is_upload:
        body: dict[str, Any] = {"required": True, "content": {operation.body: {}}, "description": takes}
        options["openapi_extra"]["requestBody"] = body

    def register(handler: H) -> H:
        if operation.query is not None:
            vars(handler)["__signature__"] = _with_members(inspect.signature(handler), operation.query)
        route = OperationRoute(
            operation,
            handler,
            status_code=operation.status,
            tags=[operation.subject],
            description=about,
            dependencies=[Depends(_check_ref)] if "{ref}" in operation.path else None,
            **options,
        )
        ROUTES.append(route)
        return handler

    return register


def _with_members(signature: inspect.Signature, record: Any) -> inspect.Signature:
    """The signature with the members of a record in the place of its argument `query`."""
    parameters = dict(signature.parameters)
    del parameters["query"]
    for member in dataclasses.fields(record):
        parameters[member.name] = inspect.Parameter(
            member.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=types_of(record)[member.name],
            default=inspect.Parameter.empty if member.default is dataclasses.MISSING else member.default,
        )
    first = sorted(parameters.values(), key=lambda one: (one.kind, one.default is not inspect.Parameter.empty))
    return signature.replace(parameters=first)


async def _service(request: Request) -> Service:  # async, or FastAPI has a thread call it
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]
Ref = Annotated[
    str,
    PathParameter(
        description="A tag, a name, or a unique prefix of an id; for a snapshot also a trajectory (its head)."
    ),
]
CommandRef = Annotated[str, PathParameter(description="Unique prefix of the command's id, or a service's name.")]
PathB64 = Annotated[str, Query(description="Path in the sandbox, relative to its root, as base64 of its bytes.")]


async def _check_ref(request: Request) -> None:
    """NotFound for a ref in the URL that nothing can have."""
    check_ref(request.path_params["ref"])


async def opener_of(request: Request) -> Opener:
    """The client, for a verb that opens its folder."""
    return Opener(namespace_pid=client_pid(request) or None)


OpenerDep = Annotated[Opener, Depends(opener_of)]


def principal_of(request: Request) -> Principal:
    """The caller."""
    found: Principal = getattr(request.state, PRINCIPAL)
    return found


def decider(request: Request, name: str | None) -> str:
    """The person who decides: the caller, who may name another one where it is a user of the socket."""
    caller = principal_of(request)
    return caller.name if caller.token or not name else name


@dataclass(frozen=True, slots=True)
class Named:
    """How a request that makes something names itself. `recall`: answer only from what an earlier one has made."""

    key: str | None
    recall: bool
    target: str
    """Its method and path, the same for a command that the client attends to."""

    def request(self, *body: object) -> RequestKey | None:
        """Its key, bound to its target and `body`, but not to secrets: no digest of one is recorded. None: it has none.
        UsageError: it asks to be recalled, and has none."""
        if self.key is None:
            if self.recall:
                raise UsageError(
                    f"a request can be recalled only under its {KEY_HEADER}; send the one that it was sent with"
                )
            return None

        def digest(form: Callable[[Any], Json]) -> str:
            said = json.dumps([self.target, *body], sort_keys=True, default=form)
            return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

        # A tenant meets no key of another: it could learn that a request was made.
        key = " ".join(filter(None, (present_tenant(), self.key)))
        # Earlier versions had the defaults in the digest. A key is kept for a day.
        return RequestKey(key, digest(encode_given), time.time_ns(), (digest(encode_masked),))


async def _named(
    request: Request,
    key: Annotated[
        str | None,
        Header(
            alias=KEY_HEADER,
            pattern="^[!-~]{1,200}$",
            description="1 to 200 printable ASCII characters that no other request has. Whatever the request makes is made once under "
            "it: the same request again waits for the first one, and answers from what that has made, for a day and across "
            "restarts. Another method, path or body under it is a `Conflict`. The body of an upload and the values of secrets are not "
            "compared. A request that "
            "failed has made nothing, and its key is free again.",
        ),
    ] = None,
    recall: Annotated[
        bool,
        Header(
            alias=RECALL_HEADER,
            description="Make nothing: `NotFound` if nothing was made under the key. Needs no upload.",
        ),
    ] = False,
) -> Named:
    return Named(key, recall, f"{request.method} {request.url.path.removesuffix('/attended')}")


NamedDep = Annotated[Named, Depends(_named)]
Recall = Callable[[tuple[str, ...]], T]


def once(service: Service, named: Named, body: object, make: Callable[[], T], recall: Recall[T]) -> T:
    """The answer to a request that makes something: see `Asking.once`."""
    with service.engine.requests.asking(named.request(body)) as asking:
        return asking.once(make, recall, recall_only=named.recall)


def step_once(service: Service, named: Named, body: object, make: Callable[[], Snapshot]) -> Snapshot:
    """The answer to a request that takes a step, once, as `once`: the snapshot of the step."""
    return once(service, named, body, make, lambda made: service.engine.snapshots.get(made[0]))


async def once_unless_abandoned(
    request: Request,
    service: Service,
    named: Named,
    body: object,
    make: Callable[[], T],
    recall: Recall[T],
    undo: Callable[[T], None],
) -> T:
    """The same for what runs on: if the client has gone before the answer, and does not ask again, it is undone, and a
    copy of many files that it begins with does not go on."""
    given_up = threading.Event()
    with service.engine.requests.asking(named.request(body)) as asking:

        def work() -> T:
            with turns.until(given_up):
                return asking.once(make, recall, recall_only=named.recall)

        async def notice() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            if not await anyio.to_thread.run_sync(asking.wait_for_repeat):
                given_up.set()

        noticing = asyncio.create_task(notice())
        try:
            outcome = await anyio.to_thread.run_sync(work)
        finally:
            noticing.cancel()
            await asyncio.wait([noticing])
        if await request.is_disconnected() and not await anyio.to_thread.run_sync(asking.wait_for_repeat):
            await anyio.to_thread.run_sync(lambda: undo(outcome))
    return outcome
