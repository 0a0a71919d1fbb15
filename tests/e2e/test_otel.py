"""Spans of steps, model calls and forks, as an OTLP endpoint gets them over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import PROGRAMS, Agents, bash, provider
from tests.e2e.plug_rig import ROOT
from tests.e2e.support import Snap, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged")]


class Endpoint:
    """Takes traces as a collector does. `status`: what it answers."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.times = 0
        self.status = 200
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                if endpoint.status == 200:
                    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                        for scope in group.scope_spans:
                            for span in scope.spans:
                                endpoint.spans[span.span_id.hex()] = span
                endpoint.times += 1
                self.send_response(endpoint.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def names(self, trajectory: str) -> list[str]:
        found = [span for span in self.spans.values() if span.trace_id.hex() == trajectory]
        return [span.name for span in sorted(found, key=lambda span: (span.start_time_unix_nano, span.name))]

    def span(self, record: str) -> dict[str, Any]:
        """Attributes of the span of a snapshot or an entry."""
        return {one.key: _value(one.value) for one in self.spans[record[-16:]].attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def command(*refs: str) -> list[str]:
    return [sys.executable, "-m", "snapshotd.integrations.otel", *refs]


def variables(snap: Snap, endpoint: Endpoint, **more: str) -> dict[str, str]:
    return {**snap.env, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "2", **more}


def run(snap: Snap, endpoint: Endpoint, *refs: str, code: int = 0, **more: str) -> str:
    env = variables(snap, endpoint, **more)
    done = subprocess.run(command(*refs), env=env, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done.stderr


def test_steps_failures_rewinds_and_forks_are_spans(plugged: Snap, endpoint: Endpoint) -> None:
    box, first = plugged.create("--name", "worker")
    good = plugged.sh(box, "echo 1 > a")["snapshot"]
    bad = plugged.sh(box, "exit 3", code=3)["snapshot"]
    plugged("rewind", box, good)
    (fork,) = plugged.json("fork", good)["trajectories"]
    plugged.sh(fork, "echo 2 > b")
    for _ in range(2):
        run(plugged, endpoint, box, fork)
    assert sorted(endpoint.names(box)) == [
        "execute_tool exec",
        "execute_tool exec",
        "invoke_agent worker",
        "snapshotd rewind",
        "snapshotd start",
    ], "twice the same spans"
    told = endpoint.span(good)
    assert told["snapshotd.snapshot.id"] == good
    assert told["snapshotd.snapshot.parent"] == first
    assert (told["gen_ai.operation.name"], told["gen_ai.tool.name"]) == ("execute_tool", "exec")
    assert "gen_ai.tool.call.arguments" not in told
    failed = endpoint.spans[bad[-16:]]
    assert (failed.status.code, failed.parent_span_id.hex()) == (2, box[-16:])
    root = endpoint.spans[fork[-16:]]
    (link,) = root.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (box, good[-16:])
    run(plugged, endpoint, box, OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT="true")
    assert "echo 1 > a" in endpoint.span(good)["gen_ai.tool.call.arguments"]
    assert "nowhere" in run(plugged, endpoint, "nowhere", code=4)


@pytest.mark.long  # an endpoint that lives: the test before
def test_what_happens_is_followed_and_a_dead_endpoint_gets_it_later(plugged: Snap, endpoint: Endpoint) -> None:
    old, _ = plugged.create()
    before = plugged.sh(old, "true")["snapshot"]
    endpoint.status = 503
    with subprocess.Popen(command(), env=variables(plugged, endpoint), cwd=ROOT, stderr=subprocess.PIPE) as program:
        wait_until(lambda: plugged.json("stats")["watchers"] == 1, "it watches")
        new, _ = plugged.create()
        taken = [plugged.sh(box, "true")["snapshot"] for box in (old, new)]
        wait_until(lambda: endpoint.times > 0, "it has tried")
        assert endpoint.spans == {}
        endpoint.status = 200
        wait_until(lambda: {one[-16:] for one in taken} <= endpoint.spans.keys(), "the spans have come")
        assert before[-16:] not in endpoint.spans
        program.terminate()


@pytest.mark.long  # other calls are: the first test
def test_model_calls_are_spans(plugged: Snap, endpoint: Endpoint, tmp_path: Path) -> None:
    agents = Agents(plugged, "runc")
    with provider(tmp_path, bash("echo 1 > a"), {"text": "done"}) as at:
        trajectory = agents.run(at, PROGRAMS / "plain_agent.py", "please")
    run(plugged, endpoint, trajectory)
    calls = [entry for entry in plugged.json("journal", trajectory) if entry["kind"] == "model"]
    assert len(calls) == 2
    for call in calls:
        told = endpoint.span(call["id"])
        assert told["gen_ai.operation.name"] == "chat"
        assert told["gen_ai.request.model"] == call["name"]
        assert told["gen_ai.usage.output_tokens"] > 0


def test_a_question_for_help_is_no_trajectory() -> None:
    done = subprocess.run(command("--help"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "TRAJECTORY" in done.stdout
