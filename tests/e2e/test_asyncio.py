"""The asynchronous client with a real daemon: many sandboxes in one process, without threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import AsyncSandbox, AsyncSnapshotd, AsyncTerminal
from snapshotd.errors import NotFound
from tests import long
from tests.e2e.support import Snap, wait_until

MOST_DAEMON_BYTES = 150 << 20


@pytest.fixture
def client(snap: Snap) -> AsyncSnapshotd:
    return AsyncSnapshotd(snap.state_dir, autostart=False)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main(), debug=False)


def running(snap: Snap) -> set[str]:
    """The trajectories that have a sandbox, those of throw-away commands too."""
    return {one["trajectory"] for one in snap.json("ps")}


def daemon_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


def test_a_sandbox_from_its_beginning_to_its_end(client: AsyncSnapshotd, runtime: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with await AsyncSandbox.create(runtime=runtime, client=client) as box:
            await box.files.write("a.txt", "one\n")
            done = await box.exec("cat a.txt; echo two > a.txt", check=True)
            assert (done.stdout, done.exit_code) == ("one\n", 0)
            assert await box.files.read_text("a.txt") == "two\n"
            forks = await box.fork(2)
            texts = await asyncio.gather(*(fork.exec(["cat", "a.txt"], check=True) for fork in forks))
            assert [text.stdout for text in texts] == ["two\n"] * 2
            first = (await box.snapshots())[1]
            await box.rewind(first)
            assert await box.files.read_text("a.txt") == "one\n"
            assert [item.name async for item in client.list_files(box.id)] == ["a.txt"]
            assert (await box.files.download("/workspace", tmp_path / "copy")).file_count == 1
            assert (tmp_path / "copy" / "a.txt").read_text() == "one\n"
            await asyncio.gather(*(fork.remove(force=True) for fork in forks))
        assert (await box.info).status == "stopped", "leaving the block ends it"
        await box.remove()
        with pytest.raises(NotFound):
            await box.info

    run(work)


def test_many_sandboxes_in_one_process_without_a_thread_for_each(client: AsyncSnapshotd, runtime: str) -> None:
    count = long.size(8, 50)
    threads, sizes = list[int](), list[int]()

    async def one(number: int) -> int:
        box = await AsyncSandbox.create(runtime=runtime, client=client)
        try:
            await box.files.write("n", str(number))
            for _ in range(3):
                done = await box.exec('n=$(cat n); echo $((n + 1)) > n; echo "$n"', check=True)
                threads.append(threading.active_count())
            sizes.append(daemon_bytes((await client.version()).pid))
            assert int(done.stdout) == number + 2
            assert len(await box.snapshots()) == 5
            return int(await box.files.read_text("n"))
        finally:
            await box.remove(force=True)

    async def work() -> None:
        assert await asyncio.gather(*map(one, range(count))) == [number + 3 for number in range(count)]
        assert max(sizes) < MOST_DAEMON_BYTES

    before = threading.active_count()
    run(work)
    assert max(threads) == before


def test_a_cancelled_task_ends_its_throw_away_command(snap: Snap, client: AsyncSnapshotd, runtime: str) -> None:
    async def work() -> None:
        box = await AsyncSandbox.create(runtime=runtime, client=client)
        started = asyncio.Event()
        head = await box.head()
        command = head.exec("echo on; exec sleep 600", on_stdout=lambda _: started.set())
        task = asyncio.create_task(command)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await box.remove(force=True)

    before = running(snap)
    run(work)
    wait_until(lambda: running(snap) <= before, "the throw-away fork has ended")


def test_a_cancelled_task_leaves_its_command_to_the_daemon(client: AsyncSnapshotd, runtime: str) -> None:
    async def work() -> None:
        box = await AsyncSandbox.create(runtime=runtime, client=client)
        started = asyncio.Event()
        command = box.exec("echo on; read x < /tmp/pipe; echo $x > got", on_stdout=lambda _: started.set())
        await box.exec("mkfifo /tmp/pipe", check=True)
        task = asyncio.create_task(command)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await box.exec("echo later > /tmp/pipe", check=True, timeout=60)
        while not any("read x" in str(one.info.tool.arguments) for one in await box.snapshots()):
            await asyncio.sleep(0.05)
        assert await box.files.read_text("got") == "later\n"
        await box.remove(force=True)

    run(work)


def test_input_and_a_terminal(client: AsyncSnapshotd, runtime: str) -> None:
    async def work() -> None:
        box = await AsyncSandbox.create(runtime=runtime, client=client)
        terminal, said = AsyncTerminal(30, 90), asyncio.Event()
        read = iter([b"stty size\n", b"exit 3\n"])
        gate = threading.Event()

        class Typed:
            def read(self, count: int, /) -> bytes:
                if next_line := next(read, b""):
                    if next_line.startswith(b"exit"):
                        assert gate.wait(60)
                    return next_line
                return b""

        heard = bytearray()

        def on_output(_: str, data: bytes) -> None:
            heard.extend(data)
            if b"30 90" in heard:
                said.set()

        task = asyncio.create_task(client.exec(box.id, ["sh"], stdin=Typed(), terminal=terminal, on_output=on_output))
        await said.wait()
        await terminal.resize(20, 70)
        gate.set()
        assert (await task).exit_code == 3
        await box.remove(force=True)

    run(work)
