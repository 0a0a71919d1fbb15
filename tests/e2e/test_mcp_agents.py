"""`snapshotd mcp` with what others wrote: the official conformance runner, and Claude Code and Codex as they come from npm,
each with a scripted model that breaks its sandbox and rewinds it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_claude_code, test_codex
from tests.e2e.model_rig import KEY, Provider, from_npm, node, provider
from tests.e2e.support import Snap, wait_until

pytestmark = [pytest.mark.long, pytest.mark.runc, pytest.mark.timeout(1800)]
RUNNER = "@modelcontextprotocol/conformance"
RUNNER_VERSION = "0.1.16"
NOT_OFFERED = {
    "logging-set-level": "the protocol's logging, which is deprecated since 2026-07-28",
    "tools-call-with-logging": "the same",
    "resources-subscribe": "subscriptions to a resource, which are deprecated since 2026-07-28; a snapshot never changes",
    "resources-unsubscribe": "the same",
}
"""Scenarios of capabilities that the server does not have, and does not announce."""


def test_the_conformance_runner(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(__file__).with_name("programs") / "mcp_everything.py"
    server = subprocess.Popen([sys.executable, "-W", "ignore", program, tmp_path / "state", str(port)])
    try:
        wait_until(lambda: _answers(port), "the server answers", 60)
        runner = from_npm(RUNNER, RUNNER_VERSION, f"{RUNNER}/dist/index.js")
        done = subprocess.run(
            [node(), runner, "server", "--url", f"http://127.0.0.1:{port}/mcp", "--suite", "all"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
        )
    finally:
        server.terminate()
        server.wait(30)
    summary = done.stdout.partition("=== SUMMARY ===")[2]
    rows = re.findall(r"^(\S) ([\w-]+): (\d+) passed, (\d+) failed", summary, re.MULTILINE)
    record_property("told", f"{RUNNER} {RUNNER_VERSION}: {re.search('Total: .*', summary)[0]}")  # type: ignore[index]
    assert len(rows) == 32, done.stdout[-2000:] + done.stderr[-2000:]
    assert {name for _, name, _, failed in rows if failed != "0"} == NOT_OFFERED.keys()
    assert sum(int(passed) for _, _, passed, _ in rows) == 40
    page = (Path(__file__).parents[2] / "docs/integrations/mcp.md").read_text()
    assert all(f"`{name}`" in page for name in NOT_OFFERED)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _steps(prefix: str = "", **more: str) -> list[dict[str, Any]]:
    """A model that tidies too much, sees that, and goes back. `more`: of each of its calls."""

    def calls(text: str, tool: str, **arguments: Any) -> dict[str, Any]:
        call = {"name": f"{prefix}{tool}", "arguments": {"trajectory": "hands", **arguments}, **more}
        return {"text": text, "calls": [call]}

    return [
        calls("I build.", "exec", command="mkdir app && echo ok > app/config"),
        calls("I keep this.", "snapshot", name="built"),
        calls("I tidy up.", "exec", command="rm -r app"),
        calls("I look.", "exec", command="cat app/config"),
        calls("That was wrong: back.", "rewind", to="built"),
        calls("I look again.", "exec", command="cat app/config && echo better >> app/config"),
        {"text": "All is done."},
    ]


@pytest.fixture
def hands(own_snap: Snap) -> Iterator[None]:
    own_snap("create", "--name", "hands")
    yield
    own_snap("rm", "--force", "hands")


@pytest.fixture
def wrapper(own_snap: Snap, tmp_path: Path) -> Path:
    """`snapshotd` as a command, for agents that give a server few variables."""
    path = tmp_path / "snapshotd"
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!/bin/sh\nexport SNAPSHOTD_STATE_DIR={own_snap.state_dir} PYTHONPATH={root}\n"
        f'exec {sys.executable} -m snapshotd "$@"\n'
    )
    path.chmod(0o755)
    return path


def _rewound(snap: Snap) -> None:
    steps = [(step["tool"]["name"], step["tool"]["status"]) for step in snap.json("log", "hands")]
    assert steps[1:] == [
        ("exec", "done"),
        ("snapshot", "done"),
        ("exec", "done"),
        ("exec", "failed"),
        ("rewind", "done"),
        ("exec", "done"),
    ]
    assert snap("cat", "hands:app/config").stdout == "ok\nbetter\n"


def _home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "HOME": str(tmp_path / "home"), "IS_SANDBOX": "1"}


def _results(at: Provider) -> str:
    """All that the model was told."""
    return json.dumps([request["body"] for request in at.requests()])


def test_claude_code_rewinds(own_snap: Snap, hands: None, wrapper: Path, tmp_path: Path) -> None:
    claude = from_npm(test_claude_code.PACKAGE, test_claude_code.VERSION, f"{test_claude_code.PACKAGE}/claude")
    env = {**_home(tmp_path), "ANTHROPIC_API_KEY": KEY, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    waits = {"text": "I wait.", "calls": [{"name": "WaitForMcpServers", "arguments": {}}]}
    with provider(tmp_path, waits, *_steps("mcp__snapshotd__"), toolless=[{"text": "A title"}]) as at:
        env |= {"ANTHROPIC_BASE_URL": at.url, "DISABLE_AUTOUPDATER": "1"}
        added = ["mcp", "add", "snapshotd", "--", str(wrapper), "mcp"]
        subprocess.run([claude, *added], env=env, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        asked = ["-p", "make it better", "--dangerously-skip-permissions", "--model", "claude-sonnet-4-5"]
        done = subprocess.run([claude, *asked], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert (done.returncode, "All is done." in done.stdout) == (0, True), (done, at.asked())
        assert "No such file" in _results(at), _results(at)[-6000:]
    _rewound(own_snap)


def test_codex_rewinds(own_snap: Snap, hands: None, wrapper: Path, tmp_path: Path) -> None:
    codex = from_npm("@openai/codex", test_codex.VERSION, test_codex.FILE)
    env = {**_home(tmp_path), "CODEX_API_KEY": KEY}
    (tmp_path / "home" / ".codex").mkdir()
    (tmp_path / "home" / ".codex" / "config.toml").write_text(
        f'[mcp_servers.snapshotd]\ncommand = "{wrapper}"\nargs = ["mcp"]\ntool_timeout_sec = 900\nrequired = true\n'
    )
    with provider(tmp_path, *_steps(namespace="mcp__snapshotd")) as at:
        asked = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5"]
        asked += ["-c", f'openai_base_url="{at.url}/v1"', "make it better"]
        done = subprocess.run(
            [codex, *asked],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        assert (done.returncode, "All is done." in done.stdout) == (0, True), (done, at.asked())
        assert "No such file" in _results(at), _results(at)[-6000:]
    _rewound(own_snap)
