"""Writes eight files at once through an integration, while the daemon is killed: cut_off_writes.py KIND

It prints a line when it begins; then as JSON how each write ended (nothing, or the class of its error), whether its file is whole or
absent, what one more file holds that is written and read after all that, and the errors of a sandbox that is gone and of a
snapshot that never was.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from snapshotd.client import Snapshotd

SIZE = 4 << 20


class Way:
    """A sandbox behind an integration. `begin` makes it, also of a snapshot."""

    id: str

    async def begin(self, snapshot: str | None = None) -> None: ...
    async def write(self, path: str, text: str) -> None: ...
    async def read(self, path: str) -> str:
        raise NotImplementedError


class DeepAgents(Way):
    async def begin(self, snapshot: str | None = None) -> None:
        from snapshotd.client import Sandbox
        from snapshotd.integrations.deepagents import SnapshotdBackend

        if snapshot is not None:
            raise _Refused("none: the program makes the sandbox")
        box = await asyncio.to_thread(Sandbox.create, runtime="runc")
        self.id, self.backend = box.id, SnapshotdBackend(box)

    async def write(self, path: str, text: str) -> None:
        (done,) = await asyncio.to_thread(self.backend.upload_files, [(path, text.encode())])
        if done.error is not None:
            raise _Refused("an answer")

    async def read(self, path: str) -> str:
        (done,) = await asyncio.to_thread(self.backend.download_files, [path])
        return (done.content or b"").decode()


class Inspect(Way):
    async def begin(self, snapshot: str | None = None) -> None:
        from snapshotd.integrations.inspect_ai import SnapshotdConfig, SnapshotdEnvironment

        config = SnapshotdConfig(runtime="runc", snapshot=snapshot)
        self.box: Any = (await SnapshotdEnvironment.sample_init("cut", config, {}))["default"]
        self.id = self.box.box.id

    async def write(self, path: str, text: str) -> None:
        await self.box.write_file(path, text)

    async def read(self, path: str) -> str:
        return str(await self.box.read_file(path))


class SweRex(Way):
    async def begin(self, snapshot: str | None = None) -> None:
        from snapshotd.integrations.swe_rex import RexDeployment

        deployment = RexDeployment(snapshot=snapshot)
        await deployment.start()
        self.runtime = deployment.runtime
        self.id = self.runtime.box.id

    async def write(self, path: str, text: str) -> None:
        from swerex.runtime.abstract import WriteFileRequest

        await self.runtime.write_file(WriteFileRequest(path=path, content=text))

    async def read(self, path: str) -> str:
        from swerex.runtime.abstract import ReadFileRequest

        return (await self.runtime.read_file(ReadFileRequest(path=path))).content


class E2B(Way):
    async def begin(self, snapshot: str | None = None) -> None:
        from e2b import AsyncSandbox

        self.box = await AsyncSandbox.create(snapshot, allow_internet_access=False)
        self.id = self.box.sandbox_id

    async def write(self, path: str, text: str) -> None:
        await self.box.files.write(path, text, user="root")

    async def read(self, path: str) -> str:
        return await self.box.files.read(path, user="root")


class _Refused(Exception):  # noqa: N818 - an answer, which is no error to DeepAgents
    pass


async def ended(work: Awaitable[Any]) -> str:
    try:
        await work
    except _Refused as exc:
        return str(exc)
    except Exception as exc:  # noqa: BLE001 - the test judges it
        return type(exc).__name__
    return ""


async def found(way: Way, number: int) -> str:
    """What there is of a file."""
    try:
        text = await way.read(f"/srv/{number}")
    except Exception as exc:  # noqa: BLE001 - the test judges it
        return f"absent: {type(exc).__name__}"
    return {f"{number}" * SIZE: "whole", "": "absent: empty"}.get(text, "a part")


async def main(kind: Callable[[], Way]) -> None:
    way = kind()
    await way.begin()
    tasks = [asyncio.create_task(ended(way.write(f"/srv/{n}", f"{n}" * SIZE))) for n in range(8)]
    await asyncio.sleep(0)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    writes = await asyncio.gather(*tasks)
    files = [(await found(way, number)).partition(":")[0] for number in range(8)]
    await way.write("/srv/after", "after")
    after = await way.read("/srv/after")
    never = await ended(kind().begin("0" * 32))
    await asyncio.to_thread(lambda: Snapshotd().remove(way.id, force=True))
    gone = await ended(way.write("/srv/gone", "gone"))
    sys.stdout.write(
        json.dumps({"writes": writes, "files": files, "after": after, "never": never, "gone": gone}) + "\n"
    )


if __name__ == "__main__":
    kinds = {"deepagents": DeepAgents, "inspect-ai": Inspect, "swe-rex": SweRex, "e2b": E2B}
    asyncio.run(main(kinds[sys.argv[1]]))
