"""The asynchronous methods of `SnapshotdSaver`: each does what its synchronous twin does, in a thread."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.config import get_config

from snapshotd.client import ExecResult
from snapshotd.errors import UsageError


class Asynchronous(BaseCheckpointSaver[Any]):
    """Part of `SnapshotdSaver`, whose methods it calls."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def exec(
        self, command: str | Sequence[str], *, config: RunnableConfig | None = None, **options: Any
    ) -> ExecResult: ...

    @abstractmethod
    def wait_for_decisions(self, config: RunnableConfig) -> None: ...

    @abstractmethod
    def _pages(
        self,
        config: RunnableConfig | None,
        wanted: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[Sequence[CheckpointTuple]]: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aexec(
        self, command: str | Sequence[str], *, config: RunnableConfig | None = None, **options: Any
    ) -> ExecResult:
        """See `exec`."""
        return await asyncio.to_thread(self.exec, command, config=here(config), **options)

    async def await_for_decisions(self, config: RunnableConfig) -> None:
        """See `wait_for_decisions`."""
        await asyncio.to_thread(self.wait_for_decisions, config)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `put_writes`."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        pages = self._pages(config, filter, before, limit)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            for found in page:
                yield found

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `get_delta_channel_history`."""
        return await asyncio.to_thread(self.get_delta_channel_history, config=config, channels=channels)

    async def adelete_thread(self, thread_id: str) -> None:
        """See `delete_thread`."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `delete_for_runs`."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `copy_thread`."""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `prune`."""
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)


def here(config: RunnableConfig | None) -> RunnableConfig:
    """The config itself, or the one of the node or tool that this is called in."""
    try:
        return get_config() if config is None else config
    except RuntimeError as exc:
        raise UsageError("there is no graph here: call this in a node or a tool, or give a config") from exc
