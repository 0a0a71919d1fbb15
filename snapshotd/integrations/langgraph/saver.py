"""`SnapshotdSaver`: LangGraph's checkpoints in one file."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from snapshotd.client import ExecResult, Sandbox, Snapshotd
from snapshotd.config import read_variables
from snapshotd.errors import UsageError
from snapshotd.failpoints import hit
from snapshotd.integrations.langgraph.asynchronous import Asynchronous, here
from snapshotd.integrations.langgraph.checkpoints import Checkpoints, FoundCheckpoint, Write, name_of
from snapshotd.integrations.langgraph.daemon.bindings import Bindings
from snapshotd.integrations.langgraph.daemon.interrupts import INTERRUPT, NO_TASK, RESUME, is_taken
from snapshotd.integrations.langgraph.daemon.sandboxes import Sandboxes
from snapshotd.integrations.langgraph.file import open_file
from snapshotd.integrations.langgraph.readable import Dumper
from snapshotd.integrations.langgraph.reading import CheckpointReader
from snapshotd.integrations.langgraph.removal import Removal
from snapshotd.integrations.langgraph.templates import Held, Templates
from snapshotd.integrations.langgraph.values import CutValue, Packed

_PAGE = 16
_ENCODER = json.JSONEncoder(separators=(",", ":"))
list_ = list
"""The built-in, which a method's name hides within the class."""
_REMEMBERED, _REMEMBERED_BYTES = 256, 64 << 20


