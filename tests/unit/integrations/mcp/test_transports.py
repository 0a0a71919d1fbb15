"""HTTP on the loopback: who gets in; and lines on standard input that are no messages."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotPermitted, SnapshotdError, UsageError
from snapshotd.integrations.token_file import token_of
from tests.mcp_rig import server_over
from tests.unit.daemon.process import Daemon

TOKEN = "t" * 32
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
GIVEN = {"authorization": f"Bearer {TOKEN}", "accept": "application/json, text/event-stream", "host": "127.0.0.1:1234"}


@pytest.fixture
def transports() -> Any:
    from snapshotd.integrations.mcp import transports  # a second

    return transports


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """Its daemon is asked nothing."""
    return server_over(AsyncSnapshotd(tmp_path, autostart=False))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1234"}, 200),
        ({"origin": "http://127.0.0.1:1234"}, 200),
        ({"authorization": ""}, 401),
        ({"authorization": TOKEN}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"bearer {TOKEN[:-1]}"}, 401),
        ({"authorization": b"Bearer \xff"}, 401),
        ({"host": "evil.example:1234"}, 421),
        ({"host": "127.0.0.1:99"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:1235"}, 403),
    ],
)
def test_who_gets_in(transports: Any, server: Any, headers: dict[str, Any], status: int) -> None:
    app: Any = transports.http_app(server, 1234, TOKEN)

    async def ask() -> int:
        import httpx2

        async with server.session_manager.run():
            way = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=way, base_url="http://127.0.0.1:1234") as client:
                return (await client.post("/mcp", json=HELLO, headers={**GIVEN, **headers})).status_code

    assert asyncio.run(ask()) == status


def test_the_token_is_made_once_and_for_its_user_alone(transports: Any, tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = token_of(path)
    assert (len(token) > 40, stat.S_IMODE(path.stat().st_mode)) == (True, 0o600)
    assert token_of(path) == token
    path.chmod(0o644)
    with pytest.raises(NotPermitted, match="chmod 600"):
        token_of(path)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 1234, 1234)
        with pytest.raises(NotPermitted):
            token_of(path)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40, b"two words of some length\nand lines\n"])
def test_a_file_without_a_token(transports: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=str(path)):
        token_of(path)


@pytest.mark.parametrize("name", ["none/token", "."])
def test_no_place_for_a_token(transports: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotdError, match="another token file"):
        token_of(tmp_path / name)


def test_a_taken_port(transports: Any, server: Any) -> None:
    def again(address: str) -> None:
        port = int(address.rpartition(":")[2].partition("/")[0])
        with pytest.raises(Conflict, match=f"{port} cannot be listened on"):
            transports.serve_http(server, port, TOKEN, print)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transports.serve_http(server, 0, TOKEN, again)


@pytest.fixture
def stdio(shared_daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """`snapshotd mcp` after its handshake."""
    command = [sys.executable, "-m", "snapshotd", "--socket", str(shared_daemon.socket_path), "mcp"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert _answer(process, json.dumps(HELLO).encode())["id"] == 1
        yield process
        process.kill()


def _answer(process: subprocess.Popen[bytes], line: bytes) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + b"\n")
    return json.loads(process.stdout.readline())


def test_a_line_that_is_no_message_is_answered(stdio: subprocess.Popen[bytes]) -> None:
    call = b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "list", "arguments": {"x": %s}}}'
    for line, number, code in [
        (b"{", None, -32700),
        (call % b'"\\ud800"', 7, -32700),
        (call % (b"[" * 100_000), None, -32700),
        (b'{"jsonrpc": "1.0", "id": "a", "method": "ping"}', "a", -32600),
        (b'{"jsonrpc": "2.0", "id": 8, "method": "ping", "params": [1]}', 8, -32600),
        (b'{"jsonrpc": "2.0", "id": 9, "result": null}', None, -32600),  # an answer is no request
        (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}', "?", -32700),
        (b"[]", None, -32600),
    ]:
        answer = _answer(stdio, line)
        assert (answer["id"], answer["error"]["code"]) == (number, code), line[:100]
    assert _answer(stdio, b'\n{"jsonrpc": "2.0", "id": 10, "method": "ping"}') == {
        "jsonrpc": "2.0",
        "id": 10,
        "result": {},
    }


def test_a_client_that_reads_no_more_is_no_defect(stdio: subprocess.Popen[bytes]) -> None:
    assert stdio.stdin is not None
    assert stdio.stdout is not None
    assert stdio.stderr is not None
    stdio.stdout.close()
    stdio.stdin.write(b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}\n')
    stdio.stdin.close()
    assert stdio.stderr.read() == b""
    assert stdio.wait(60) == 0
