"""A model provider that follows a script: OpenAI chat completions and responses, Anthropic messages, and Gemini
contents, plain and streamed.

    python -m snapshotd.testing.provider --script FILE [--port 0] [--with-stdin]

prints its URL and serves until it is ended. The script is JSON: a list of steps, or an object:

    steps     the model's replies, in order
    models    {name: steps}: other steps for requests that name this model
    conversations  {text: steps}: other steps for conversations whose first words of the user hold this text; the first that fits
    toolless  steps for requests that offer no tools (the title of a conversation, for one)
    by        the step that a request gets: "turns" (default): the number of replies that its conversation holds already, so that a resumed
              or forked agent meets the same step again; "results": the number of tool results; "sequence": the next one
    refuses   [FIELD]: requests that have one of these fields get an error 400 that names it
    api_key   the key that requests must carry; without it, any key is accepted

A step:

    text         the text of the reply
    calls        [{name, arguments, id?, namespace?}]: tools that it wants called
    usage        {input, output, cached}: tokens
    piece_chars  length of a stream's deltas (8)
    hold         name of a gate: the reply waits until it is released; with `hold_after`: N, a stream waits after its N-th event
    delay_s      wait before the reply
    failures     the first requests that meet this step get one entry each, before it is played as it stands. An entry is laid
                 over the step: {"status": 429, "headers": {...}, "message": ..., "type": ...} an error, {"drop": true} the connection ends
                 without an answer, {"cut_after": N} it ends after N events of a stream, or N bytes of a plain reply.
                 A step that has one of these itself plays it every time.

Besides: `GET /control/requests` (everything asked so far: path, headers, body, step, attempt), `POST
/control/release/GATE`, `POST /control/reset` (forgets requests, attempts and gates). `/v1/models`, `/v1/embeddings` and
`/v1/messages/count_tokens`, and those of Gemini, are answered. In a test, `ScriptedProvider` is the same in this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from snapshotd.testing.provider_wire import WIRES, Call, Reply, Wire

GATE_S = 120.0
"""The longest that a reply is held."""
_BODY_LIMIT_BYTES = 128 << 20


class ScriptedProvider:
    """A provider on a port of 127.0.0.1, from construction until `close`. All methods may be called from any thread."""

    def __init__(self, script: list[dict[str, Any]] | dict[str, Any], port: int = 0) -> None:
        self._script: dict[str, Any] = {"steps": script} if isinstance(script, list) else script
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Event] = {}
        self._attempts: dict[tuple[str, int, str], int] = {}
        self._requests: list[dict[str, Any]] = []
        self._next = 0
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.provider = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="provider", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL of clients of Anthropic and Gemini; those of OpenAI add `/v1`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Every request so far: path, headers, body, and for turns step (None: beyond the script) and attempt (from
        0)."""
        with self._lock:
            return list(self._requests)

    def release(self, gate: str) -> None:
        """Open a gate: replies that it holds go out, and later ones are not held."""
        self._gate(gate).set()

    def reset(self) -> None:
        """Forget all requests, attempts and gates."""
        with self._lock:
            self._requests.clear()
            self._attempts.clear()
            self._gates.clear()
            self._next = 0

    def close(self) -> None:
        """End all connections and threads."""
        self._closing.set()
        with self._lock:
            for gate in self._gates.values():
                gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()  # joins the connections' threads

    def __enter__(self) -> ScriptedProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, path: str, headers: dict[str, str], body: Any, **more: Any) -> None:
        """Remember a request."""
        with self._lock:
            self._requests.append({"path": path, "headers": headers, "body": body, **more})

    def is_authorized(self, headers: dict[str, str]) -> bool:
        key = self._script.get("api_key")
        given = (headers.get(name) for name in ("x-api-key", "x-goog-api-key"))
        return key is None or headers.get("authorization") == f"Bearer {key}" or key in given

    def find_refused(self, body: dict[str, Any]) -> str | None:
        """The field of a request that the script does not let pass."""
        return next((name for name in self._script.get("refuses", ()) if name in body), None)

    def play(self, wire: Wire, body: dict[str, Any], raw: bytes) -> tuple[int, int, dict[str, Any] | None]:
        """Number, attempt and step that a request meets; no step beyond the end of the script."""
        by, model = self._script.get("by", "turns"), str(body.get("model"))
        lane, steps = self._steps(wire, body, model)
        with self._lock:
            number = (
                self._sequence_step(steps)
                if by == "sequence"
                else wire.results(body)
                if by == "results"
                else wire.turns(body)
            )
            if number >= len(steps):
                return number, 0, None
            identity = (f"{model} {lane}", number, "" if by == "sequence" else hashlib.sha256(raw).hexdigest())
            attempt = self._attempts.get(identity, 0)
            self._attempts[identity] = attempt + 1
        step = {"lane": lane, **steps[number]}
        failures = step.pop("failures", [])
        return number, attempt, {**step, **failures[attempt]} if attempt < len(failures) else step

    def _steps(self, wire: Wire, body: dict[str, Any], model: str) -> tuple[str, list[dict[str, Any]]]:
        """The steps of the conversation that a request belongs to, and a name for it."""
        if "toolless" in self._script and not body.get("tools"):
            return "toolless_", self._script["toolless"]
        opening = json.dumps(wire.opening(body), ensure_ascii=False)
        for number, (text, steps) in enumerate(self._script.get("conversations", {}).items()):
            if text in opening or wire.continued_lane(body) == f"lane{number}_":
                return f"lane{number}_", steps
        return "", self._script.get("models", {}).get(model, self._script.get("steps", []))

    def wait(self, step: dict[str, Any]) -> None:
        """Wait as the step says."""
        if step.get("delay_s"):
            self._closing.wait(float(step["delay_s"]))
        if step.get("hold"):
            self._gate(str(step["hold"])).wait(GATE_S)

    def _sequence_step(self, steps: list[dict[str, Any]]) -> int:
        """Number of the step to play: it stays until its failures are used up and it was played once."""
        while self._next < len(steps) and self._count_played(self._next) > len(steps[self._next].get("failures", [])):
            self._next += 1
        return self._next

    def _count_played(self, number: int) -> int:
        return sum(count for (_, step, _), count in self._attempts.items() if step == number)

    def _gate(self, name: str) -> threading.Event:
        with self._lock:
            gate = self._gates.setdefault(name, threading.Event())
            if self._closing.is_set():
                gate.set()
            return gate


