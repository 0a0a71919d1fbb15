"""HTTP on the loopback: who gets in."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotPermitted, SnapshotdError, UsageError
from snapshotd.integrations.token_file import token_of
from tests.mcp_rig import server_over

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
