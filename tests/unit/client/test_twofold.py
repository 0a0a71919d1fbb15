"""A verb is one function: a coroutine in the asynchronous form of its class, and run to its end in the one for threads."""

from __future__ import annotations

import ast
import asyncio
import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from snapshotd import client
from snapshotd.api.commands import ExecOptions
from snapshotd.client.sandbox import AnySandbox, SandboxRunOptions
from snapshotd.client.twofold import (
    Blocking,
    BlockingContext,
    Twofold,
    attribute,
    class_verb,
    closing,
    iterate,
    run,
    stream,
    verb,
)

ROOT = Path(__file__).parents[3]


class AsyncCounter(Twofold):
    """Counts, and notes what happens to it."""

    def __init__(self) -> None:
        self.count = 0
        self.notes: list[str] = []

    @verb
    async def add(self, n: int = 1, *, twice: bool = False) -> int:
        """Add `n`."""
        self.count += n
        return await self.add(n) if twice else self.count

    @class_verb
    async def at(cls: Any, count: int) -> Any:
        """One that begins there."""
        made = cls()
        made.count = count
        return made

    @attribute
    async def half(self) -> float:
        """Half of it."""
        return await self.add(0) / 2

    @stream
    async def up_to(self, end: int) -> AsyncIterator[int]:
        """The numbers from here."""
        self.notes.append("asked")
        return self._numbers(end)

    async def _numbers(self, end: int) -> AsyncIterator[int]:
        try:
            for number in range(self.count, end):
                yield number
        finally:
            self.notes.append("closed")

    @verb
    async def sum(self, end: int) -> int:
        """The sum of some."""
        return sum([number async for number in self.up_to(end)])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.add(100)


class Counter(BlockingContext, AsyncCounter):
    """The same for threads."""


class Derived(Counter):
    """A user's own class."""


@pytest.mark.parametrize("cls", [Counter, Derived])
def test_the_form_for_threads(cls: type[Counter]) -> None:
    counter = cls()
    assert (counter.add(), counter.add(2, twice=True), counter.half) == (1, 5, 2.5)
    assert (counter.sum(8), counter.count) == (5 + 6 + 7, 5)
    assert list(counter.up_to(7)) == [5, 6]
    made = cls.at(3)
    assert (type(made), made.add()) == (cls, 4)
    with counter as entered:
        assert entered is counter
    assert counter.count == 105


def test_the_form_for_asyncio() -> None:
    async def work() -> None:
        counter = AsyncCounter()
        assert (await counter.add(), await counter.add(2, twice=True), await counter.half) == (1, 5, 2.5)
        assert await counter.sum(8) == 5 + 6 + 7
        assert [number async for number in counter.up_to(7)] == [5, 6]
        made = await AsyncCounter.at(3)
        assert (type(made), await made.add()) == (AsyncCounter, 4)
        async with counter:
            pass
        assert counter.count == 105

    asyncio.run(work())


def test_a_stream_asks_at_once_for_threads_and_else_when_it_is_read() -> None:
    counter = Counter()
    numbers = counter.up_to(3)
    assert counter.notes == ["asked"]
    assert next(numbers) == 0
    numbers.close()  # type: ignore[attr-defined]
    assert counter.notes == ["asked", "closed"]
    left = counter.up_to(3)
    assert next(left) == 0
    del left
    gc.collect()
    assert counter.notes[2:] == ["asked", "closed"]

    async def work() -> None:
        waiting = AsyncCounter()
        numbers = waiting.up_to(3)
        assert waiting.notes == []
        async with closing(numbers):
            assert await anext(numbers) == 0
        assert waiting.notes == ["asked", "closed"]
        never = waiting.up_to(3)
        await never.aclose()
        assert [number async for number in never] == []
        assert waiting.notes == ["asked", "closed"]

    asyncio.run(work())


def test_a_verb_that_waits_for_a_loop_says_so_in_a_thread() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="event loop"):
        run(waits())


def test_an_error_ends_the_iteration() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no more")

    found = list[int]()
    with pytest.raises(ValueError, match="no more"):
        found.extend(iterate(items()))
    assert list(iterate(_nothing())) == []


async def _nothing() -> AsyncIterator[int]:
    for number in list[int]():
        yield number