class _Server(ThreadingHTTPServer):
    """Threads that are waited for at the end; connections that can be ended."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    provider: ScriptedProvider

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._open_lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # a peer that left is no error


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each stream waits 40 ms for an acknowledgement
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Silent: standard error belongs to the parent process."""

    def do_GET(self) -> None:
        if self.path == "/control/requests":
            return self._json(200, self.server.provider.requests)
        self.server.provider.note(self.path, self._headers(), None)
        if self.path.partition("?")[0] == "/v1/models":
            models = [
                {
                    "id": "scripted",
                    "object": "model",
                    "created": 0,
                    "owned_by": "snapshotd",
                    "type": "model",
                    "display_name": "Scripted",
                    "created_at": "2024-01-01T00:00:00Z",
                }
            ]
            return self._json(
                200,
                {"object": "list", "data": models, "has_more": False, "first_id": "scripted", "last_id": "scripted"},
            )
        if self.path.partition("?")[0] == "/v1beta/models":
            return self._json(200, {"models": [{"name": "models/scripted", "displayName": "Scripted"}]})
        return self._json(404, {"error": {"type": "not_found_error", "message": f"no {self.path}"}})

    def do_POST(self) -> None:
        provider = self.server.provider
        raw = self.rfile.read(min(int(self.headers.get("content-length") or 0), _BODY_LIMIT_BYTES))
        path = self.path.partition("?")[0]
        if path.startswith("/control/release/"):
            provider.release(path.rpartition("/")[2])
            return self._json(200, {})
        if path == "/control/reset":
            provider.reset()
            return self._json(200, {})
        body = json.loads(raw)
        for wire in WIRES.values():
            if (request := wire.request(path, body)) is not None:
                return self._turn(wire, request, raw)
        provider.note(self.path, self._headers(), body)
        if path == "/v1/messages/count_tokens":
            return self._json(200, {"input_tokens": len(raw)})
        if path.endswith(":countTokens"):
            return self._json(200, {"totalTokens": len(raw)})
        if path == "/v1/embeddings":
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
            return self._json(200, {"object": "list", "data": [vector], "model": body.get("model"), "usage": usage})
        return self._json(404, {"error": {"type": "not_found_error", "message": f"no {path}"}})

    def _turn(self, wire: Wire, body: dict[str, Any], raw: bytes) -> None:
        provider, headers = self.server.provider, self._headers()
        if not provider.is_authorized(headers):
            provider.note(self.path, headers, body, step=None, attempt=0)
            return self._json(401, wire.error(401, "authentication_error", "the key is wrong"))
        refused = provider.find_refused(body)
        if refused is not None:
            provider.note(self.path, headers, body, refused=refused)
            return self._json(
                400, wire.error(400, "invalid_request_error", f"Unrecognized request argument: {refused}")
            )
        number, attempt, step = provider.play(wire, body, raw)
        provider.note(self.path, headers, body, step=None if step is None else number, attempt=attempt)
        if step is None:
            return self._json(400, wire.error(400, "invalid_request_error", f"the script has no step {number}"))
        after = step.get("hold_after")
        if after is None:
            provider.wait(step)
        if step.get("drop"):
            return self._drop()
        if step.get("status"):
            error = wire.error(step["status"], step.get("type", "scripted_error"), step.get("message", "scripted"))
            return self._json(step["status"], error, step.get("headers"))
        reply = _reply(number, body, step)
        if body.get("stream") is True:
            return self._stream(wire, reply, step)
        return self._json(200, wire.plain(reply), step.get("headers"), step.get("cut_after"))

    def _stream(self, wire: Wire, reply: Reply, step: dict[str, Any]) -> None:
        self.send_response(200)
        for name, value in {
            "content-type": "text/event-stream",
            "transfer-encoding": "chunked",
            **(step.get("headers") or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        for number, event in enumerate(wire.stream(reply)):
            if number == step.get("hold_after"):
                self.server.provider.wait(step)
            if number == step.get("cut_after"):
                return self._drop()
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _json(
        self, status: int, value: Any, headers: dict[str, str] | None = None, cut_after: int | None = None
    ) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "content-type": "application/json",
            "x-request-id": "req_scripted",
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut_after])
        self.wfile.flush()
        if cut_after is not None:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}


