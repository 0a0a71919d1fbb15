"""Which sandboxes a client of `snapshotd mcp` reaches, who is asked about its calls, and what it reads without a tool."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from snapshotd.client import AsyncSnapshotd
from tests.mcp_rig import MODES, Spoken, server_over, speaking
from tests.unit.daemon.process import Daemon

POLICY = """
[[rule]]
name = "exec"
arguments = { argv = 'deploy' }
action = "approve"
reason = "it goes to the customers"

[[rule]]
name = "exec"
arguments = { argv = 'forbidden' }
action = "deny"
reason = "never here"

[[rule]]
name = "rewind"
action = "approve"
"""


def client_of(daemon: Daemon) -> AsyncSnapshotd:
    return AsyncSnapshotd(daemon.state_dir, daemon.socket_path, autostart=False)


def play(daemon: Daemon, scene: Callable[[Spoken], Awaitable[None]], mode: str = "auto", **more: Any) -> None:
    """Plays a scene with a client of a server of its own."""
    asked = {"elicitation_callback": more.pop("elicitation_callback", None)}

    async def main() -> None:
        server = server_over(client_of(daemon), **more)
        async with speaking(server, mode=mode, **asked) as spoken:
            await scene(spoken)

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.fixture
def gated(shared_daemon: Daemon) -> Daemon:
    (shared_daemon.state_dir / "policy.toml").write_text(POLICY)
    return shared_daemon


def answering(said: list[str], action: str = "accept", **content: Any) -> Callable[..., Any]:
    """A person at the client who gives one answer."""

    async def answer(_context: Any, params: Any) -> Any:
        from mcp_types import ElicitResult

        said.append(params.message)
        assert params.requested_schema["properties"]["approve"]["type"] == "boolean"
        return ElicitResult(action=action, content=content or None)  # type: ignore[arg-type]

    return answer


@pytest.mark.parametrize("mode", MODES)
def test_a_person_at_the_client_lets_a_call_run(gated: Daemon, mode: str) -> None:
    said: list[str] = []

    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        done = await call("exec", trajectory=box, command="echo deploy >> log; cat log")
        assert done["stdout"] == "deploy\n"
        (approval,) = [one for one in await client_of(gated).approvals("approved") if one.trajectory == box]
        assert approval.by == "a person at mcp"
        (message,) = said
        assert json.dumps(["/bin/sh", "-c", "echo deploy >> log; cat log"], indent=1)[1:-1].split() == (
            message.partition('"argv": [')[2].partition("]")[0].split()
        )
        assert approval.digest in message
        assert "it goes to the customers" in message
        again = await call("exec", trajectory=box, command="echo deploy >> log; cat log")
        assert (again["stdout"], len(said)) == ("deploy\ndeploy\n", 2), "another moment is another question"
        await call("exec", trajectory=box, command="echo free")
        assert len(said) == 2

    play(gated, scene, mode, elicitation_callback=answering(said, approve=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("action", "content", "words"),
    [
        ("accept", {"approve": False, "reason": "not on a Friday"}, "denied by a person at mcp: not on a Friday"),
        ("accept", {}, "denied"),
        ("accept", {"approve": "yes"}, "denied"),
        ("decline", {}, "denied"),
        ("cancel", {}, "make the same call again"),
    ],
)
def test_a_person_at_the_client_refuses_or_leaves(
    gated: Daemon, mode: str, action: str, content: dict[str, Any], words: str
) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        code, message = await call.fails("exec", trajectory=box, command="echo deploy > x")
        assert (code, words in message) == ("Denied", True), message
        assert (await call("list_files", ref=box))["files"] == []

    play(gated, scene, mode, elicitation_callback=answering([], action, **content))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elicits", [True, False], ids=["cannot ask", "may not ask"])
def test_without_a_person_at_the_client_the_call_waits(gated: Daemon, mode: str, elicits: bool) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        code, message = await call.fails("exec", trajectory=box, command="echo deploy")
        (waiting,) = [one for one in (await call("approvals"))["approvals"] if one["trajectory"] == box]
        assert code == "Denied"
        assert f"snapshotd approve {waiting['id'][:12]}" in message
        assert waiting["digest"] in message
        assert await call.fails("exec", trajectory=box, command="echo deploy") == (code, message), "one question"
        await client_of(gated).approve(waiting["id"], by="ann")
        assert (await call("exec", trajectory=box, command="echo deploy"))["stdout"] == "deploy\n"

        await call.fails("exec", trajectory=box, command="echo deploy now")
        (waiting,) = [one for one in (await call("approvals"))["approvals"] if one["trajectory"] == box]
        await client_of(gated).approve(waiting["id"], by="ann", arguments={"argv": ["echo", "instead"]})
        assert (await call("exec", trajectory=box, command="echo deploy now"))["stdout"] == "instead\n"

    play(gated, scene, mode, elicits=elicits, elicitation_callback=None if elicits else answering([], approve=True))


def test_a_person_elsewhere_decides_while_the_client_asks(gated: Daemon) -> None:
    async def asked(_context: Any, params: Any) -> Any:
        (waiting,) = [one for one in await client_of(gated).approvals("pending") if one.digest in params.message]
        await client_of(gated).approve(waiting.id, by="ann")
        await asyncio.Event().wait()  # nobody at the client answers

    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        assert (await call("exec", trajectory=box, command="echo deploy"))["stdout"] == "deploy\n"

    play(gated, scene, "legacy", elicitation_callback=asked)


@pytest.mark.parametrize("reason", [["a"], "x" * 100_000, "\x00", 1])
def test_a_reason_may_be_anything(gated: Daemon, reason: Any) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        assert (await call("exec", trajectory=box, command="echo deploy"))["stdout"] == "deploy\n"

    play(gated, scene, "legacy", elicitation_callback=answering([], approve=True, reason=reason))


def test_a_client_that_fails_to_ask_decides_nothing(gated: Daemon) -> None:
    async def asked(_context: Any, _params: Any) -> Any:
        from mcp_types import ErrorData

        return ErrorData(code=-1, message="the window was closed")

    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        code, message = await call.fails("exec", trajectory=box, command="echo deploy")
        assert (code, "snapshotd approve" in message) == ("Denied", True), message

    play(gated, scene, "legacy", elicitation_callback=asked)


def test_a_rule_for_commands_holds_for_every_tool_that_runs_one(gated: Daemon) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        first = (await call("exec", trajectory=box, command="echo 1 > a"))["snapshot"]
        for tool, arguments in [
            ("exec", {"trajectory": box}),
            ("try", {"snapshot": box}),
            ("score", {"refs": [box]}),
            ("bisect", {"trajectory": box}),
        ]:
            assert "never here" in (await call.fails(tool, **arguments, command="forbidden"))[1], tool
        assert "snapshotd approve" in (await call.fails("rewind", trajectory=box, to=first))[1]

    play(gated, scene)


def test_one_trajectory_and_its_forks(shared_daemon: Daemon) -> None:
    (shared_daemon.state_dir / "policy.toml").unlink(missing_ok=True)
    found: dict[str, str] = {}

    async def make(call: Spoken) -> None:
        found["parent"] = (await call("create", name="parent"))["id"]
        found["origin"] = (await call("exec", trajectory="parent", command="echo o > f"))["snapshot"]
        found["mine"] = (await call("fork", snapshot="parent", name="mine"))["trajectories"][0]["id"]
        found["later"] = (await call("exec", trajectory="parent", command="echo secret > f"))["snapshot"]

    async def scene(call: Spoken) -> None:
        tools = await call.tools()
        assert not {"create", "run"} & set(tools)
        assert "trajectory" not in tools["exec"].input_schema["required"]
        first = await call("exec", command="cat f; echo m > f")
        assert first["stdout"] == "o\n"
        child = (await call("fork", snapshot=first["snapshot"], name="child"))["trajectories"][0]["id"]
        grandchild = (await call("fork", snapshot="child"))["trajectories"][0]["id"]
        await call("exec", trajectory=grandchild, command="echo g > f")
        assert {one["id"] for one in (await call("list"))["trajectories"]} == {found["mine"], child, grandchild}
        assert (await call("read_file", ref=found["origin"], path="f"))["text"] == "o\n"
        await call("rewind", to=found["origin"])
        assert (await call("read_file", ref="mine", path="f"))["text"] == "o\n"
        await call("undo")
        await call("compare", refs=["mine", grandchild])
        await call("exec", trajectory="child", command="echo c > f")
        await call("promote", trajectory="child", leave_behind=True)
        for tool, arguments in [
            ("exec", {"trajectory": "parent", "command": "true"}),
            ("read_file", {"ref": "parent", "path": "f"}),
            ("read_file", {"ref": found["later"], "path": "f"}),
            ("diff", {"snapshot": found["origin"], "to": found["later"]}),
            ("fork", {"snapshot": found["later"]}),
            ("try", {"snapshot": "parent", "command": "cat f"}),
            ("score", {"refs": ["mine", "parent"], "command": "true"}),
            ("compare", {"refs": ["mine", "parent"]}),
            ("merge", {"source": "mine", "into": "parent"}),
            ("promote", {"trajectory": "mine"}),
            ("log", {"trajectory": "parent"}),
            ("show", {"snapshot": "parent"}),
        ]:
            code, message = await call.fails(tool, **arguments)
            assert (code, "the only one that this client may touch" in message) == ("NotPermitted", True), tool
        for uri in (f"snapshotd://snapshots/{found['later']}", "snapshotd://trajectories/parent"):
            with pytest.raises(Exception, match="NotPermitted"):
                await call.client.read_resource(uri)

    play(shared_daemon, make)
    play(shared_daemon, scene, only=found["mine"])


def test_no_folder_of_the_machine(shared_daemon: Daemon) -> None:
    """The small daemon's sandboxes are plain folders: a server that was not told to take them reaches none."""
    (shared_daemon.state_dir / "policy.toml").unlink(missing_ok=True)
    made: list[str] = []

    async def make(call: Spoken) -> None:
        made.append((await call("create"))["id"])

    async def scene(call: Spoken) -> None:
        assert (await call("list"))["trajectories"] == []
        for tool, arguments in [
            ("exec", {"trajectory": made[0], "command": "id"}),
            ("read_file", {"ref": made[0], "path": "/etc/passwd"}),
            ("try", {"snapshot": made[0], "command": "id"}),
            ("log", {"trajectory": made[0]}),
        ]:
            code, message = await call.fails(tool, **arguments)
            assert (code, "this machine's own" in message) == ("NotPermitted", True), tool

    play(shared_daemon, make)
    play(shared_daemon, scene, unisolated=False)


