"""Asking a daemon over HTTP, without our client."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.api.wire import API_VERSION, VERSION_HEADER
from tests.unit.daemon.process import Daemon

JSON = {"Content-Type": "application/json"}


class Connection(http.client.HTTPConnection):
    """HTTP over the daemon's socket, without our client."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__("snapshotd", timeout=60)
        self._path = daemon.socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def ask(
    daemon: Daemon, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """One request; status and decoded JSON (or None)."""
    connection = Connection(daemon)
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, "/v1" + path, data, {**(JSON if data else {}), **(headers or {})})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.headers[VERSION_HEADER] == API_VERSION
    return answer.status, json.loads(text) if text else None


def lines(daemon: Daemon, method: str, path: str, body: Any = None) -> list[dict[str, Any]]:
    connection = Connection(daemon)
    connection.request(method, "/v1" + path, None if body is None else json.dumps(body), JSON)
    text = connection.getresponse().read()
    connection.close()
    return [json.loads(line) for line in text.splitlines()]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


def memory_of(daemon: Daemon) -> int:
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10
