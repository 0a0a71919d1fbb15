"""Threads from one saver into another, whichever they are: in from LangGraph's own savers, and out again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointTuple

from snapshotd.errors import Conflict

_OWN = ("snapshot",)
"""Metadata that means nothing elsewhere."""


def copy_threads(
    source: BaseCheckpointSaver[Any], target: BaseCheckpointSaver[Any], threads: Collection[str] | None = None
) -> int:
    """Copy all threads, or these, with every checkpoint and the writes to it, oldest first; returns the number of
    checkpoints. The source is not changed, and nothing else should write to it meanwhile.

    A thread goes on in the target where it was in the source: versions of channels are made into the kind that the target
    counts in. The paths of tasks are not part of what a saver tells, so writes of parallel tasks are in the order of
    their ids. Files of a sandbox stay with their saver. Conflict: the target has one of the threads; nothing was copied.
    """
    found = [
        one.config for one in source.list(None) if threads is None or one.config["configurable"]["thread_id"] in threads
    ]
    names = sorted({one["configurable"]["thread_id"] for one in found})
    for name in names:
        if next(iter(target.list({"configurable": {"thread_id": name}}, limit=1)), None) is not None:
            raise Conflict(
                f"thread {name!r} cannot be copied because the target has one of that name: delete it there first"
            )
    versions: dict[Any, Any] = {}
    for config in reversed(found):
        one = source.get_tuple(config)
        if one is not None:
            _copy(one, target, versions)
    return len(found)


def _copy(one: CheckpointTuple, target: BaseCheckpointSaver[Any], versions: dict[Any, Any]) -> None:
    names = one.config["configurable"]
    place = {"thread_id": names["thread_id"], "checkpoint_ns": names.get("checkpoint_ns", "")}
    above: RunnableConfig = {"configurable": place}
    if one.parent_config is not None:
        above = {"configurable": {**place, "checkpoint_id": one.parent_config["configurable"]["checkpoint_id"]}}
    checkpoint = _renumber(one.checkpoint, target, versions)
    metadata: Any = {name: value for name, value in one.metadata.items() if name not in _OWN}
    at = target.put(above, checkpoint, metadata, checkpoint["channel_versions"])
    writes: dict[str, list[tuple[str, Any]]] = {}
    for task, channel, value in one.pending_writes or ():
        writes.setdefault(task, []).append((channel, value))
    for task, some in writes.items():
        target.put_writes(at, some, task)


def _renumber(checkpoint: Checkpoint, target: BaseCheckpointSaver[Any], versions: dict[Any, Any]) -> Checkpoint:
    """The checkpoint with versions as the target makes them: numbers become its texts, each the same one everywhere."""

    def renumber(version: Any) -> Any:
        if isinstance(version, str) or not isinstance(target.get_next_version(None, None), str):
            return version
        if version not in versions:
            versions[version] = target.get_next_version(int(version) - 1, None)
        return versions[version]

    return {
        **checkpoint,
        "channel_versions": {name: renumber(version) for name, version in checkpoint["channel_versions"].items()},
        "versions_seen": {
            node: {name: renumber(version) for name, version in seen.items()}
            for node, seen in checkpoint["versions_seen"].items()
        },
    }
