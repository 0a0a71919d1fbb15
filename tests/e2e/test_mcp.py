"""`snapshotd mcp` with a real daemon and real sandboxes: over stdio and HTTP, cancelled, killed, and asked for a person's
decision; and the programs of docs/integrations/mcp.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.console import environment
from tests.e2e.support import Snap, processes_with, wait_until
from tests.mcp_rig import MODES, Spoken, speaking, until

pytestmark = pytest.mark.runc
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "mcp.md"
BEATS = "sleep 1000 & echo begun; while :; do sleep 0.1; date >> beats; done"


def play(snap: Snap, scene: Callable[[Spoken], Awaitable[None]], *options: str, **more: Any) -> None:
    """Plays a scene with a client that has started `snapshotd mcp`."""
    from mcp import StdioServerParameters  # a second

    command = [sys.executable, "-m", "snapshotd", "mcp", *options]
    started = StdioServerParameters(command=command[0], args=command[1:], env=snap.env, cwd=ROOT)

    async def main() -> None:
        async with speaking(started, **more) as spoken:
            await scene(spoken)

    asyncio.run(asyncio.wait_for(main(), 200))


async def has_file(call: Spoken, box: str, name: str) -> bool:
    return f"/workspace/{name}" in {one["path"] for one in (await call("list_files", ref=box))["files"]}


def beating(call: Spoken, box: str) -> asyncio.Task[Any]:
    return asyncio.create_task(call.client.call_tool("exec", {"trajectory": box, "command": BEATS}))


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
def test_an_agent_rewinds_its_sandbox_over_stdio(own_snap: Snap, mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        good = await call("exec", trajectory=box, command="mkdir -p a/b; echo 1 > a/b/c; id -u; ls /root/.ssh 2>&1")
        assert good["stdout"].startswith("0\n")
        await call("exec", trajectory=box, command="rm -r a; echo junk > /etc/passwd")
        await call("rewind", trajectory=box, to=good["snapshot"])
        assert (await call("exec", trajectory=box, command="cat a/b/c; head -c 4 /etc/passwd"))["stdout"] == "1\nroot"
        (info,) = (await call("list"))["trajectories"]
        assert (info["id"], info["network"]) == (box, "none")
        own_snap("rm", "--force", box)

    play(own_snap, scene, mode=mode)


@pytest.mark.long  # over HTTP: test_over_http_with_a_person
def test_a_cancelled_call_ends_everything_that_it_started(own_snap: Snap) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        running = beating(call, box)
        await until(lambda: has_file(call, box, "beats"), "it beats")
        assert "sleep" in own_snap.programs(box)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

        async def ended() -> bool:
            return "sleep" not in own_snap.programs(box)

        await until(ended, "the command ended")
        own_snap("rm", "--force", box)

    play(own_snap, scene)


@pytest.mark.long  # one that cancels: test_over_http_with_a_person
def test_a_client_that_goes_away_ends_its_command(own_snap: Snap) -> None:
    boxes: list[str] = []

    async def scene(call: Spoken) -> None:
        boxes.append((await call("create"))["id"])
        running = beating(call, boxes[0])
        await until(lambda: has_file(call, boxes[0], "beats"), "it beats")
        running.cancel()  # here only: the connection is closed at once
        with contextlib.suppress(asyncio.CancelledError):
            await running

    play(own_snap, scene)
    wait_until(lambda: "sleep" not in own_snap.programs(boxes[0]), "the command ended")
    own_snap("rm", "--force", boxes[0])


@pytest.mark.long  # a request that is sent again: test_asked_again.py
def test_a_daemon_that_dies_within_a_call(own_snap: Snap) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        waits = "echo begun > begun; while ! [ -e go ]; do sleep 0.05; done; echo done"
        running = asyncio.create_task(call("exec", trajectory=box, command=waits))
        await until(lambda: has_file(call, box, "begun"), "it runs")
        own_snap.kill_daemon()
        await call("write_file", trajectory=box, path="go", content="")
        done = await running
        assert (done["exit_code"], done["stdout"]) == (0, "done\n")
        assert (await call("log", trajectory=box))["snapshots"][-1]["id"] == done["snapshot"]
        own_snap("rm", "--force", box)

    play(own_snap, scene)


@pytest.mark.long  # bad input is: unit/integrations/mcp/test_tools.py
def test_a_daemon_that_is_gone_is_one_sentence(own_snap: Snap, tmp_path: Path) -> None:
    async def scene(call: Spoken) -> None:
        own_snap.stop_daemon()
        code, message = await call.fails("list")
        assert code == "DaemonUnavailable"
        assert "snapshotd" in message

    socket = own_snap.json("daemon", "--status").get("socket") or str(own_snap.state_dir / "snapshotd.sock")
    elsewhere = Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_RECONNECT_S": "0"})
    elsewhere.env.pop("SNAPSHOTD_STATE_DIR")
    play(elsewhere, scene, "--socket", socket)
    own_snap("ls")


@pytest.fixture
def served(own_snap: Snap, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a server over HTTP, and its token."""
    file = tmp_path / "token"
    command = [sys.executable, "-m", "snapshotd", "mcp", "--http", "0", "--token-file", str(file)]
    process = subprocess.Popen(command, env=own_snap.env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline()
    yield said.split()[0], file.read_text().strip()
    process.send_signal(signal.SIGTERM)
    process.stderr.close()
    assert process.wait(30) in (0, -signal.SIGTERM)


@contextlib.asynccontextmanager
async def connected(address: str, token: str, **more: Any) -> AsyncIterator[Spoken]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        speaking(streamable_http_client(address, http_client=http), **more) as spoken,
    ):
        yield spoken


