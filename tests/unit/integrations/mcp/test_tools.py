"""The tools of `snapshotd mcp`, over the real engine on plain folders."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from snapshotd.client import AsyncSnapshotd
from tests.mcp_rig import Spoken, server_over, speaking, until
from tests.unit.daemon.process import Daemon

Scene = Callable[[Spoken], Awaitable[None]]
pytestmark = pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
"""What the handshake changes is in test_reach_and_approvals.py, with both."""


@pytest.fixture
def play(shared_daemon: Daemon, mode: str) -> Callable[..., None]:
    """Plays a scene with a client of a server of its own."""

    def play(scene: Scene, *, elicitation_callback: Any = None, **options: Any) -> None:
        async def main() -> None:
            client = AsyncSnapshotd(shared_daemon.state_dir, shared_daemon.socket_path, autostart=False)
            server = server_over(client, **options)
            async with speaking(server, mode=mode, elicitation_callback=elicitation_callback) as spoken:
                await scene(spoken)

        asyncio.run(asyncio.wait_for(main(), 100))

    return play


def test_a_command_a_file_and_the_way_back(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create", name=f"box-{mode}"))["id"]
        first = (await call("write_file", trajectory=box, path="notes/a.txt", content="one\n"))["id"]
        done = await call("exec", trajectory=box, command="cat notes/a.txt; echo oops >&2; rm -r notes; exit 3")
        assert (done["exit_code"], done["status"]) == (3, "failed")
        assert (done["stdout"], done["stderr"], done["cut"]) == ("one\n", "oops\n", False)
        assert (await call("read_output", snapshot=done["snapshot"], which="stderr"))["text"] == "oops\n"
        assert (await call.fails("read_file", ref=box, path="notes/a.txt"))[0] == "NotFound"
        assert (await call("read_file", ref=first, path="notes/a.txt"))["text"] == "one\n"
        diff = await call("diff", snapshot=first, to=done["snapshot"], patch=True)
        assert {(one["change"], one["path"]) for one in diff["changes"]} == {
            ("deleted", "/workspace/notes"),
            ("deleted", "/workspace/notes/a.txt"),
        }
        assert "-one" in diff["patch"]["text"]

        preview = await call("preview_rewind", trajectory=box, to=first)
        assert preview["change_count"] == 2
        back = await call("rewind", trajectory=box, to=first)
        assert back["tool"]["name"] == "rewind"
        assert (await call("read_file", ref=box, path="/workspace/notes/a.txt"))["text"] == "one\n"
        await call("undo", trajectory=box)
        assert (await call("list_files", ref=box))["files"] == []
        log = await call("log", trajectory=box, last=2)
        assert [one["tool"]["name"] for one in log["snapshots"]] == ["rewind", "undo"]
        assert log["older"] == 3
        shown = await call("show", snapshot=done["snapshot"], messages=5)
        assert (shown["tool"]["exit_code"], shown["conversation"]) == (3, [])
        assert (await call("stop", trajectory=box))["status"] == "stopped"
        assert (await call("exec", trajectory=box, command=["echo", "up"]))["stdout"] == "up\n"

    play(scene)


def test_branches(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create", name=f"tree-{mode}"))["id"]
        start = await call("exec", trajectory=box, command="echo 1 > n")
        forks = (await call("fork", snapshot=start["snapshot"], n=2, name=f"f-{mode}-{{index}}"))["trajectories"]
        assert [one["name"] for one in forks] == [f"f-{mode}-0", f"f-{mode}-1"]
        for number, fork in enumerate(forks):
            await call("exec", trajectory=fork["id"], command=f"echo {number + 2} > n; echo x > f{number}")
        compared = await call("compare", refs=[one["id"] for one in forks])
        assert compared["fork_point"] == start["snapshot"]
        assert compared["first_differences"] == ["call 1: arguments"] or "arguments" in compared["first_differences"][0]
        names = [one["name"] for one in forks]
        rows = (await call("score", refs=names, command="cat n", number=True))["rows"]
        assert [(row["ref"], row["score"], row["rank"]) for row in rows] == [(names[1], 3.0, 1), (names[0], 2.0, 2)]
        tried = await call("try", snapshot=names[1], command="cat n; echo gone > n")
        assert (tried["stdout"], tried["snapshot"]) == ("3\n", None)
        merged = await call("merge", source=names[0], into=names[1], dry_run=True)
        assert merged["conflicts"]
        assert merged["snapshot"] is None
        promoted = await call("promote", trajectory=names[1])
        assert promoted["trajectory"] == box
        assert (await call("read_file", ref=box, path="n"))["text"] == "3\n"
        await call("exec", trajectory=box, command="rm n")
        await call("exec", trajectory=box, command="true")
        found = await call("bisect", trajectory=box, command="test -e n", good=start["snapshot"])
        assert found["first_bad"]["tool"]["arguments"]["argv"][-1] == "rm n"
        assert not found["flaky"]
        assert box in {one["id"] for one in (await call("list"))["trajectories"]}
        named = await call("snapshot", trajectory=box, name=f"here-{mode}")
        assert named["tags"] == [f"here-{mode}"]
        assert (await call("show", snapshot=f"here-{mode}"))["id"] == named["id"]

    play(scene)


def test_long_answers_are_cut_and_paged(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        done = await call(
            "exec", trajectory=box, command="seq 100000; for i in $(seq 150); do : > f$i; done", max_bytes=1000
        )
        assert done["cut"]
        assert "are left out" in done["stdout"]
        assert done["stdout"].startswith("1\n2\n")
        assert done["stdout"].endswith("99999\n100000\n")
        text, offset = "", 0
        while offset is not None:
            part = await call("read_output", snapshot=done["snapshot"], offset=offset, max_bytes=1 << 18)
            text, offset = text + part["text"], part["next_offset"]
        assert text.split() == [str(number) for number in range(1, 100001)]
        names, offset = [], 0
        while offset is not None:
            page = await call("list_files", ref=box, offset=offset, most=70)
            names += [one["path"] for one in page["files"]]
            offset = page["next_offset"]
        assert len(names) == len(set(names)) == 150

        await call("write_file", trajectory=box, path="t", content="é" * 1000)
        text, offset = "", 0
        while offset is not None:
            part = await call("read_file", ref=box, path="t", offset=offset, max_bytes=257)
            assert "�" not in part["text"]
            text, offset = text + part["text"], part["next_offset"]
        assert text == "é" * 1000
        raw = bytes(range(256)) * 3
        await call("write_file", trajectory=box, path="b", content=base64.b64encode(raw).decode(), as_base64=True)
        part = await call("read_file", ref=box, path="b", as_base64=True, offset=256, max_bytes=256)
        assert (base64.b64decode(part["text"]), part["next_offset"]) == (raw[256:512], 512)

    play(scene)


def test_bad_input_is_one_sentence(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        for tool, arguments, code, words in [
            ("exec", {"trajectory": box}, "UsageError", "`command` of `exec`"),
            ("exec", {"trajectory": box, "command": []}, "UsageError", "`command"),
            ("exec", {"trajectory": box, "command": "true", "cmd": "x"}, "UsageError", "no argument `cmd`"),
            ("exec", {"trajectory": box, "command": "true", "timeout_s": 0}, "UsageError", "timeout_s"),
            ("exec", {"trajectory": box, "command": "true", "key": ""}, "UsageError", "`key`"),
            ("exec", {"trajectory": box, "command": ["no-such-program"]}, "CommandNotFound", "no-such-program"),
            ("exec", {"trajectory": "nowhere", "command": "true"}, "NotFound", "nowhere"),
            ("exec", {"trajectory": "../etc", "command": "true"}, "NotFound", "../etc"),
            ("rewind", {"trajectory": box, "to": "ffffffff"}, "NotFound", "ffffffff"),
            ("rewind", {"trajectory": box, "to": box, "mode": "all"}, "UsageError", "`mode`"),
            ("compare", {"refs": [box]}, "UsageError", "`refs`"),
            (
                "write_file",
                {"trajectory": box, "path": "x", "content": "!", "as_base64": True},
                "UsageError",
                "content",
            ),
            ("read_file", {"ref": box, "path": "."}, "UsageError", ""),
            ("undo", {"trajectory": box}, "Conflict", ""),
        ]:
            found, message = await call.fails(tool, **arguments)
            assert (found, words in message) == (code, True), (tool, arguments, message)

    play(scene)


def test_a_call_with_a_key_is_made_once(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create", name=f"once-{mode}", key=f"box {mode}"))["id"]
        assert (await call("create", name=f"once-{mode}", key=f"box {mode}"))["id"] == box
        several = [call("exec", trajectory=box, command="echo x | tee -a n", key="k") for _ in range(3)]
        answers = await asyncio.gather(*several)
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["stdout"] == "x\n"
        assert (await call("read_file", ref=box, path="n"))["text"] == "x\n"
        assert (await call.fails("exec", trajectory=box, command="false", key="k"))[0] == "Conflict"
        wrote = [await call("write_file", trajectory=box, path="w", content="1", key="w") for _ in range(2)]
        assert wrote[0]["id"] == wrote[1]["id"]

    play(scene)


def test_a_cancelled_call_ends_its_command(play: Callable[..., None], mode: str) -> None:
    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]
        running = asyncio.create_task(
            call("exec", trajectory=box, command="echo begun > f; while :; do sleep 0.1; date >> beats; done")
        )

        async def has(path: str) -> bool:
            return path in {one["path"] for one in (await call("list_files", ref=box))["files"]}

        await until(lambda: has("/workspace/beats"), "it runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def captured() -> bool:
            return (await call("log", trajectory=box))["snapshots"][-1]["tool"]["name"] == "exec"

        await until(captured, "the command was ended, and captured")
        last = (await call("log", trajectory=box))["snapshots"][-1]
        assert last["tool"]["exit_code"] == 137
        before = (await call("read_file", ref=box, path="beats"))["text"]
        assert (await call("exec", trajectory=box, command="cat beats"))["stdout"] == before

    play(scene)


def test_progress_is_told(play: Callable[..., None], mode: str) -> None:
    told: list[str] = []

    async def scene(call: Spoken) -> None:
        box = (await call("create"))["id"]

        async def hear(_progress: float, _total: float | None, message: str | None) -> None:
            told.append(message or "")

        arguments = {"trajectory": box, "command": "echo hello; while ! [ -e go ]; do sleep 0.05; done; echo bye"}
        running = asyncio.create_task(call.client.call_tool("exec", arguments, progress_callback=hear))

        async def heard() -> bool:
            return bool(told)

        await until(heard, "it has said hello")
        await call("write_file", trajectory=box, path="go", content="")
        assert (await running).structured_content["stdout"] == "hello\nbye\n"  # type: ignore[index]
        assert told[0] == "hello"

    play(scene)


def test_what_a_client_may_see_of_the_tools(play: Callable[..., None], mode: str) -> None:
    names: dict[bool, set[str]] = {}

    async def scene(call: Spoken) -> None:
        tools = await call.tools()
        reads = {name for name, one in tools.items() if one.annotations.read_only_hint}
        names[len(reads) == len(tools)] = set(tools)
        assert reads >= {"list", "read_file", "list_files", "log", "show", "diff", "compare", "preview_rewind"}
        for name, one in tools.items():
            assert one.output_schema, name
            assert 40 < len(one.description) < 450, name
            assert one.input_schema["additionalProperties"] is False, name
            assert ("key" in one.input_schema["properties"]) == (
                name
                in {"create", "run", "exec", "write_file", "snapshot", "rewind", "undo", "fork", "merge", "promote"}
            ), name
        if "rewind" in tools:
            assert tools["rewind"].annotations.destructive_hint
            assert tools["write_file"].annotations.idempotent_hint
            assert not tools["fork"].annotations.destructive_hint

    play(scene)
    play(scene, read_only=True)
    assert names[True] < names[False]
    assert not names[True] & {"exec", "try", "rewind", "score", "create", "stop", "bisect"}
    assert len(names[False]) == 24