class SnapshotdSaver(Asynchronous):
    """A checkpointer for LangGraph that keeps each message once.

        with SnapshotdSaver("agent.db") as saver:
            graph = builder.compile(checkpointer=saver)

    Every method has its asynchronous twin, which does the same in a thread. Any number of threads and processes may use
    one file; after a fork of the process each opens its own. A change is durable when the method returns, as with
    `SqliteSaver`.

    Errors of every method: Conflict (another process has been writing for 10 s), OutOfSpace, NotPermitted; DataLoss
    (the file is damaged); OSError (the disk fails); UsageError (a name that is no valid Unicode; a value whose class
    cannot be read back, which it names).
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        sandbox: Sandbox | None = None,
        client: Snapshotd | None = None,
        serde: SerializerProtocol | None = None,
    ) -> None:
        """Open a file, made when there is none; ":memory:" keeps everything in memory. With a `sandbox` every checkpoint
        is bound to a snapshot of its files (daemon/sandboxes.py), and without a path the file is the one of that sandbox below
        $XDG_DATA_HOME (~/.local/share). `client`: of the sandbox's daemon, if it is not the default one. NotFound: no
        such folder; VersionMismatch: the file was written by a newer release; UsageError: neither path nor sandbox."""
        super().__init__(serde=serde)
        if path is None:
            path = _path_for(sandbox)
        self._all = Checkpoints(open_file(path))
        self._sandboxes = None if sandbox is None else Sandboxes(Bindings(self._all.db), sandbox, client or Snapshotd())
        # So a read never waits for a commit to reach the disk.
        self._seen = self._all if path == ":memory:" else Checkpoints(open_file(path))
        self._removal = Removal(self._all)
        self._reader = CheckpointReader(self._all, self._seen)
        self._templates, self._dumper = Templates(), Dumper()
        self._remembered = _Remembered(self._all)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._seen.db.close()
        self._all.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the sandbox ---------------------------------------------------------------------------------------------------

    def exec(
        self,
        command: str | Sequence[str],
        *,
        config: RunnableConfig | None = None,
        irreversible: bool = False,
        **options: Any,
    ) -> ExecResult:
        """Run a command in the sandbox of the step that this is called in, as `Sandbox.exec`, whose options it takes.

        It finds the files of the step's checkpoint. After a kill the same call of the same task is not made again: its
        recorded result is the answer. A call that was cut off is made again on the files before it, unless it is
        `irreversible`: then Undecided. UsageError: outside of a graph (without `config`), or the saver has no sandbox;
        NotFound: the files are gone; Conflict: another call has held the sandbox for an hour; Denied: the policy, or a
        person, does not let it run. The task is interrupted (LangGraph's GraphInterrupt) while a person is asked."""
        return self._with_sandbox().exec(here(config), command, irreversible, **options)

    def sandbox(self, config: RunnableConfig | None = None) -> Sandbox:
        """The sandbox of the step that this is called in, or of the checkpoint that `config` names (a thread's latest,
        if it names none), with its files. Calls that are made through it directly are made again after a kill. Errors:
        as `exec`."""
        return self._with_sandbox().at(here(config))

    def wait_for_decisions(self, config: RunnableConfig) -> None:
        """Wait until a person has decided about every interrupt at which a thread stands (`snapshotd approve`, `deny`), or
        their time is over. Then `graph.invoke(None, config)` goes on with the answers. Errors: the daemon's; NotFound: the
        sandbox was removed, so nobody can be asked."""
        box, found = self._with_sandbox(), self.get_tuple(config)
        if found is not None:
            names = found.config["configurable"]
            thread, ns, checkpoint = names["thread_id"], names["checkpoint_ns"], names["checkpoint_id"]
            box.interrupts.wait(found, box.owner_of(thread, ns, checkpoint))

    def _with_sandbox(self) -> Sandboxes:
        if self._sandboxes is None:
            raise UsageError("this saver has no sandbox: give it one, SnapshotdSaver(path, sandbox=...)")
        return self._sandboxes

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint. A channel that has not changed since the parent is not serialised again."""
        box = self._sandboxes
        if box is None:
            return self._put(config, checkpoint, metadata, new_versions)
        thread, ns, _ = _names(config)
        try:
            stored = self._put(config, checkpoint, metadata, new_versions)
        except Exception as exc:
            box.release_calls(thread, ns, checkpoint["id"], exc)
            raise
        hit("langgraph.put.stored")
        box.release_calls(thread, ns, checkpoint["id"])
        return stored

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task wrote. Again with the same task, it changes nothing; but interrupts, errors and the like
        replace earlier ones."""
        thread, ns, checkpoint = _names(config)
        if checkpoint is None:
            raise UsageError("writes cannot be stored because the config names no checkpoint: give its checkpoint_id")
        replaces = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        task, path = name_of("task id", task_id), name_of("task path", task_path)
        rows = [
            Write(
                task,
                WRITES_IDX_MAP.get(channel, index),
                path,
                name_of("channel", channel),
                self._all.values.cut(*self._dumper.dump(self.serde, value)),
                replaces,
            )
            for index, (channel, value) in enumerate(writes)
        ]
        box = self._sandboxes
        if box is None or all(channel not in (INTERRUPT, RESUME) for channel, _ in writes):
            self._all.put_writes(thread, ns, checkpoint, rows)
            return
        held = self._reader.one(thread, ns, checkpoint)
        before = [] if held is None else held.tuple(self.serde, self._templates).pending_writes or []
        if is_taken(before, task):
            taken = self._all.values.cut(*self.serde.dumps_typed(None))
            rows.append(Write(NO_TASK, WRITES_IDX_MAP[RESUME], "", RESUME, taken, True))
        self._all.put_writes(thread, ns, checkpoint, rows)
        hit("langgraph.writes.stored")
        box.interrupts.settle_writes(thread, box.owner_of(thread, ns, checkpoint), task, writes, before)

    # -- reading -------------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that `config` names, or its thread's latest; None if there is none."""
        names = _names(config)
        held = self._reader.one(*names)
        if held is None:
            return None
        found = held.tuple(self.serde, self._templates)
        if self._sandboxes is None or names[1] or all(write[1] != INTERRUPT for write in found.pending_writes or ()):
            return found
        owner = self._sandboxes.owner_of(names[0], "", found.checkpoint["id"])
        return self._sandboxes.interrupts.with_answers(found, owner)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """The checkpoints of a thread (of one namespace, if `config` has one), or all, with the greatest id first.
        `filter`: metadata that they must have. A checkpoint that comes or goes meanwhile may be among them or not."""
        for page in self._pages(config, filter, before, limit):
            yield from page

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """For each channel the writes to the checkpoints before the one that `config` names, the oldest first, back to
        the nearest that has a value of it (`seed`)."""
        histories = self._reader.histories(*_names(config), channels)
        found: dict[str, DeltaChannelHistory] = {}
        for channel, (writes, seed) in histories.items():
            loaded: list[PendingWrite] = [(task, channel, self._load(value)) for task, value in writes]
            found[channel] = {"writes": loaded} if seed is None else {"writes": loaded, "seed": self._load(seed)}
        return found

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Numbers; a thread that came from another saver goes on with its texts."""
        if isinstance(current, str):
            number, _, rest = current.partition(".")
            return f"{int(number) + 1:0{len(number)}}{'.' if rest else ''}{rest}"
        return 1 if current is None else current + 1

    # -- removing ------------------------------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread; a missing one is no error."""
        self._removal.delete_thread(name_of("thread id", thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints that these runs made. The writes that a later checkpoint's delta channels need
        stay, unseen."""
        self._removal.delete_for_runs([str(run) for run in run_ids])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Make a thread with all that another one has; it takes no room for the values. NotFound; Conflict: the target
        exists."""
        self._removal.copy_thread(name_of("thread id", source_thread_id), name_of("thread id", target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Remove all checkpoints of threads but the latest of each namespace, or with "delete" all. The writes
        that its delta channels need stay, unseen."""
        self._removal.prune([name_of("thread id", thread) for thread in thread_ids], strategy)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _pages(
        self,
        config: RunnableConfig | None,
        wanted: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[list_[CheckpointTuple]]:
        """The checkpoints that `list` returns, some at a time. Holds nothing of the file between them."""
        names: Mapping[str, Any] = {} if config is None else config["configurable"]
        until = None if before is None else get_checkpoint_id(before)
        thread, ns, checkpoint, below = (
            None if name is None else name_of("name", name)
            for name in (names.get("thread_id"), names.get("checkpoint_ns"), names.get("checkpoint_id") or None, until)
        )
        left = -1 if limit is None else max(limit, 0)
        numbers = self._seen.numbers(thread, ns, checkpoint, below, None if wanted or limit is None else left)
        for at in range(0, len(numbers), _PAGE):
            found = self._reader.some(numbers[at : at + _PAGE], wanted or {})
            if limit is not None:
                found, left = found[:left], left - min(left, len(found))
            yield [each.tuple(self.serde, self._templates) for each in found]
            if left == 0:
                return

    def _load(self, value: Held) -> Any:
        return self._templates.load(self.serde, value)

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread, ns, parent = _names(config)
        for channel in checkpoint["channel_values"]:
            name_of("channel", channel)
        rest = {name: value for name, value in checkpoint.items() if name not in ("id", "channel_values")}
        state = self.serde.dumps_typed(rest)
        known = cast(dict[str, Any], get_checkpoint_metadata(config, metadata))
        bound = None
        if self._sandboxes is not None:
            bound = self._sandboxes.next_place(thread, ns, parent, known)
            known["snapshot"] = bound[1]
            hit("langgraph.put.bound")
        described = _json(known)
        versions, stored = checkpoint["channel_versions"], None
        made: dict[str, CutValue] = {}
        while stored is None:
            before, seen, grown = self._remembered.before(thread, ns, parent, self.serde)
            old = before.body.values if before is not None else {}
            values: dict[str, CutValue | Packed] = {}
            for channel, value in checkpoint["channel_values"].items():
                version = versions.get(channel)
                if (
                    channel in old
                    and channel not in new_versions
                    and version is not None
                    and seen.get(channel) == version
                ):
                    values[channel] = old[channel]
                    continue
                if channel not in made:  # else something was removed meanwhile, and nothing is shared any more
                    made[channel] = self._all.values.cut(*self._dumper.dump(self.serde, value), grown.get(channel))
                values[channel] = made[channel]
            grown = {channel: value for channel, value in (grown | made).items() if channel in values}
            stored = self._all.put(
                thread, ns, name_of("checkpoint id", checkpoint["id"]), parent, described, state, values, before, bound
            )
            if stored is None:
                made = {channel: value._replace(shared=0) for channel, value in made.items()}
        self._remembered.keep(_Latest(stored, dict(versions), grown))
        return _config(thread, ns, stored.id)


class _Latest(NamedTuple):
    """A checkpoint that the next one may be made from."""

    found: FoundCheckpoint
    versions: ChannelVersions
    values: dict[str, CutValue]

    def size(self) -> int:
        return sum(len(value.data) for value in self.values.values())


class _Remembered:
    """The last checkpoints that were put, from which the next ones are made. Thread-safe."""

    def __init__(self, stored: Checkpoints) -> None:
        self._stored = stored
        self._latest: OrderedDict[tuple[str, str, str], _Latest] = OrderedDict()
        self._bytes = 0
        self._guard = threading.Lock()

    def before(
        self, thread: str, ns: str, parent: str | None, serde: SerializerProtocol
    ) -> tuple[FoundCheckpoint | None, ChannelVersions, dict[str, CutValue]]:
        """The parent of a checkpoint, its channels' versions, and values as they were serialised: taken out, or read."""
        if parent is None:
            return None, {}, {}
        with self._guard:
            kept = self._latest.pop((thread, ns, parent), None)
            if kept is not None:
                self._bytes -= kept.size()
                return kept
        found = self._stored.find(thread, ns, parent)
        if found is None:
            return None, {}, {}
        return found, cast(Checkpoint, serde.loads_typed(found.body.state)).get("channel_versions", {}), {}

    def keep(self, latest: _Latest) -> None:
        found = latest.found
        with self._guard:
            self._latest[found.place.thread, found.place.ns, found.id] = latest
            self._bytes += latest.size()
            while len(self._latest) > _REMEMBERED or self._bytes > _REMEMBERED_BYTES:
                self._bytes -= self._latest.popitem(last=False)[1].size()


def _path_for(sandbox: Sandbox | None) -> Path:
    """The file of a sandbox, in a folder that is made if need be."""
    if sandbox is None:
        raise UsageError("a saver needs a file, a sandbox, or both: SnapshotdSaver('agent.db')")
    data = read_variables(["XDG_DATA_HOME"]).get("XDG_DATA_HOME", "")
    folder = Path(data if os.path.isabs(data) else Path.home() / ".local" / "share") / "snapshotd" / "langgraph"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{sandbox.id}.db"


def _names(config: RunnableConfig) -> tuple[str, str, str | None]:
    """(thread, namespace, checkpoint) of a config. UsageError: it names no thread."""
    names = config.get("configurable", {})
    if "thread_id" not in names:
        raise UsageError("the config names no thread: give {'configurable': {'thread_id': ...}}")
    checkpoint = get_checkpoint_id(config) or None
    return (
        name_of("thread id", names["thread_id"]),
        name_of("namespace", names.get("checkpoint_ns", "")),
        None if checkpoint is None else name_of("checkpoint id", checkpoint),
    )


def _config(thread: str, ns: str, checkpoint: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint}}


def _json(metadata: Mapping[str, Any]) -> str:
    try:
        return _ENCODER.encode(metadata)
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(
            f"a checkpoint cannot be stored because its metadata is not JSON ({exc}): keep such values in the state"
        ) from exc
