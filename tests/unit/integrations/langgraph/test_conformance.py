"""LangGraph's own suite for checkpointers, all capabilities, through the asynchronous methods and the synchronous ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from snapshotd.integrations.langgraph import SnapshotdSaver
from tests.langgraph_rig import Cipher

LEAST = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}
"""Tests of each capability in langgraph-checkpoint-conformance 0.0.2."""


class Blocking(SnapshotdSaver):
    """The suite calls asynchronous methods only. Here each of them is the synchronous one, in the same thread."""

    async def aput(self, *args: Any) -> Any:
        return self.put(*args)

    async def aput_writes(self, *args: Any, **more: Any) -> None:
        self.put_writes(*args, **more)

    async def aget_tuple(self, config: Any) -> Any:
        return self.get_tuple(config)

    async def alist(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        for found in self.list(*args, **more):
            yield found

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)


ENCRYPTED = partial(SnapshotdSaver, serde=EncryptedSerializer(Cipher()))


@pytest.mark.parametrize(
    "make", [SnapshotdSaver, Blocking, ENCRYPTED], ids=["asynchronous", "synchronous", "encrypted"]
)
def test_every_capability_has_full_marks(
    make: Callable[[Path], SnapshotdSaver], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    files = iter(range(100))

    @checkpointer_test(name="SnapshotdSaver")
    async def saver() -> AsyncIterator[SnapshotdSaver]:
        async with make(tmp_path / f"{next(files)}.db") as opened:
            yield opened

    report = asyncio.run(validate(saver))
    passed = {name: result.tests_passed for name, result in report.results.items()}
    record_property("told", f"langgraph-checkpoint-conformance: {sum(passed.values())} passed: {passed}")
    assert [result.failures for result in report.results.values()] == [[]] * len(passed)
    assert report.passed_all()
    assert all(passed[name] >= least for name, least in LEAST.items())