def test_many_threads_use_one_object() -> None:
    counter, seen = Counter(), list[int]()
    threads = [threading.Thread(target=lambda: seen.append(counter.sum(100))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [sum(range(100))] * 20


def test_a_verb_tells_what_it_is() -> None:
    for cls in (Counter, AsyncCounter):
        assert (cls.add.__doc__, cls.add.__name__) == ("Add `n`.", "add")
        assert list(inspect.signature(cls().add).parameters) == ["n", "twice"]
        assert inspect.getattr_static(cls, "half").__doc__ == "Half of it."
    assert inspect.iscoroutinefunction(AsyncCounter.add)
    assert not inspect.iscoroutinefunction(Counter.add)
    assert inspect.signature(Counter.up_to).return_annotation == "Iterator[int]"
    assert inspect.signature(AsyncCounter.up_to).return_annotation == "AsyncIterator[int]"


def test_every_class_of_the_client_is_there_in_both_forms() -> None:
    plain = {name.removeprefix("Async") for name in client.__all__ if name.startswith("Async")}
    assert plain == {"Command", "Port", "Sandbox", "Snapshot", "Snapshotd", "Terminal"}
    for name in plain:
        assert issubclass(getattr(client, name), Blocking)
        waiting = getattr(client, f"Async{name}")
        assert issubclass(waiting, Twofold)
        assert not issubclass(waiting, Blocking)


@pytest.mark.parametrize("file", ["sandbox.py", "aio/sandbox.py"])
@pytest.mark.parametrize(("name", "options"), [("exec", ExecOptions), ("run", SandboxRunOptions)])
def test_overloads_have_the_keywords_of_their_verb(file: str, name: str, options: Any) -> None:
    """They stand in each form, since a descriptor cannot carry them."""
    tree = ast.parse((ROOT / "snapshotd" / "client" / file).read_text())
    overloads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == name
        and any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)
    ]
    assert len(overloads) == (3 if name == "exec" else 2)
    words = {one.arg for node in overloads for one in node.args.kwonlyargs}
    whole = {
        one.name
        for one in inspect.signature(getattr(AnySandbox, name)).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    }
    assert words == whole
    assert all(node.args.kwarg is not None for node in overloads)


TYPED = """
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type
from snapshotd.client import *
from snapshotd.client import AsyncCommand, AsyncPort, AsyncSandbox, AsyncSnapshot, AsyncSnapshotd
from snapshotd.client.results import CommandInfo, ExecInfo, SnapshotInfo, TrajectoryInfo

def threads(client: Snapshotd, box: Sandbox) -> None:
    assert_type(client.exec("x", ["ls"], timeout=1), ExecInfo)
    assert_type(client.events("x"), Iterator[dict[str, Any]])
    assert_type(client.apply("x", "to").commit, str | None)
    assert_type(box.exec("ls"), ExecResult)
    assert_type(box.exec("ls", background=True), Command)
    assert_type(box.info, TrajectoryInfo)
    assert_type(box.fork(2)[0].head().fork()[0], Sandbox)
    assert_type(box.rewind("x"), Snapshot)
    assert_type(Sandbox.create(image="x", memory="512m"), Sandbox)
    assert_type(Sandbox.run("a.py", reuse=True), RunResult)
    assert_type(Sandbox.run("a.py", detach=True), Sandbox)
    assert_type(box.files.read("x"), bytes)
    assert_type(box.files.stream("x"), Iterator[bytes])
    with box.port(80) as port, box.command("x") as command:
        assert_type(port, Port)
        assert_type(command.info, CommandInfo)

async def tasks(client: AsyncSnapshotd, box: AsyncSandbox) -> None:
    assert_type(await client.exec("x", ["ls"], timeout=1), ExecInfo)
    async for event in client.events("x"):
        assert_type(event, dict[str, Any])
    assert_type((await client.apply("x", "to")).commit, str | None)
    assert_type(await box.exec("ls"), ExecResult)
    assert_type(await box.exec("ls", background=True), AsyncCommand)
    assert_type(await box.info, TrajectoryInfo)
    assert_type(await box.fork(2), list[AsyncSandbox])
    assert_type(await box.rewind("x"), AsyncSnapshot)
    assert_type(await AsyncSandbox.create(image="x", memory="512m"), AsyncSandbox)
    assert_type(await AsyncSandbox.run("a.py", reuse=True), RunResult)
    assert_type(await AsyncSandbox.run("a.py", detach=True), AsyncSandbox)
    assert_type(await box.files.read("x"), bytes)
    async with await box.port(80) as port, await box.command("x") as command:
        assert_type(port, AsyncPort)
        assert_type(await command.info, CommandInfo)

def wrong(client: Snapshotd, other: AsyncSnapshotd) -> None:
    client.exec("x", ["ls"], timeot=1)  # error
    client.exec(["ls"])  # error
    Sandbox.create(image=1)  # error
    Sandbox.create(client=other)  # error
    other.trajectory("x").id  # error
    AsyncSandbox.create(imag="x")  # error
"""


def test_a_program_of_a_user_is_typed_with_both_clients(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run([*argv, str(program)], capture_output=True, text=True, check=False, cwd=ROOT)
    wrong = {number for number, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# error")}
    said = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    assert said == {str(number) for number in wrong}, done.stdout + done.stderr


@pytest.mark.parametrize("asynchronous", [False, True])
def test_objects_go_to_another_process(asynchronous: bool, tmp_path: Path) -> None:
    form = client.AsyncSnapshotd if asynchronous else client.Snapshotd
    kind = client.AsyncSandbox if asynchronous else client.Sandbox
    info = SimpleNamespace(id="5" * 64, name="box")
    sandbox: Any = kind(form(tmp_path), info)  # type: ignore[arg-type]
    for made in (pickle.loads(pickle.dumps(sandbox)), copy.deepcopy(sandbox)):
        assert (type(made), made.id, made.name) == (kind, sandbox.id, "box")
        assert made._verbs._transport is made._client._transport
        assert made._client.socket_path == sandbox._client.socket_path
        assert type(made._verbs) is type(sandbox._verbs)
