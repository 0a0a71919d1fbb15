"""What people know of Docker works on a Docker sandbox: `docker ps`, `docker exec` and `docker logs`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.support import AGENT, Snap, wait_until

pytestmark = pytest.mark.docker


def _docker(engine: str, *args: str) -> str:
    return subprocess.run(
        ["docker", "-H", engine, *args], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_ps_and_exec_show_the_sandbox_as_it_is_now(snap: Snap, docker_engine: str) -> None:
    trajectory, _ = snap.create("--runtime", "docker")
    snap.sh(trajectory, "echo one > f")
    info = next(p for p in snap.json("ps") if p["trajectory"] == trajectory)
    listed = _docker(
        docker_engine, "ps", "--no-trunc", "--format", '{{.Image}} {{.Label "snapshotd.container"}} {{.ID}}'
    )
    (line,) = [line for line in listed.splitlines() if info["container"] in line]
    assert line.startswith("snapshotd/default")
    container = line.split()[-1]
    assert _docker(docker_engine, "exec", container, "cat", "/workspace/f") == "one\n"
    _docker(docker_engine, "exec", container, "sh", "-c", "echo two > /workspace/f")
    assert snap.sh(trajectory, "cat f")["stdout"] == "two\n"
    snap("rm", "--force", trajectory)


def test_logs_show_what_the_agent_prints(snap: Snap, docker_engine: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        AGENT + 'print("hello from the agent", flush=True)\nshell("true")\nimport time; time.sleep(1000)\n'
    )
    running = snap("run", "--detach", "--runtime", "docker", agent).stdout.strip()
    wait_until(lambda: any(p["trajectory"] == running for p in snap.json("ps")), "the sandbox is up")
    info = next(p for p in snap.json("ps") if p["trajectory"] == running)
    container = _docker(docker_engine, "ps", "-q", "--filter", f"label=snapshotd.container={info['container']}").strip()
    wait_until(lambda: "hello from the agent" in _docker(docker_engine, "logs", container), "docker logs has the line")
    snap("rm", "--force", running)
