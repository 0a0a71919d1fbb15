"""A gateway on a real socket, in front of a scripted provider, telling a handler that remembers."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from snapshotd.gateway.base import Budget, RecordedReply, TurnReply, TurnRequest, Upstream
from snapshotd.gateway.server import GatewayServer
from snapshotd.testing.provider import ScriptedProvider

DEADLINE_S = 60.0
MEMORY_BYTES = 512 << 20
KEY = "sk-of-the-daemon-0123456789"
AGENT_KEY = "sk-of-the-agent"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/m:generateContent"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "go"}]},
    RESPONSES: {"model": "m", "input": "go"},
    MESSAGES: {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "go"}]},
    GEMINI: {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
}


@dataclass
class Memory:
    """A handler that goes live, unless told otherwise, and remembers."""

    turns: list[TurnRequest] = field(default_factory=list)
    on_their_way: list[TurnRequest] = field(default_factory=list)
    replies: list[tuple[TurnRequest, TurnReply]] = field(default_factory=list)
    on_turn: Callable[[TurnRequest], RecordedReply | None] = lambda request: None
    on_sent: Callable[[], None] = lambda: None
    on_reply: Callable[[TurnReply], None] = lambda reply: None

    def turn(self, request: TurnRequest) -> RecordedReply | RememberedTurn:
        self.turns.append(request)
        return self.on_turn(request) or RememberedTurn(self, request)

    @property
    def reply(self) -> TurnReply:
        """The only one. Waits for it: after a cut it is told after the agent saw the end."""
        poll(lambda: self.replies)
        assert len(self.replies) == 1
        return self.replies[0][1]


@dataclass
class RememberedTurn:
    """A turn whose handler remembers it."""

    memory: Memory
    request: TurnRequest

    def sent(self) -> None:
        assert self.request not in self.memory.on_their_way
        self.memory.on_their_way.append(self.request)
        self.memory.on_sent()

    def replied(self, reply: TurnReply) -> None:
        self.memory.on_their_way.remove(self.request)
        self.memory.replies.append((self.request, reply))
        self.memory.on_reply(reply)


def poll(condition: Callable[[], Any]) -> Any:
    """The first true value; fails after a generous while."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return value


@contextmanager
def gateway(upstream_url: str, memory: Memory, **options: Any) -> Iterator[GatewayServer]:
    """A gateway in front of a provider. Afterwards none of its threads is left."""
    upstreams = {
        "openai": Upstream(upstream_url + "/v1", KEY),
        "anthropic": Upstream(upstream_url, KEY),
        "gemini": Upstream(upstream_url, KEY),
    }
    before = set(threading.enumerate())
    settings = {"upstreams": upstreams, "budget": Budget(MEMORY_BYTES), **options}
    server = GatewayServer(socket.create_server(("127.0.0.1", 0)), memory, **settings)
    try:
        yield server
    finally:
        server.close()
    assert [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("gateway")] == []


@contextmanager
def served(script: Any, **options: Any) -> Iterator[tuple[GatewayServer, ScriptedProvider, Memory]]:
    """The three together."""
    memory = Memory()
    with ScriptedProvider(script) as provider, gateway(provider.url, memory, **options) as server:
        yield server, provider, memory


@contextmanager
def raw_upstream(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A provider that is a function of a connection and the bytes of the first request's head; the connection is closed
    after it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            with connected:
                head = b""
                while b"\r\n\r\n" not in head and (data := connected.recv(65536)):
                    head += data
                if head:
                    _read_body(connected, head)
                    answer(connected, head)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _read_body(connected: socket.socket, head: bytes) -> None:
    """Unread bytes would reset the connection when it is closed, and take a part of the answer with them."""
    length = re.search(rb"\r\ncontent-length: *(\d+)\r\n", head, re.IGNORECASE)
    left = (0 if length is None else int(length[1])) - len(head.partition(b"\r\n\r\n")[2])
    while left > 0 and (data := connected.recv(min(left, 65536))):
        left -= len(data)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool = False

    @property
    def value(self) -> Any:
        return json.loads(self.body)


def ask(port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST") -> Answer:
    """One request over a connection of its own. `body`: bytes, or a value for JSON."""
    path, body = spelled(path, body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        usual = {"content-type": "application/json", "authorization": f"Bearer {AGENT_KEY}"}
        connection.request(method, path, data, {**usual, **(headers or {})})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        try:
            return Answer(response.status, found, response.read())
        except http.client.IncompleteRead as exc:
            return Answer(response.status, found, exc.partial, cut=True)
    finally:
        connection.close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def spelled(path: str, body: Any) -> tuple[str, Any]:
    """The path and the body of a request whose body has the field `stream`: Gemini's API says it by the path."""
    if not isinstance(body, dict) or path != GEMINI:
        return path, body
    stream = body.get("stream", False)
    other = path.replace(":generate", ":streamGenerate") + "?alt=sse" if stream else path
    return other, {name: value for name, value in body.items() if name != "stream"}


def streamed(path: str) -> dict[str, Any]:
    return {**BODIES[path], "stream": True}