def _reply(number: int, body: dict[str, Any], step: dict[str, Any]) -> Reply:
    calls = tuple(
        Call(
            call.get("id") or f"call_{step.get('lane', '')}{number}_{position}",
            call["name"],
            call.get("arguments", {}),
            call.get("namespace"),
        )
        for position, call in enumerate(step.get("calls", []))
    )
    text = step.get("text")
    usage = step.get("usage", {})
    return Reply(
        number,
        str(body.get("model")),
        text if text is not None or calls else "",
        calls,
        usage.get("input", 10),
        usage.get("output", 5),
        usage.get("cached", 0),
        step.get("piece_chars", 8),
        body,
        step.get("lane", ""),
    )


def main(arguments: list[str] | None = None) -> None:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m snapshotd.testing.provider", description="A model provider that follows a script."
    )
    parser.add_argument("--script", type=Path, required=True, help="JSON file with the steps")
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1; 0 takes a free one")
    parser.add_argument("--with-stdin", action="store_true", help="end when standard input ends")
    options = parser.parse_args(arguments)
    with ScriptedProvider(json.loads(options.script.read_text()), options.port) as provider:
        sys.stdout.write(provider.url + "\n")
        sys.stdout.flush()
        try:
            if options.with_stdin:
                sys.stdin.buffer.read()
            else:
                threading.Event().wait()
        except KeyboardInterrupt:
            pass  # how a person ends it


if __name__ == "__main__":
    main()
