"""The parts of the tools. A tool is a method over the asynchronous client, in `hands.py`, `history.py` or `branches.py`: its
docstring is what the model reads of it, and its row in the API says what it does to the world.

Arguments that many tools have in one way are not here: `key`, under which a call is made once, and the trajectory of a
server that has only one (`server.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, TypeVar

from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations
from pydantic import Field

from snapshotd.api.operation import READ, Operation
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.reach import Reach

IDLE_S = 1800.0
"""A sandbox that a client has made and left ends, with a last snapshot, after so many seconds without a command."""
TIMEOUT_S = 600.0
_SAID_S = 0.5
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

Trajectory = Annotated[str, Field(description="Id or name of a trajectory: a sandbox with its history.")]
Ref = Annotated[str, Field(description="A snapshot: its id or tag. A trajectory stands for its newest one.")]
Command = Annotated[
    str | list[str], Field(description="Text for `/bin/sh -c`, or a list: the program and its arguments.", min_length=1)
]
Cwd = Annotated[str | None, Field(description="Absolute path in the sandbox; null: /workspace.")]
Timeout = Annotated[float, Field(description="The command is ended after so many seconds.", gt=0, le=86400)]
Offset = Annotated[int, Field(description="Where to begin: 0, or `next_offset` of the answer before.", ge=0)]
Most = Annotated[int, Field(description="Most bytes of text in the answer.", ge=256, le=answers.TEXT_MAX_BYTES)]
Items = Annotated[int, Field(description="Most items in the answer.", ge=1, le=answers.ITEMS_MAX)]
Path = Annotated[str, Field(description="Path in the sandbox; a relative one starts at /workspace.", min_length=1)]


@dataclass(frozen=True, slots=True)
class ToolRow:
    """A tool's operation, and the argument that names the trajectory whose policy it is asked of (None: it asks nobody)."""

    operation: Operation[Any]
    subject: str | None
    annotations: ToolAnnotations


def tool(
    operation: Operation[Any],
    title: str,
    *,
    subject: str | None = None,
    destructive: bool = False,
    idempotent: bool = False,
    outside: bool = False,
) -> Callable[[F], F]:
    """Declares a tool. Its operation says if it only reads. `destructive`: it may end or replace what is there (a rewind
    brings files back, not what ran); `outside`: what it runs may reach more than the sandbox."""
    reads = operation.scope == READ
    hints = ToolAnnotations(
        title=title,
        read_only_hint=reads,
        destructive_hint=destructive,
        idempotent_hint=reads or idempotent,
        open_world_hint=outside,
    )

    def declare(method: F) -> F:
        method.row = ToolRow(operation, subject, hints)  # type: ignore[attr-defined]
        return method

    return declare


class ToolSet:
    """Some tools of one server. `network`: of the sandboxes that it makes."""

    def __init__(self, reach: Reach, network: str) -> None:
        self._reach, self._network = reach, network

    @property
    def _client(self) -> AsyncSnapshotd:
        return self._reach.client

    async def _id(self, trajectory: str) -> str:
        return (await self._reach.trajectory(trajectory)).id

    async def _snapshot(self, ref: str) -> str:
        return (await self._reach.snapshot(ref)).id

    async def _any(self, ref: str) -> str:
        """A trajectory (with its files as they are now), else a snapshot."""
        owner = await self._client.trajectory(ref)
        if owner.id.startswith(ref) or owner.name == ref:
            return await self._id(owner.id)
        return await self._snapshot(ref)


class KeptOutputs:
    """Both outputs of a command."""

    def __init__(self, most: int) -> None:
        self._kept = {"stdout": answers.KeptText(most), "stderr": answers.KeptText(most)}

    def taker(self, say: Callable[[str], None]) -> Callable[[str, bytes], None]:
        """Keeps output, and tells how much there is."""

        def take(stream: str, data: bytes) -> None:
            self._kept[stream].add(data)
            line = data.decode(errors="replace").strip().rpartition("\n")[2][:200]
            say(line or f"{sum(one.total for one in self._kept.values())} bytes of output")

        return take

    def texts(self) -> dict[str, Any]:
        """The fields of a `CommandAnswer`."""
        texts = {name: one.text() for name, one in self._kept.items()}
        return {**texts, "cut": any(one.is_cut for one in self._kept.values())}


@asynccontextmanager
async def report_progress(ctx: Context) -> AsyncIterator[Callable[[str], None]]:
    """Report progress to the client inside the block, by the function that it gets: the newest message, twice a second at
    most."""
    news, newest = asyncio.Event(), [""]

    def say(message: str) -> None:
        newest[:] = [message]
        news.set()

    async def pass_on() -> None:
        for number in count(1):
            await news.wait()
            news.clear()
            await ctx.report_progress(number, message=newest[0])
            await asyncio.sleep(_SAID_S)

    telling = asyncio.create_task(pass_on())
    telling.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # a client that has gone is told nothing
    try:
        yield say
    finally:
        telling.cancel()


def trajectory_of(info: TrajectoryInfo) -> answers.TrajectoryAnswer:
    return answer_of(answers.TrajectoryAnswer, info)


A = TypeVar("A", bound=answers.Answer)


def answer_of(kind: type[A], record: object) -> A:
    return kind.model_validate(record)
