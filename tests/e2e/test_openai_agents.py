"""Runs of the OpenAI Agents SDK whose files and memory are ours: one snapshot for each call, back to an earlier one, killed
and gone on, forked."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import tarfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.forked_programs import Forks, forks_with
from tests.e2e.plug_rig import check_page
from tests.e2e.support import Snap

pytestmark = [
    pytest.mark.runc,
    pytest.mark.usefixtures("plugged"),
    pytest.mark.skipif(find_spec("agents") is None, reason="the extra openai-agents is not installed"),
]
PROGRAM = Path(__file__).with_name("programs") / "openai_sandbox_agent.py"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forks_with(["tests.e2e.programs.openai_sandbox_agent"]) as forks:
        yield forks


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


async def files_at(snapshot: str | None) -> dict[str, str]:
    from snapshotd.client import AsyncSnapshot

    assert snapshot is not None
    taken = await AsyncSnapshot.get(snapshot)
    return {one.name: await taken.files.read_text(one.path) for one in await taken.files.list("/workspace")}


def after(step: int) -> dict[str, str]:
    """The files after call number `step`."""
    made = {f"step-{one}": f"did {one}\n" for one in range(1, step + 1)}
    return {**made, "log": "".join(f"{one}\n" for one in range(1, step + 1))} if step else {}


def calls_in(items: list[Any]) -> int:
    return sum(item.get("type") == "function_call_output" for item in items)


async def run(agent: Any, wish: Any, **more: Any) -> Any:
    from agents import Runner

    return await Runner.run(agent, wish, max_turns=20, **more)


def test_one_snapshot_for_each_call_and_back_to_each() -> None:
    async def scene() -> None:
        from agents import RunConfig

        from snapshotd.client import AsyncSandbox, AsyncSnapshotd
        from tests.e2e.programs.openai_sandbox_agent import STEPS, agent, thread_of

        thread = thread_of("anna", name="ann")
        done = await run(agent(), "please", session=thread, run_config=RunConfig(sandbox=thread.sandbox))
        assert done.final_output == "done"
        box = await AsyncSandbox.connect("ann")
        tools = [one.info.tool.name for one in await box.snapshots()]
        assert tools == ["start", *["exec"] * STEPS]
        assert (await box.info).status == "stopped"
        assert await files_at(await thread.snapshot()) == after(STEPS)

        again = thread_of("anna")  # as another process
        items = await again.get_items()
        assert calls_in(items) == STEPS
        assert await again.get_items(2) == items[-2:]
        while calls_in(items) > 3:
            assert await again.pop_item() == items[-1]
            items = await again.get_items()
            if items[-1].get("type") == "function_call_output":
                assert await files_at(await again.snapshot()) == after(calls_in(items))
        done = await run(agent(), [], session=again, run_config=RunConfig(sandbox=again.sandbox))
        assert calls_in(await again.get_items()) == STEPS
        assert await files_at(await again.snapshot()) == after(STEPS)
        boxes = await AsyncSnapshotd().trajectories()
        assert len(boxes) == 2, "a fork went on; the first sandbox is as it was"
        assert await files_at("ann") == after(STEPS)

        await again.clear_session()
        assert (await again.get_items(), await again.snapshot(), await again.pop_item()) == ([], None, None)
        await run(agent(), "please", session=again, run_config=RunConfig(sandbox=again.sandbox))
        assert await files_at(await again.snapshot()) == after(STEPS)

    play(scene)


def test_a_run_state_is_gone_on_from_twice() -> None:
    async def scene() -> None:
        from agents import RunConfig, RunState
        from agents.sandbox import SandboxRunConfig

        from snapshotd.client import AsyncSnapshotd
        from snapshotd.integrations.openai_agents import SnapshotdOptions, SnapshotdSandboxClient
        from tests.e2e.programs.openai_sandbox_agent import STEPS, agent

        def config() -> RunConfig:
            return RunConfig(
                sandbox=SandboxRunConfig(client=SnapshotdSandboxClient(), options=SnapshotdOptions(runtime="runc"))
            )

        stopped = await run(agent(asks_at=4), "please", run_config=config())
        assert len(stopped.interruptions) == 1
        saved = json.dumps(stopped.to_state().to_json())
        assert len(saved) < 60_000
        (place,) = [one["session_state"] for one in json.loads(saved)["sandbox"]["sessions_by_agent"].values()]
        assert place["snapshot"]["type"] == "snapshotd"
        assert await files_at(place["snapshot"]["id"]) == after(3)

        for _ in range(2):
            asked = agent(asks_at=4)
            state = await RunState.from_json(asked, json.loads(saved))
            state.approve(state.get_interruptions()[0])
            done = await run(asked, state, run_config=config())
            assert done.final_output == "done"
        first, second = [one.id for one in await AsyncSnapshotd().trajectories()]
        assert await files_at(first) == await files_at(second) == after(STEPS)

    play(scene)


@pytest.mark.long  # a run that another program goes on with: the test before
@pytest.mark.parametrize(
    ("point", "step"),
    [("after", 3), *((point, step) for point in ("model", "in", "after") for step in long.size(range(0), range(1, 7)))],
)
def test_a_run_that_is_killed_goes_on(forks: Forks, plugged: Snap, point: str, step: int) -> None:
    thread = uuid.uuid4().hex  # the daemon keeps those of the tests before
    killed = forks.run(PROGRAM, thread, point, step, env=plugged.env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = forks.run(PROGRAM, thread, "never", 0, env=plugged.env)
    assert done.returncode == 0, done.stderr
    said, snapshot = json.loads(done.stdout)
    assert said == "done"
    assert asyncio.run(files_at(snapshot)) == after(6)


def test_files_commands_and_ports_of_a_session() -> None:
    async def scene() -> None:
        from agents.sandbox import Manifest
        from agents.sandbox.entries import File
        from agents.sandbox.errors import (
            ExecNonZeroError,
            ExecTimeoutError,
            ExposedPortUnavailableError,
            InvalidManifestPathError,
            WorkspaceReadNotFoundError,
        )
        from agents.sandbox.manifest import Environment

        from snapshotd.integrations.openai_agents import SnapshotdOptions, SnapshotdSandboxClient

        client = SnapshotdSandboxClient()
        manifest = Manifest(entries={"a/b.txt": File(content=b"one\n")}, environment=Environment(value={"WISH": "tea"}))
        options = SnapshotdOptions(runtime="runc", exposed_ports=(8000,))
        async with await client.create(manifest=manifest, options=options) as session:
            assert (await session.read(Path("a/b.txt"))).read() == b"one\n"
            assert (await session.exec("echo $WISH; pwd; id -u")).stdout == b"tea\n/workspace\n0\n"
            assert (await session.exec("id -un", user="nobody")).stdout == b"nobody\n"
            assert (await session.exec("no-such-thing", shell=False)).exit_code == 127
            assert (await session.exec("exit 3")).exit_code == 3
            with pytest.raises(ExecTimeoutError):
                await session.exec("echo x > late; sleep 60", timeout=0.5)
            await session.write(Path("c"), io.BytesIO(b"two"))
            await session.mkdir("d/e", parents=True)
            await session.mv("c", "d/c")
            assert sorted(entry.path for entry in await session.ls("d")) == ["/workspace/d/c", "/workspace/d/e"]
            assert [entry.is_dir() for entry in await session.ls("d")] == [False, True]
            await session.rm("d", recursive=True)
            await session.rm("d", recursive=True)
            with pytest.raises(WorkspaceReadNotFoundError):
                await session.read(Path("d/c"))
            with pytest.raises(ExecNonZeroError):
                await session.ls("d")
            with pytest.raises(InvalidManifestPathError):
                await session.read(Path("../etc/passwd"))
            endpoint = await session.resolve_exposed_port(8000)
            assert (endpoint.host, endpoint.port > 0) == ("127.0.0.1", True)
            with pytest.raises(ExposedPortUnavailableError):
                await session.resolve_exposed_port(8001)

            reference = (await session.persist_workspace()).read()
            assert len(reference) < 200, "no tar"
            await session.exec("rm -r a")
            await session.hydrate_workspace(io.BytesIO(reference))
            assert (await session.read(Path("a/b.txt"))).read() == b"one\n"

            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w") as tar:
                member = tarfile.TarInfo("from-elsewhere")
                member.size = 3
                tar.addfile(member, io.BytesIO(b"tar"))
            await session.hydrate_workspace(io.BytesIO(archive.getvalue()))
            assert (await session.read(Path("from-elsewhere"))).read() == b"tar"

    play(scene)


def test_what_cannot_be_is_the_sdks_own_error(plugged: Snap) -> None:
    async def scene() -> None:
        from agents.sandbox.errors import (
            ExecTransportError,
            SnapshotNotRestorableError,
            WorkspaceArchiveWriteError,
            WorkspaceStartError,
        )

        from snapshotd.client import AsyncSnapshotd
        from snapshotd.integrations.openai_agents import (
            SnapshotdOptions,
            SnapshotdSandboxClient,
            SnapshotdSnapshot,
            SnapshotdThread,
        )

        client, options = SnapshotdSandboxClient(), SnapshotdOptions(runtime="runc")
        with pytest.raises(WorkspaceStartError, match="no-such-image"):
            await client.create(options=SnapshotdOptions(image="no-such-image"))
        with pytest.raises(SnapshotNotRestorableError):
            await client.create(snapshot=SnapshotdSnapshot(id="0" * 64), options=options)
        session = await client.create(options=options)
        await session.start()
        await session.exec("echo 1 > a")
        state = client.deserialize_session_state(client.serialize_session_state(session.state))
        await AsyncSnapshotd().remove(session.state.trajectory, force=True)
        with pytest.raises(ExecTransportError):
            await session.exec("true")
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.write(Path("a"), io.BytesIO(b"2"))
        assert not await session.running()
        with pytest.raises(SnapshotNotRestorableError) as raised:
            await client.resume(state)
        assert "no such" in str(raised.value.cause) or "there is no" in str(raised.value.cause)
        assert await SnapshotdThread("nobody").get_items() == []

    play(scene)


def test_a_daemon_that_dies_within_a_write_leaves_it_whole_or_not_at_all(plugged: Snap) -> None:
    async def scene() -> None:
        from tests.e2e.programs.openai_sandbox_agent import thread_of

        thread = thread_of("alone")
        adding = [asyncio.create_task(thread.add_items([{"role": "user", "content": f"{n}" * 1000}])) for n in range(8)]
        await asyncio.sleep(0)
        await asyncio.to_thread(plugged.kill_daemon)
        await asyncio.gather(*adding)
        items = await thread.get_items()
        assert sorted(item["content"][0] for item in items) == [f"{n}" for n in range(8)], "each once"

    play(scene)


@pytest.mark.long  # such runs: the tests above
def test_the_programs_of_the_page_print_what_they_show(plugged: Snap, tmp_path: Path) -> None:
    check_page("openai-agents.md", plugged, tmp_path)
