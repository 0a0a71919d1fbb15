"""No text in a request makes the daemon fail: each operation gets, in each field that takes text, texts that are far too long,
empty, of one path, with a zero byte, or no text at all but deeply nested JSON."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from snapshotd.api.wire import API_PREFIX, API_VERSION, VERSION_HEADER
from snapshotd.engine.runs import programs
from snapshotd.errors import UsageError
from tests import long
from tests.any_request import ENDLESS, ON_THIS_MACHINE, Operation, description, operations
from tests.unit.daemon.process import Daemon, start

LONG = ["x" * 100_000, "\0", "x\ud800"]
PATHS = ["/"]
if long.LONG:
    LONG += ["", "x" * 300, "/" + "x/" * 3000, "\n", "é" * 255]
    PATHS += [".", "..", "/proc"]
"""They are not sent where the daemon would take in, or write, what it finds there."""
DEEP = "[" * 20_000 + "]" * 20_000
_MARK = "@@"
WITHOUT = {"/shutdown": "it does end the daemon"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("s")
    daemon = start(folder / "state", folder / "s.sock")
    yield daemon
    daemon.close()


def resolved(schema: Any) -> Any:
    while "$ref" in schema:
        schema = description()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def least(schema: Any) -> Any:
    """A small value that fits."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return least(schema["anyOf"][0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    if kind == "array":
        return [least(schema.get("items", {}))] * schema.get("minItems", 0)
    return {"string": "box", "integer": 1, "number": 1, "boolean": False}.get(kind)


def with_texts(schema: Any, depth: int = 0) -> Iterator[Any]:
    """Small values that fit, each with the mark in the place of one text."""
    schema = resolved(schema)
    for one in schema.get("anyOf", ()):
        yield from with_texts(one, depth)
    kind = schema.get("type")
    if kind == "string" or not schema:
        yield _MARK
    elif kind == "array" and depth < 4:
        for item in with_texts(schema.get("items", {}), depth + 1):
            yield [item]
    elif kind == "object" and depth < 4:
        for name, member in schema.get("properties", {}).items():
            for value in with_texts(member, depth + 1):
                yield {**least(schema), name: value}
        if isinstance(schema.get("additionalProperties"), dict):
            yield {_MARK: least(schema["additionalProperties"])}
            for value in with_texts(schema["additionalProperties"], depth + 1):
                yield {"x": value}


def requests(operation: Operation) -> Iterator[tuple[str, bytes | None]]:
    """Targets and bodies."""
    method, path = operation
    described = description()["paths"][path][method.lower()]
    texts = LONG if path.removeprefix(API_PREFIX) in ON_THIS_MACHINE else [*LONG, *PATHS]
    body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    plain = None if body is None else json.dumps(least(body)).encode()
    target = re.sub(r"\{.*?\}", "box", path)
    for one in described.get("parameters", ()):
        if one["in"] not in ("path", "query"):
            continue
        for text in texts:
            said = quote(text[:8000], safe="", errors="replace")
            if one["in"] == "path":
                yield re.sub(r"\{.*?\}", "box", path.replace("{" + one["name"] + "}", said or "%20")), plain
            else:
                yield f"{target}?{one['name']}={said}", plain
    for value in () if body is None else with_texts(body):
        template = json.dumps(value)
        for text in texts:
            yield target, template.replace(f'"{_MARK}"', json.dumps(text)).encode()
        if f'"{_MARK}":' not in template:
            yield target, template.replace(f'"{_MARK}"', DEEP).encode()


def answer(socket_path: Path, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("snapshotd", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    try:
        connection.sock.connect(str(socket_path))
        headers = {VERSION_HEADER: API_VERSION, "Content-Type": "application/json"}
        try:
            connection.request(method, target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it had read everything: its answer says why
        found = connection.getresponse()
        endless = any(part in target for part in ENDLESS) and found.status < 400
        text = found.read1(1 << 16) if endless else found.read(1 << 20)
        return found.status, text[:500]
    finally:
        connection.close()


@pytest.mark.parametrize("operation", operations(WITHOUT), ids=" ".join)
def test_no_text_makes_the_daemon_fail(operation: Operation, daemon: Daemon) -> None:
    if not any(one.trajectory.name == "box" for one in daemon.client.sandboxes()):
        with_box(daemon)
    for target, body in requests(operation):
        status, text = answer(daemon.socket_path, operation[0], target, body)
        said = f"{operation[0]} {target[:200]} {(body or b'')[:300]!r}: {status} {text!r}"
        assert status < 500 or status in (501, 503), said
        assert b"InternalError" not in text, said


@pytest.mark.parametrize("path", ["/images/build", "/images/import"])
def test_a_text_that_is_too_long_for_a_path_is_no_image(daemon: Daemon, path: str) -> None:
    body = json.dumps({"source": "x" * 100_000}).encode()
    status, text = answer(daemon.socket_path, "POST", API_PREFIX + path, body)
    assert status in (400, 404), text


@pytest.mark.parametrize("folder", ["/", "/proc/self/root", "//"])
def test_the_whole_machine_is_no_program(folder: str) -> None:
    """It was read, with all of /proc, until one of its files had gone."""
    with pytest.raises(UsageError, match="is the whole machine; name the folder that holds the program"):
        programs._key(Path(folder), 0)


def with_box(daemon: Daemon) -> None:
    """A sandbox that the requests may have ended."""
    if any(one.name == "box" for one in daemon.client.trajectories()):
        daemon.client.remove("box", force=True)
    daemon.client.create(name="box")
