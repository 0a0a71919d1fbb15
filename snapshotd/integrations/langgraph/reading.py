"""Checkpoints on their way from the file to LangGraph: everything is read in one moment, and made into values later,
without the file's lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from snapshotd.integrations.langgraph.checkpoints import Checkpoints, FoundCheckpoint
from snapshotd.integrations.langgraph.readable import load
from snapshotd.integrations.langgraph.templates import Held, Templates
from snapshotd.integrations.langgraph.values import Packed


class HeldCheckpoint(NamedTuple):
    """A checkpoint with all that is in it, still serialised."""

    found: FoundCheckpoint
    values: dict[str, Held]
    writes: list[tuple[str, str, Held]]

    def tuple(self, serde: SerializerProtocol, templates: Templates) -> CheckpointTuple:
        """The checkpoint in LangGraph's own form. UsageError: a class cannot be read back."""
        found = self.found
        checkpoint = cast(dict[str, Any], load(serde, *found.body.state))
        checkpoint["id"] = found.id
        checkpoint["channel_values"] = {channel: templates.load(serde, value) for channel, value in self.values.items()}
        return CheckpointTuple(
            _config(found, found.id),
            cast(Checkpoint, checkpoint),
            cast(CheckpointMetadata, found.metadata),
            None if found.parent is None else _config(found, found.parent),
            [(task, channel, templates.load(serde, value)) for task, channel, value in self.writes],
        )


class CheckpointReader:
    """Reads over the connection that writes, which has the latest pages and pieces in memory; over one of its own while
    a commit is on its way to the disk. Thread-safe."""

    def __init__(self, writing: Checkpoints, reading: Checkpoints) -> None:
        self._writing, self._reading = writing, reading

    def one(self, thread: str, ns: str, checkpoint: str | None) -> HeldCheckpoint | None:
        """The checkpoint, or the latest."""
        with self._connection() as all_:
            found = all_.find(thread, ns, checkpoint)
            if found is None:
                return None
            pieces = all_.values.load_kept(_values_of(found))
            if pieces is not None:
                return _hold_all(all_, found, pieces)
            with all_.db.reading():  # else its pieces may be removed before they are read
                found = all_.find(thread, ns, checkpoint)
                return None if found is None else _read_held(all_, [found])[0]

    def some(self, numbers: Iterable[int], wanted: Mapping[str, Any]) -> list[HeldCheckpoint]:
        """The checkpoints in these rows that are still there and have this metadata."""
        with self._moment() as all_:
            return _read_held(all_, all_.page(numbers, wanted))

    def histories(
        self, thread: str, ns: str, checkpoint: str | None, channels: Sequence[str]
    ) -> dict[str, tuple[list[tuple[str, Held]], Held | None]]:
        """For each channel the writes to the checkpoints before this one, (task, value), back to the nearest that has
        a value of it, and that value."""
        left = dict.fromkeys(channels)
        writes: dict[str, list[tuple[str, Packed]]] = {channel: [] for channel in channels}
        seeds: dict[str, Packed] = {}
        with self._moment() as all_:
            found = all_.find(thread, ns, checkpoint) if channels else None
            if found is not None:
                for pk, body in all_.ancestors(found):
                    for task, channel, value in reversed(all_.writes_of(pk)):
                        if channel in left:
                            writes[channel].append((task, value))
                    seeds |= {channel: body.values[channel] for channel in left if channel in body.values}
                    left = {channel: None for channel in left if channel not in seeds}
                    if not left:
                        break
            pieces = all_.values.load([*seeds.values(), *(value for some in writes.values() for _, value in some)])
            return {
                channel: (
                    [(task, _hold(all_, value, pieces)) for task, value in reversed(writes[channel])],
                    _hold(all_, seeds[channel], pieces) if channel in seeds else None,
                )
                for channel in channels
            }

    @contextmanager
    def _moment(self) -> Iterator[Checkpoints]:
        """The checkpoints as of one moment."""
        with self._connection() as all_, all_.db.reading():
            yield all_

    @contextmanager
    def _connection(self) -> Iterator[Checkpoints]:
        all_ = self._writing if self._writing.db.lock.acquire(blocking=False) else self._reading
        if all_ is self._reading:
            all_.db.lock.acquire()
        try:
            yield all_
        finally:
            all_.db.lock.release()


def _read_held(all_: Checkpoints, found: Sequence[FoundCheckpoint]) -> list[HeldCheckpoint]:
    """Read the pieces of all values of these checkpoints at once."""
    pieces = all_.values.load([value for each in found for value in _values_of(each)])
    return [_hold_all(all_, each, pieces) for each in found]


def _values_of(found: FoundCheckpoint) -> list[Packed]:
    """The values that have pieces."""
    values = [*found.body.values.values(), *(value for _, _, value in found.writes)]
    return [value for value in values if value.own or value.recipe]


def _hold_all(all_: Checkpoints, found: FoundCheckpoint, pieces: Mapping[int, bytes]) -> HeldCheckpoint:
    return HeldCheckpoint(
        found,
        {channel: _hold(all_, value, pieces) for channel, value in found.body.values.items()},
        [(task, channel, _hold(all_, value, pieces)) for task, channel, value in found.writes],
    )


def _hold(all_: Checkpoints, value: Packed, pieces: Mapping[int, bytes]) -> Held:
    order = all_.values.pieces_of(value)
    return Held(value.kind, value.head, order, [pieces[pk] for pk in order])


def _config(found: FoundCheckpoint, checkpoint: str) -> RunnableConfig:
    return {
        "configurable": {"thread_id": found.place.thread, "checkpoint_ns": found.place.ns, "checkpoint_id": checkpoint}
    }
