"""Requests of every kind that the API's description allows, and of many that it does not, made by schemathesis.

Its import takes a second, so only a process that makes requests does it, and not each one that collects tests.
"""

from __future__ import annotations

import functools
import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from snapshotd.api.wire import API_PREFIX, API_VERSION, VERSION_HEADER
from tests import long

TIMEOUT_S = 60.0
"""A request that takes longer hangs."""

ENDLESS = ("/watch", "/events")
"""Their answers go on until the client leaves."""

ON_THIS_MACHINE = (
    "/images/build",
    "/images/import",
    "/mount",
    "/umount",
    "/runs",
    "/sandboxes",
    "/snapshots/{ref}/restore",
)
"""They read or write any folder of this machine, as they are told."""

Operation = tuple[str, str]
DESCRIPTION = Path(__file__).parents[1] / "docs" / "openapi.json"


@functools.cache
def description() -> Any:
    return json.loads(DESCRIPTION.read_text())


@functools.cache
def schema() -> Any:
    import schemathesis

    @schemathesis.serializer("application/x-ndjson")  # type: ignore[untyped-decorator]
    def one_line(_: Any, value: Any) -> bytes:
        return json.dumps(value).encode() + b"\n"

    return schemathesis.openapi.from_dict(description())


def operations(without: Mapping[str, str]) -> list[Operation]:
    """Method and path of each operation, but for the paths in `without`, which has the reasons."""
    paths = description()["paths"]
    assert without.keys() <= {path.removeprefix(API_PREFIX) for path in paths}
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [item for item in found if item[1].removeprefix(API_PREFIX) not in without]


def ask_anything(
    socket_path: Path,
    operation: Operation,
    known: Mapping[str, str],
    examples: int,
    *,
    over: tuple[tuple[str, int], str] | None = None,
) -> None:
    """Send `examples` requests for an operation. Path parameters are often those of `known`, so that the request goes
    beyond the question if there is such a thing. `over`: the address for other machines, and a token; else the socket is
    asked. AssertionError for an answer with a status of 500 or more, or one that does not come."""
    from schemathesis.generation import GenerationMode

    method, path = operation
    described = schema()[path][method]
    cases = st.one_of(described.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @seed(long.SEED)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases, st.lists(st.booleans(), min_size=8, max_size=8))
    def anything(case: Any, choices: list[bool]) -> None:
        parameters = dict(_given(case.path_parameters) or {})
        for choice, name in zip(choices, list(parameters), strict=False):
            if choice and name in known:
                parameters[name] = known[name]
        target = path
        for name, value in parameters.items():
            target = target.replace("{" + name + "}", quote(_text(value), safe="", errors="replace") or "-")
        query = {key: value for key, value in (_given(case.query) or {}).items() if value is not None}
        if query:
            target += "?" + urlencode(query, doseq=True, errors="replace")
        status, text = _answer(socket_path, method, target, _body(case), over)
        assert status < 500, f"{method} {target} {case.body!r}: {status} {text!r}"

    anything()


def _given(part: Any) -> Any:
    return part if isinstance(part, Mapping) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _body(case: Any) -> tuple[bytes | None, str | None]:
    """The body, and its type."""
    body, kind = case.body, case.media_type
    if kind is None or type(body).__name__ == "NotSet":
        return None, kind
    if isinstance(body, bytes):
        return body, kind
    return json.dumps(body).encode() + b"\n", kind


def _answer(
    socket_path: Path,
    method: str,
    target: str,
    body: tuple[bytes | None, str | None],
    over: tuple[tuple[str, int], str] | None,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("snapshotd", timeout=TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX if over is None else socket.AF_INET)
    connection.sock.settimeout(TIMEOUT_S)
    try:
        connection.sock.connect(str(socket_path) if over is None else over[0])
        headers = {VERSION_HEADER: API_VERSION, "Content-Type": body[1] or "application/json"}
        if over is not None:
            headers["Authorization"] = f"Bearer {over[1]}"
        try:
            connection.request(method, target, body[0], headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it had read everything: its answer says why
        answer = connection.getresponse()
        endless = any(part in target for part in ENDLESS) and answer.status < 400
        text = answer.read1(1 << 16) if endless else answer.read(1 << 24)
        answer.close()
        return answer.status, text[:500]
    finally:
        connection.close()
