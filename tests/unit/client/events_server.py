"""A real HTTP server on a unix socket that serves the events of one run as a daemon does, and dies in the middle as it
is told."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotd.api.wire import API_VERSION, VERSION_HEADER

TRAJECTORY = "a" * 32


def trajectory(status: str) -> dict[str, Any]:
    """As the API tells of one."""
    return {
        "id": TRAJECTORY,
        "name": None,
        "status": status,
        "head": "b" * 32,
        "image": "default",
        "runtime": "runc",
        "network": "none",
        "limits": {"memory_bytes": 1 << 30, "cpus": 1.0, "pids": 512, "disk_bytes": 0},
        "agent": None,
        "created_at": "2026-01-01T00:00:00Z",
        "forked_from": None,
        "experiment": None,
        "exit_code": None,
    }


@dataclass(frozen=True)
class Answer:
    """How one request for the events is answered: with so many of them (None: all there are, and those to come until
    `finished`), then `more` bytes of what is no line yet; at last the answer ends as it should (`whole`) or the
    connection breaks."""

    events: int | None = None
    more: bytes = b""
    whole: bool = False


@dataclass
class EventsServer:
    """`answers` are for the requests in their order; behind the last, all events are served. `requests` is what
    came."""

    path: Path
    events: list[dict[str, Any]]
    answers: list[Answer] = field(default_factory=list)
    status: str = "running"
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._server: socketserver.ThreadingUnixStreamServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        outer = self

        class Handler(_Handler):
            served = outer

        self._server = _Server(str(self.path), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="events-server"
        )
        self._thread.start()

    def stop(self) -> None:
        """Nobody answers any more. Not an error when it has not started."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = None
        self.path.unlink()

    def append(self, *events: dict[str, Any]) -> None:
        with self.changed:
            self.events.extend(events)
            self.changed.notify_all()

    def take(self, index: int) -> dict[str, Any] | None:
        """The event of that number, waited for; None when there will be none."""
        with self.changed:
            self.changed.wait_for(
                lambda: index < len(self.events) or any(one["event"] == "finished" for one in self.events), 60
            )
            return self.events[index] if index < len(self.events) else None

    @property
    def asked(self) -> int:
        """How often the events were asked for."""
        return sum("/events" in one for one in self.requests)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away


class _Handler(http.server.BaseHTTPRequestHandler):
    served: EventsServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        served = self.served
        served.requests.append(f"GET {self.path}")
        if "/events" not in self.path:
            self._json(trajectory(served.status))
            return
        answer = served.answers.pop(0) if served.answers else Answer(whole=True)
        self.send_response(200)
        self.send_header(VERSION_HEADER, API_VERSION)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self._events(answer):
            self._chunk(json.dumps(event).encode() + b"\n")
        if answer.more:
            self._chunk(answer.more)
        if answer.whole:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def do_POST(self) -> None:
        self.served.requests.append(f"POST {self.path}")
        self.close_connection = True  # read, and never answered

    def _events(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in itertools.count() if answer.events is None else range(answer.events):
            event = self.served.take(index)
            if event is None:
                return
            yield event

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header(VERSION_HEADER, API_VERSION)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
        pass


@contextlib.contextmanager
def serving(server: EventsServer) -> Iterator[EventsServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()
