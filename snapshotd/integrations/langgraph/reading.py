"""Checkpoints on their way from the file to LangGraph: everything is read in one moment, and made into values later,
without the file's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        """As LangGraph has it. UsageError: a class cannot be read back."""
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
        with self._moment() as all_:
            found = all_.find(thread, ns, checkpoint)
            if found is None:
                return None
            return _held(all_, [found._replace(writes=all_.writes_of(found.pk))])[0]

    def some(self, numbers: Iterable[int], wanted: Mapping[str, Any]) -> list[HeldCheckpoint]:
        """The ones that are still there and have this metadata."""
        with self._moment() as all_:
            return _held(all_, all_.page(numbers, wanted))

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
            hold = _holder(all_, [*seeds.values(), *(value for some in writes.values() for _, value in some)])
            return {
                channel: (
                    [(task, hold(value)) for task, value in reversed(writes[channel])],
                    hold(seeds[channel]) if channel in seeds else None,
                )
                for channel in channels
            }

    @contextmanager
    def _moment(self) -> Iterator[Checkpoints]:
        """The checkpoints as of one moment."""
        lock = self._writing.db.lock
        if lock.acquire(blocking=False):
            try:
                with self._writing.db.reading():
                    yield self._writing
            finally:
                lock.release()
        else:
            with self._reading.db.reading():
                yield self._reading


def _held(all_: Checkpoints, found: Sequence[FoundCheckpoint]) -> list[HeldCheckpoint]:
    hold = _holder(
        all_,
        [value for each in found for value in each.body.values.values()]
        + [value for each in found for _, _, value in each.writes],
    )
    return [
        HeldCheckpoint(
            each,
            {channel: hold(value) for channel, value in each.body.values.items()},
            [(task, channel, hold(value)) for task, channel, value in each.writes],
        )
        for each in found
    ]


def _holder(all_: Checkpoints, values: Sequence[Packed]) -> Callable[[Packed], Held]:
    """Reads the pieces of all these values at once, and gives out each of them."""
    pieces = all_.values.load([value for value in values if value.own or value.recipe])

    def hold(value: Packed) -> Held:
        order = all_.values.pieces_of(value)
        return Held(value.kind, value.head, order, [pieces[pk] for pk in order])

    return hold


def _config(found: FoundCheckpoint, checkpoint: str) -> RunnableConfig:
    return {
        "configurable": {"thread_id": found.place.thread, "checkpoint_ns": found.place.ns, "checkpoint_id": checkpoint}
    }
