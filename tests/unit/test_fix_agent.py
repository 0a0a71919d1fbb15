"""The example agent with a real model's protocol: a scripted HTTP server plays the model, the tools and the tests are
real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "docs/examples/fix_agent.py"
WRONG, RIGHT = "return a - b", "return a + b"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("run_tests", {"paths": []}),
    ("read_file", {"path": "add.py"}),
    ("edit_file", {"path": "add.py", "old": "no such text", "new": ""}),
    ("edit_file", {"path": "add.py", "old": WRONG, "new": RIGHT}),
]


def openai(step: int) -> dict[str, Any]:
    if step >= len(CALLS):
        return {"choices": [{"message": {"content": "done"}}]}
    name, arguments = CALLS[step]
    call = {"id": f"c{step}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}


def anthropic(step: int) -> dict[str, Any]:
    if step >= len(CALLS):
        return {"content": [{"type": "text", "text": "done"}]}
    name, arguments = CALLS[step]
    return {
        "content": [
            {"type": "text", "text": "next"},
            {"type": "tool_use", "id": f"c{step}", "name": name, "input": arguments},
        ]
    }


class Model(ThreadingHTTPServer):
    """Answers request n with `reply(n)` and keeps what it was asked."""

    def __init__(self, reply: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.asked: list[tuple[str, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps(self.server.reply(len(self.server.asked))).encode()
        self.server.asked.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "add.py").write_text(f"def add(a, b):\n    {WRONG}\n")
    (tmp_path / "test_add.py").write_text("from add import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    return tmp_path


@pytest.fixture(params=[openai, anthropic])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    server = Model(request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_agent(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "ANTHROPIC_", "PYTEST_"))}
    environment = {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "no_proxy": "127.0.0.1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **variables,
    }
    command = [sys.executable, str(AGENT)]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def variables_for(model: Model) -> dict[str, str]:
    url = f"http://127.0.0.1:{model.server_port}"
    if model.reply is openai:
        return {"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": "k"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k"}


def test_a_model_repairs_the_project_and_sees_every_result(project: Path, model: Model) -> None:
    done = run_agent(project, **variables_for(model))
    assert done.returncode == 0, done.stdout + done.stderr
    assert RIGHT in (project / "add.py").read_text()
    assert "result: 1 passed, 0 failed" in done.stdout
    assert {path for path, _ in model.asked} == {"/v1/chat/completions" if model.reply is openai else "/v1/messages"}
    check_what_the_model_saw(model, model.asked[-1][1])


def check_what_the_model_saw(model: Model, last: dict[str, Any]) -> None:
    """Every result, and every error of a tool."""
    if model.reply is openai:
        results = [m["content"] for m in last["messages"] if m["role"] == "tool"]
        ids = [m["tool_call_id"] for m in last["messages"] if m["role"] == "tool"]
    else:
        blocks = [
            block
            for m in last["messages"]
            if m["role"] == "user"
            for block in m["content"]
            if block["type"] == "tool_result"
        ]
        results, ids = [block["content"] for block in blocks], [block["tool_use_id"] for block in blocks]
    assert ids == ["c0", "c1", "c2", "c3"]
    assert json.loads(results[0])["failing"] == ["test_add.py::test_add"]
    assert WRONG in json.loads(results[1])
    assert "occurs 0 times" in json.loads(results[2])
    assert json.loads(results[3]) == "edited add.py"


def test_a_model_that_gives_up_is_not_a_success(project: Path, model: Model) -> None:
    reply = model.reply
    variables = variables_for(model)
    model.reply = lambda _: reply(len(CALLS))
    done = run_agent(project, **variables)
    assert done.returncode == 1
    assert "result: 0 passed, 1 failed test_add.py::test_add" in done.stdout


def test_an_unreachable_model_says_what_a_sandbox_needs(project: Path) -> None:
    done = run_agent(project, OPENAI_BASE_URL="http://127.0.0.1:1/v1")
    assert done.returncode == 2
    assert "--network bridge" in done.stderr
