"""The HTTP API: a thin skin over `Engine`, all of it under /v1. `python -m snapshotd.daemon.http.api` prints its
OpenAPI description.

Every handler decodes, calls one engine method and encodes. Errors are `{"error": {"code", "message"}}` with the class's
status. Handlers that answer at once run in the thread pool; the ones that answer piece by piece have a thread of their
own (streams.py).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

import snapshotd
from snapshotd.api.commands import ExecRequest
from snapshotd.api.wire import API_PREFIX, API_VERSION
from snapshotd.daemon.access.limits import CONNECTIONS_MAX
from snapshotd.daemon.http.describing import describe
from snapshotd.daemon.http.failures import failure_of
from snapshotd.daemon.http.gate import VersionGate
from snapshotd.daemon.http.problems import first_problem
from snapshotd.daemon.http.routes import (  # noqa: F401 - they register their handlers
    access,
    approvals,
    commands,
    direct,
    experiments,
    files,
    history,
    images,
    runs,
    snapshots,
    storage,
    values,
)
from snapshotd.daemon.http.routes import service as service_routes  # noqa: F401 - as these
from snapshotd.daemon.http.routes.shared import ROUTES, Service
from snapshotd.daemon.http.streams import error_response
from snapshotd.errors import NotFound, SnapshotdError, UsageError

HANDLER_THREADS = 288
"""Ordinary requests of the socket's users served at the same moment: 256 blocking ones and room for looking around meanwhile.
Each connection from another machine adds one, so that those can take none away."""


def create_app(service: Service) -> FastAPI:
    """The ASGI application over one engine."""
    app = FastAPI(
        title="snapshotd",
        version=API_VERSION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API_PREFIX}/openapi.json",
        summary=snapshotd.__doc__,
        redirect_slashes=False,
    )
    app.state.service = service
    app.router.routes.extend(ROUTES)
    app.openapi = functools.cache(lambda: _describe(app))  # type: ignore[method-assign]
    for kind in (SnapshotdError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(
        VersionGate, pid=service.pid, counts=service.requests, access=service.access, audit=lambda: service.audit
    )
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    routes = [route.described() for route in ROUTES]
    return describe(get_openapi(title=app.title, version=app.version, summary=app.summary, routes=routes))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = HANDLER_THREADS + (CONNECTIONS_MAX if app.state.service.listening else 0)
    yield


async def _answer_error(request: Request, exc: Exception) -> Response:
    failure: SnapshotdError
    if isinstance(exc, RequestValidationError):
        failure = UsageError(first_problem(exc, _record_of_body(request)))
    elif isinstance(exc, HTTPException) and exc.status_code == 405:
        return _answer_method(request)
    elif isinstance(exc, HTTPException):
        failure = NotFound(
            f"the API has no {request.method} {request.url.path}; {API_PREFIX}/openapi.json describes what it has"
        )
        if exc.status_code != 404:
            failure = UsageError(f"the request was refused: {exc.detail}")
    else:
        failure = failure_of(exc)
    return error_response(failure)


def _answer_method(request: Request) -> Response:
    """The answer to a method that a path does not have: it names those that the path has."""
    routes = (route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE)
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    failure = UsageError(f"{request.url.path} of the API has no {request.method}; it has {allowed}")
    answer = error_response(failure, status=405)
    answer.headers["Allow"] = allowed
    return answer


def _record_of_body(request: Request) -> Any:
    """The record of the body; a command's is in the first line of its input, and read there."""
    field = getattr(request.scope.get("route"), "body_field", None)
    return ExecRequest if field is None else field.field_info.annotation


def openapi() -> dict[str, Any]:
    """The API's description, without a running daemon."""
    return create_app(Service(engine=None, state_dir=Path("/"), pid=0)).openapi()  # type: ignore[arg-type]


if __name__ == "__main__":
    json.dump(openapi(), sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")