@pytest.mark.parametrize("mode", MODES)
def test_resources(shared_daemon: Daemon, mode: str) -> None:
    (shared_daemon.state_dir / "policy.toml").unlink(missing_ok=True)

    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        raw = b"\xff\x00"
        snapshot = (await call("write_file", trajectory=box, path="a/é.txt", content="text\n"))["id"]
        await call("write_file", trajectory=box, path="raw", content=base64.b64encode(raw).decode(), as_base64=True)
        templates = {one.uri_template for one in (await call.client.list_resource_templates()).resource_templates}
        assert templates == {
            "snapshotd://trajectories/{trajectory}",
            "snapshotd://snapshots/{snapshot}",
            "snapshotd://files/{snapshot}/{+path}",
        }
        (listed,) = (await call.client.list_resources()).resources

        async def read(uri: str) -> Any:
            (content,) = (await call.client.read_resource(uri)).contents
            return content

        assert box in (await read(str(listed.uri))).text
        assert json.loads((await read(f"snapshotd://snapshots/{snapshot}")).text)["id"] == snapshot
        assert snapshot in (await read(f"snapshotd://trajectories/{box}")).text
        assert (await read(f"snapshotd://files/{snapshot}/workspace/a/%C3%A9.txt")).text == "text\n"
        assert base64.b64decode((await read(f"snapshotd://files/{box}/workspace/raw")).blob) == raw
        await call("exec", trajectory=box, command="head -c 1100000 /dev/zero > big")
        for uri, words in [
            ("snapshotd://snapshots/ffffffff", "ffffffff"),
            (f"snapshotd://files/{snapshot}/workspace/none", "none"),
            (f"snapshotd://files/{box}/workspace/big", "read_file"),
            (f"snapshotd://files/{snapshot}/../../etc/passwd", "nknown|security|not found"),
        ]:
            with pytest.raises(Exception, match=words):
                await read(uri)

    play(shared_daemon, scene, mode)
