"""A taskset of verifiers: one task, whose file the setup writes and whose reward looks at what the agent has left."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Note(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("/app/given", b"41\n")

    @vf.reward
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float(await runtime.read("/app/answer") == b"42\n")


class Notes(vf.Taskset[Note, vf.TasksetConfig]):
    def load(self) -> Iterator[Note]:
        yield Note(vf.TaskData(prompt="Write into answer what comes after the number in given."), self.config.task)


__all__ = ["Notes"]