@pytest.mark.parametrize("mode", long.some(MODES, 1))
def test_over_http_with_a_person(own_snap: Snap, served: tuple[str, str], mode: str) -> None:
    policy = own_snap.state_dir / "policy.toml"
    policy.write_text('[[rule]]\nname = "exec"\narguments = { argv = "deploy" }\naction = "approve"\n')
    said: list[str] = []

    async def answer(_context: Any, params: Any) -> Any:
        from mcp_types import ElicitResult

        said.append(params.message)
        return ElicitResult(action="accept", content={"approve": True})

    async def main() -> None:
        async with connected(*served, mode=mode, elicitation_callback=answer) as call:
            box = (await call("create"))["id"]
            done = await call("exec", trajectory=box, command="echo deploy; hostname > h")
            assert done["stdout"] == "deploy\n"
            (approval,) = [one for one in own_snap.json("approvals", "--all") if one["trajectory"] == box]
            assert approval["digest"] in said[0]
            assert approval["status"] == "approved"
            running = beating(call, box)
            await until(lambda: has_file(call, box, "beats"), "it beats")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

            async def ended() -> bool:
                return "sleep" not in own_snap.programs(box)

            await until(ended, "the command ended")
            own_snap("rm", "--force", box)

    try:
        asyncio.run(asyncio.wait_for(main(), 200))
    finally:
        policy.unlink()


@pytest.mark.long  # unit/integrations/mcp/test_transports.py
def test_over_http_nobody_else_gets_in(served: tuple[str, str]) -> None:
    import httpx2

    address, token = served
    assert address.startswith("http://127.0.0.1:")
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {token}", "origin": "https://evil.example"}, 403),
        ({"authorization": f"Bearer {token}", "host": "evil.example"}, 421),
    ):
        assert httpx2.post(address, json={}, headers=headers).status_code == status


@pytest.mark.long  # versions: unit/integrations/test_versions.py
def test_what_is_missing_is_said(own_snap: Snap, tmp_path: Path) -> None:
    assert "nowhere" in own_snap("mcp", "--trajectory", "nowhere", code=4).stderr
    assert "--http" in own_snap("mcp", "--token-file", tmp_path / "t", code=2).stderr
    (tmp_path / "mcp-1.30.0.dist-info").mkdir()
    (tmp_path / "mcp-1.30.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 1.30.0\n")
    old = subprocess.run(
        [sys.executable, "-m", "snapshotd", "mcp"],
        env={**own_snap.env, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (old.returncode, old.stdout) == (7, "")
    assert (
        old.stderr
        == "snapshotd: mcp is 1.30.0, but 2.3 or newer below 3 is needed: run `pip install 'snapshotd[mcp]'`\n"
    )


@pytest.mark.long  # its calls are those of the first test
def test_the_program_of_the_page_prints_what_it_shows(own_snap: Snap, tmp_path: Path) -> None:
    shown = re.search(r"\$ python3 rewinding\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    env = environment(own_snap, tmp_path / "bin")
    snapshotd = tmp_path / "bin" / "snapshotd"  # the SDK gives a server few of its client's variables
    snapshotd.write_text(
        f'#!/bin/sh\nexport SNAPSHOTD_STATE_DIR={own_snap.state_dir} PYTHONPATH={ROOT}\nexec {sys.executable} -m snapshotd "$@"\n'
    )
    snapshotd.chmod(0o755)
    program = ROOT / "docs" / "examples" / "integrations" / "rewinding.py"
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (shown[1], "")
    own_snap("rm", "--force", "job")


def test_nothing_is_left_of_the_servers() -> None:
    assert [line for pid, line in processes_with("snapshotd mcp") if pid != os.getpid()] == []
