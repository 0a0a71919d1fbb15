"""The Claude Agent SDK with its sessions in the catalog, bound to snapshots of the working folder; its own suite, and real runs
of the Claude Code that it brings, whose model is a script."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import KEY, Provider, provider
from tests.e2e.plug_rig import ROOT, packages
from tests.e2e.support import Snap

PINS = ("claude-agent-sdk==0.2.189",)
PROGRAM = Path(__file__).with_name("programs") / "claude_sdk_agent.py"
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module", autouse=True)
def sdk() -> Path:
    return packages("claude_agent_sdk", *PINS)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 200))


def test_the_sdks_own_suite(record_property: Callable[[str, object], None]) -> None:
    async def scene() -> None:
        from claude_agent_sdk.testing import run_session_store_conformance

        from snapshotd.client import AsyncSnapshotd
        from snapshotd.integrations.claude_agent import SnapshotdSessionStore

        async def empty() -> Any:
            client = AsyncSnapshotd()
            for namespace in ("claude", "claude-sessions"):
                for one in await client.search_values(namespace, limit=1000):
                    await client.delete_value(one.namespace, one.key)
            return SnapshotdSessionStore(client)

        await run_session_store_conformance(empty)

    play(scene)
    record_property("told", f"{PINS[0]}, run_session_store_conformance: 14 of 14 passed")


def test_a_batch_that_comes_twice_is_there_once(plugged: Snap) -> None:
    async def scene() -> None:
        from snapshotd.integrations.claude_agent import SnapshotdSessionStore

        key: Any = {"project_key": "p/ä", "session_id": "s", "subpath": "a/b"}
        entries: list[Any] = [{"type": "x", "uuid": f"u-{number}", "text": "t" * 5000} for number in range(20)]
        stores = [SnapshotdSessionStore() for _ in range(2)]
        adding = [asyncio.create_task(store.append(key, [entry])) for entry in entries for store in stores]
        await asyncio.sleep(0)
        await asyncio.to_thread(plugged.kill_daemon)
        await asyncio.gather(*adding)
        loaded = await stores[0].load(key)
        assert loaded is not None
        assert sorted(entry["uuid"] for entry in loaded) == sorted(entry["uuid"] for entry in entries)
        assert await stores[0].list_subkeys({"project_key": "p/ä", "session_id": "s"}) == ["a/b"]

    play(scene)


def test_what_cannot_be(tmp_path: Path) -> None:
    async def scene() -> None:
        from claude_agent_sdk import ClaudeAgentOptions

        from snapshotd.errors import NotFound, UsageError
        from snapshotd.integrations.claude_agent import SnapshotdSessionStore

        store = SnapshotdSessionStore()
        with pytest.raises(NotFound, match="no message"):
            await store.options(ClaudeAgentOptions(cwd=tmp_path, resume="none", resume_session_at="m"))
        with pytest.raises(UsageError, match="settings"):
            await store.options(ClaudeAgentOptions(cwd=tmp_path, settings="missing.json"))
        made = await store.options(ClaudeAgentOptions(cwd=tmp_path, settings='{"model": "m", "hooks": {"Stop": [1]}}'))
        settings = json.loads(made.settings or "")
        assert (settings["model"], settings["hooks"]["Stop"]) == ("m", [1])
        assert {"PreToolUse", "PostToolUse", "PostToolUseFailure"} <= settings["hooks"].keys()
        assert list(tmp_path.iterdir()) == []

    play(scene)


STEPS = 4


def _bash(number: int) -> dict[str, Any]:
    command = f"echo {number} >> log; echo did {number} > step-{number}"
    return {"name": "Bash", "arguments": {"command": command, "description": "a step"}}


SCRIPT = [*({"text": f"Step {number}.", "calls": [_bash(number)]} for number in range(1, STEPS + 1)), {"text": "Done."}]
LATER = {"text": "As you wish."}
"""The answer to one more wish behind the script."""


class Works:
    """Runs the program in a folder of its own."""

    def __init__(self, snap: Snap, at: Provider, place: Path, sdk: Path) -> None:
        self.snap, self.at, self.folder = snap, at, place / "project"
        self.folder.mkdir()
        (place / "home").mkdir()
        self.env = {
            **snap.env,
            "PYTHONPATH": f"{ROOT}:{sdk}",
            "HOME": str(place / "home"),
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_API_KEY": KEY,
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def __call__(self, wish: str, *, code: int = 0, **more: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, PROGRAM, json.dumps({"cwd": str(self.folder), "wish": wish, **more})],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return last

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.iterdir() if path.is_file()}


def after(*steps: int) -> dict[str, str]:
    return {"log": "".join(f"{one}\n" for one in steps), **{f"step-{one}": f"did {one}\n" for one in steps}}


@pytest.fixture
def works(plugged: Snap, tmp_path: Path, sdk: Path) -> Iterator[Works]:
    with provider(tmp_path, *SCRIPT, LATER, toolless=[{"text": "A title"}]) as at:
        yield Works(plugged, at, tmp_path, sdk)


@pytest.mark.long
def test_each_message_has_its_files_and_a_fork_from_the_middle_begins_with_them(works: Works, plugged: Snap) -> None:
    first = works("do it")
    assert works.files() == after(*range(1, STEPS + 1))
    assert len(first["results"]) == STEPS
    (box,) = [one["name"] for one in plugged.json("ls")]
    calls = [step for step in plugged.json("log", "--all", box) if step["tool"]["name"] == "Bash"]
    assert len(calls) == STEPS
    for number, message in enumerate(first["results"], 1):
        taken = works("", snapshot_at=[first["session"], message])["snapshot"]
        assert taken == calls[number - 1]["id"]
        assert plugged("cat", f"{taken}:/workspace/log").stdout == "".join(f"{one}\n" for one in range(1, number + 1))

    works.at.forget()
    back = works("go on", resume=first["session"], fork_session=True, resume_session_at=first["results"][1])
    assert back["session"] != first["session"]
    asked = next(request for request in works.at.requests() if request["body"].get("tools"))
    told = json.dumps(asked["body"]["messages"])
    assert (told.count('"tool_result"'), "go on" in told) == (2, True)
    assert works.files()["log"] == "1\n2\n" + after(*itertools.chain(range(1, 3), range(3, STEPS + 1)))["log"][4:]


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_from_the_store(works: Works, tmp_path: Path) -> None:
    killed = works("do it", code=-signal.SIGKILL, die_after=2)
    works.at.forget()
    done = works("go on", resume=killed["session"])
    assert done["session"] == killed["session"]
    asked = next(request for request in works.at.requests() if request["body"].get("tools"))
    assert json.dumps(asked["body"]["messages"]).count('"tool_result"') >= 2
    assert works.files()["log"].startswith("1\n2\n")


@pytest.mark.long
def test_a_message_whose_files_are_gone_is_refused_and_changes_nothing(works: Works, plugged: Snap) -> None:
    first = works("do it")
    (box,) = [one["name"] for one in plugged.json("ls")]
    plugged("prune", "--force", "--keep-last", "1", "--grace", "0")

    def all_there_is() -> Any:
        return works.files(), plugged.json("ls"), plugged.json("log", "--all", box)

    before = all_there_is()
    calls = [step for step in before[-1] if step["tool"]["name"] == "Bash"]
    assert [one["state"] for one in calls] == ["pruned"] * (STEPS - 1) + ["stored"]
    back = {"resume": first["session"], "fork_session": True}
    for number, message in enumerate(first["results"][:-1]):
        kind, said = works("go on", **back, resume_session_at=message)["refused"]
        assert (kind, f"snapshot {calls[number]['id'][:12]} were given up" in said) == ("NotFound", True)
        assert works("", snapshot_at=[first["session"], message])["snapshot"] == calls[number]["id"], "it is named yet"
    assert all_there_is() == before
    works.at.forget()
    kept = works("go on", **back, resume_session_at=first["results"][-1])
    assert kept["results"], "the one that was kept is gone on from"

    plugged("rm", "--force", box)
    kind, said = works("go on", **back, resume_session_at=first["results"][-1])["refused"]
    assert (kind, "removed" in said) == ("NotFound", True)
    assert plugged.json("ls") == []
    works.at.forget()
    done = works("go on", resume=first["session"])
    assert done == first, "the conversation needs no files"
