"""Checkpoints on their way from the file to LangGraph: everything is read in one moment, and made into values later,
without the file's lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from snapshotd.integrations.langgraph.checkpoints import Checkpoints, FoundCheckpoint
from snapshotd.integrations.langgraph.readable import load
from snapshotd.integrations.langgraph.values import Packed, StoredValues


class Held(NamedTuple):
    """A serialised value with the pieces that it is made of."""

    value: Packed
    order: tuple[int, ...]
    pieces: dict[int, bytes]

    def load(self, serde: SerializerProtocol) -> Any:
        """UsageError: its class cannot be read back."""
        head, order, pieces = self.value.head, self.order, self.pieces
        return load(serde, self.value.kind, head + b"".join([pieces[pk] for pk in order]) if order else head)


class HeldCheckpoint(NamedTuple):
    """A checkpoint with all that is in it, still serialised."""

    found: FoundCheckpoint
    values: dict[str, Held]
    writes: list[tuple[str, str, Held]]

    def tuple(self, serde: SerializerProtocol) -> CheckpointTuple:
        """As LangGraph has it. UsageError: a class cannot be read back."""
        found = self.found
        checkpoint = cast(dict[str, Any], load(serde, *found.body.state))
        checkpoint["id"] = found.id
        checkpoint["channel_values"] = {channel: value.load(serde) for channel, value in self.values.items()}
        return CheckpointTuple(
            _config(found, found.id),
            cast(Checkpoint, checkpoint),
            cast(CheckpointMetadata, found.metadata),
            None if found.parent is None else _config(found, found.parent),
            [(task, channel, value.load(serde)) for task, channel, value in self.writes],
        )


class CheckpointReader:
    """Thread-safe."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._all = checkpoints

    def one(self, thread: str, ns: str, checkpoint: str | None) -> HeldCheckpoint | None:
        """The checkpoint, or the latest."""
        with self._all.db.reading():
            found = self._all.find(thread, ns, checkpoint)
            return None if found is None else self._held([found])[0]

    def some(self, numbers: Iterable[int], wanted: Mapping[str, Any]) -> list[HeldCheckpoint]:
        """The ones that are still there and have this metadata."""
        with self._all.db.reading():
            return self._held(self._all.page(numbers, wanted))

    def histories(
        self, thread: str, ns: str, checkpoint: str | None, channels: Sequence[str]
    ) -> dict[str, tuple[list[tuple[str, Held]], Held | None]]:
        """For each channel the writes to the checkpoints before this one, (task, value), back to the nearest that has
        a value of it, and that value."""
        left = dict.fromkeys(channels)
        writes: dict[str, list[tuple[str, Packed]]] = {channel: [] for channel in channels}
        seeds: dict[str, Packed] = {}
        with self._all.db.reading():
            found = self._all.find(thread, ns, checkpoint, writes=False) if channels else None
            if found is not None:
                for pk, body in self._all.ancestors(found):
                    for task, channel, value in reversed(self._all.writes_of(pk)):
                        if channel in left:
                            writes[channel].append((task, value))
                    seeds |= {channel: body.values[channel] for channel in left if channel in body.values}
                    left = {channel: None for channel in left if channel not in seeds}
                    if not left:
                        break
            hold = self._holder([*seeds.values(), *(value for some in writes.values() for _, value in some)])
        return {
            channel: (
                [(task, hold(value)) for task, value in reversed(writes[channel])],
                hold(seeds[channel]) if channel in seeds else None,
            )
            for channel in channels
        }

    def _held(self, found: Sequence[FoundCheckpoint]) -> list[HeldCheckpoint]:
        hold = self._holder(
            [value for each in found for value in each.body.values.values()]
            + [value for each in found for _, _, value in each.writes]
        )
        return [
            HeldCheckpoint(
                each,
                {channel: hold(value) for channel, value in each.body.values.items()},
                [(task, channel, hold(value)) for task, channel, value in each.writes],
            )
            for each in found
        ]

    def _holder(self, values: Sequence[Packed]) -> _Holder:
        return _Holder(self._all.values, values)


class _Holder:
    """Reads the pieces of some values at once, and gives out each with them."""

    def __init__(self, store: StoredValues, values: Sequence[Packed]) -> None:
        self._orders = {value: store.pieces_of(value) for value in values}
        self._pieces = store.load(self._orders.values())

    def __call__(self, value: Packed) -> Held:
        return Held(value, self._orders[value], self._pieces)


def _config(found: FoundCheckpoint, checkpoint: str) -> RunnableConfig:
    return {
        "configurable": {"thread_id": found.place.thread, "checkpoint_ns": found.place.ns, "checkpoint_id": checkpoint}
    }
