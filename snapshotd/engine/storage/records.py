"""Records: the repository keeps one for each snapshot besides its files, so that the catalog can be rebuilt from them.

One JSON document per stored snapshot, in ASCII, keys in a fixed order, without spaces; equal facts give equal bytes:

    {"format": "snapshotd record", "version": 2, "kind": "snapshot",
     "image":      {"id", "name", "source", "source_id", "bytes", "files", "created_at_ns", "env", "workdir", "tree"},
     "trajectory": {"id", "name", "spec": {"image", "runtime", "network", "limits": {...}}, "agent": {...} | null, "env", "forked_from",
                    "experiment", "created_at_ns", "began"},
     "snapshot":   {"id", "parent", "follows", "base", "own_layers", "seq", "image", "layers", "tree", "state", "messages", "pause_ns",
                    "created_at_ns", "method", "files": {...} | null, "warnings": [...],
                    "refused": [...]},
     "call":       {"id", "name", "status", ..., "output", "stdout", "stderr", "arguments", "damaged": {"stdout": [blob id, bytes], ...}},
     "start": n, "messages": [{"role", "content"}, ...],
     "entries":    [{"id", "kind", "name", "after", "began_at_ns", "side_effect", "key", "status", "ended_at_ns", "error", "facts",
                     "details", "result", "number", "arguments"}, ...],
     "state":      {...} | null}

`messages` are the ones that the snapshot added, and `start` is the position of the first of them in the whole
conversation. `entries` are the journal entries that it binds, with their places in the journal of its line; an entry
without `arguments` is the call's own and has the call's. `damaged` is there only if outputs of the call are gone.
`state` is the agent's state, if the snapshot changed it. Facts that change later (head, status, exit code, tags) are no
part of the record. Tags have documents of their own, each with all tags there were at `at_ns`:

    {"format": "snapshotd record", "version": 2, "kind": "tags", "at_ns": n, "tags": {name: snapshot id, ...}}

An unknown field is kept when a decoded record is encoded again. A change of meaning is a new version. A record may come
from a hostile bundle: every id, name and number is checked, so that it can be a path or a row. Errors: DataLoss
(malformed), VersionMismatch (another version, or a kind that a newer snapshotd wrote).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.storage.record_entries import entry_document, read_entries
from snapshotd.engine.storage.record_fields import ANY_TIME, DIGEST, ID, MAX_JSON_DEPTH, Fields, nests_deeper, shallow
from snapshotd.errors import DataLoss, InternalError, LimitExceeded, UsageError, VersionMismatch, check_format
from snapshotd.types import (
    KNOWN_NAME_PATTERN,
    NAME_PATTERN,
    AgentSpec,
    BlobID,
    CallID,
    CallStatus,
    DamagedOutput,
    ExperimentID,
    FileChanges,
    Image,
    ImageID,
    JournalEntry,
    LayerID,
    Limits,
    Message,
    Network,
    OutputKind,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
)

FORMAT = "snapshotd record"
VERSION = 2

_ENVELOPE_LEVELS = 8
_OUTPUTS: tuple[OutputKind, ...] = ("output", "stderr", "stdout")
_IMAGE_NAME = re.compile(r"[ -~]{0,255}")


@dataclass(frozen=True, slots=True)
class Record:
    """The decoded record of a snapshot. `trajectory.head` is this snapshot; its status and exit code are made up;
    `snapshot.tags` is empty. `unknown`: the fields that a newer version added, for `encode`."""

    snapshot: Snapshot
    trajectory: Trajectory
    image: Image
    messages: tuple[Message, ...]
    entries: tuple[JournalEntry, ...] = ()
    state: dict[str, Any] | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tags:
    """All tags at one time."""

    tags: Mapping[str, SnapshotID]
    at_ns: int
    unknown: Mapping[str, Any] = field(default_factory=dict)


def encode(
    snapshot: Snapshot,
    trajectory: Trajectory,
    image: Image,
    messages: Sequence[Message],
    unknown: Mapping[str, Any] | None = None,
    *,
    entries: Sequence[JournalEntry] = (),
    state: dict[str, Any] | None = None,
) -> bytes:
    """The record of a snapshot that is stored, pruned or lost. `image`: its stack's; `messages`: the ones it added;
    `entries`: the ones it binds; `state`: the agent's, if it changed."""
    record = Record(snapshot, trajectory, image, tuple(messages), tuple(entries), state)
    _check(record)
    return _dump(_document(record), unknown)


def encode_from(catalog: Catalog, snapshot: Snapshot, image: Image) -> bytes:
    """The record of a snapshot with everything that the catalog knows of it. NotFound."""
    trajectory, messages = catalog.trajectories.get(snapshot.trajectory), catalog.conversations.own(snapshot.id)
    entries, state = catalog.journal.own(snapshot.id), catalog.conversations.own_state(snapshot.id)
    return encode(snapshot, trajectory, image, messages, entries=entries, state=state)


def encode_tags(tags: Mapping[str, SnapshotID], at_ns: int, unknown: Mapping[str, Any] | None = None) -> bytes:
    """The record of all tags at a time."""
    return _dump(_tags_document(tags, at_ns), unknown)


def decode(data: bytes) -> Record:
    """A snapshot's record."""
    record = decode_any(data)
    if not isinstance(record, Record):
        raise DataLoss("a record of tags stands where a snapshot's must be: run `snapshotd check`")
    return record


def decode_any(data: bytes) -> Record | Tags:
    """A record of either kind."""
    try:
        top = Fields(_load(data), "the record")
        if top.value("format") != FORMAT:
            raise ValueError("it does not begin as a record")
        version, kind = top.integer("version", 1), top.text("kind")
        check_format("a record", version, VERSION)
        if kind not in ("snapshot", "tags"):
            raise VersionMismatch(
                f"a record of kind {kind[:40]!r} comes from a newer snapshotd: use that or a newer one"
            )
        return _read_tags(top) if kind == "tags" else _read_snapshot(top)
    except (ValueError, RecursionError, UsageError, LimitExceeded) as exc:
        raise DataLoss(f"a record is damaged ({exc}): run `snapshotd check`") from exc


# -- writing -----------------------------------------------------------------------------------------------------------


def _check(record: Record) -> None:
    snapshot = record.snapshot
    belongs = snapshot.trajectory == record.trajectory.id and snapshot.stack.image == record.image.id
    bound = all(entry.snapshot == snapshot.id and entry.status is not None for entry in record.entries)
    if not belongs or not bound or snapshot.messages < len(record.messages):
        raise InternalError(f"the facts for the record of snapshot {snapshot.id} do not belong together")
    if snapshot.state is SnapshotState.CAPTURED or (snapshot.tree is not None) is not (
        snapshot.state is SnapshotState.STORED
    ):
        raise InternalError(f"snapshot {snapshot.id} ({snapshot.state}, tree {snapshot.tree}) cannot have a record yet")


def _dump(document: dict[str, Any], unknown: Mapping[str, Any] | None) -> bytes:
    if unknown:
        _merge(document, unknown)
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def _limits(limits: Limits) -> dict[str, Any]:
    """The limits; the disk's is left out if it is the daemon's own, because older records have none."""
    return {name: value for name, value in asdict(limits).items() if name != "disk_bytes" or value}


def _document(record: Record) -> dict[str, Any]:
    snapshot, trajectory, image = record.snapshot, record.trajectory, record.image
    spec, agent, call = trajectory.spec, trajectory.agent, snapshot.call
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": "snapshot",
        "image": asdict(image),
        "trajectory": {
            "id": trajectory.id,
            "name": trajectory.name,
            "spec": {
                "image": spec.image,
                "runtime": spec.runtime,
                "network": str(spec.network),
                "limits": _limits(spec.limits),
            },
            "agent": None
            if agent is None
            else {
                "argv": list(agent.argv),
                "program": agent.program,
                "cwd": agent.cwd,
                "env": _pairs(agent.env),
                **({} if agent.user is None else {"user": agent.user}),
            },
            "env": _pairs(trajectory.env),
            "forked_from": trajectory.forked_from,
            "experiment": trajectory.experiment,
            "created_at_ns": trajectory.created_at_ns,
            "began": trajectory.began,
        },
        "snapshot": {
            "id": snapshot.id,
            "parent": snapshot.parent,
            "follows": snapshot.follows,
            "base": snapshot.base,
            "own_layers": snapshot.own_layers,
            "seq": snapshot.seq,
            "image": snapshot.stack.image,
            "layers": list(snapshot.stack.layers),
            "tree": snapshot.tree,
            "state": snapshot.state.value,
            "messages": snapshot.messages,
            "pause_ns": snapshot.pause_ns,
            "created_at_ns": snapshot.created_at_ns,
            "method": snapshot.method,
            "files": None if snapshot.files is None else asdict(snapshot.files),
            **({"warnings": list(snapshot.warnings)} if snapshot.warnings else {}),
            **({"refused": list(snapshot.refused)} if snapshot.refused else {}),
        },
        "call": {
            "id": call.id,
            "name": call.name,
            "status": call.status.value,
            "started_at_ns": call.started_at_ns,
            "duration_ns": call.duration_ns,
            "exit_code": call.exit_code,
            "error": call.error,
            "output": call.output,
            "stdout": call.stdout,
            "stderr": call.stderr,
            "arguments": call.arguments,
            **({"damaged": {lost.which: [lost.hash, lost.bytes] for lost in call.damaged}} if call.damaged else {}),
        },
        "start": snapshot.messages - len(record.messages),
        "messages": [{"role": message.role, "content": message.content} for message in record.messages],
        "entries": [entry_document(entry, call) for entry in record.entries],
        "state": record.state,
    }


def _tags_document(tags: Mapping[str, SnapshotID], at_ns: int) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "kind": "tags", "at_ns": at_ns, "tags": dict(sorted(tags.items()))}


def _pairs(pairs: tuple[tuple[str, str], ...]) -> list[list[str]]:
    return [list(pair) for pair in pairs]


# -- what is not known -------------------------------------------------------------------------------------------------


def _leftover(data: Any, known: Any) -> dict[str, Any]:
    """The fields that objects in `data` have and their counterparts in `known` have not. Lists go by position. It goes
    as deep as `known` has fields."""
    left: dict[str, Any] = {}
    if data is known:
        return left
    if isinstance(data, dict) and isinstance(known, dict):
        for key, value in data.items():
            if key not in known:
                left[key] = value
            elif below := _leftover(value, known[key]):
                left[key] = below
    elif isinstance(data, list) and isinstance(known, list):
        for index, (item, other) in enumerate(zip(data, known, strict=False)):
            if below := _leftover(item, other):
                left[str(index)] = below
    return left


def _merge(document: Any, unknown: Mapping[str, Any]) -> None:
    """The opposite, in place."""
    if isinstance(document, list):
        for index, below in unknown.items():
            if int(index) < len(document):
                _merge(document[int(index)], below)
    elif isinstance(document, dict):
        for key, value in sorted(unknown.items()):
            if key not in document:
                document[key] = value
            elif isinstance(value, Mapping):
                _merge(document[key], value)


# -- reading -----------------------------------------------------------------------------------------------------------


def _load(data: bytes) -> Any:
    value = json.loads(data.decode("ascii"), parse_constant=_refuse_constant, parse_float=_finite)
    if nests_deeper(value, MAX_JSON_DEPTH + _ENVELOPE_LEVELS):
        raise ValueError("it nests too deep")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _read_tags(top: Fields) -> Tags:
    tags = top.within("tags").every(KNOWN_NAME_PATTERN, ID)
    at_ns = top.integer("at_ns", ANY_TIME)
    known = {name: SnapshotID(snapshot) for name, snapshot in tags.items()}
    return Tags(known, at_ns, _leftover(top.whole, _tags_document(known, at_ns)))


def _read_snapshot(top: Fields) -> Record:
    messages = tuple(_read_message(Fields(item, "messages")) for item in top.items("messages"))
    image = _read_image(top.within("image"))
    of = TrajectoryID(top.within("trajectory").text("id", ID))
    snapshot = _read_facts(top.within("snapshot"), of, _read_call(top.within("call")))
    trajectory = _read_trajectory(top.within("trajectory"), snapshot.id)
    if snapshot.stack.image != image.id or (snapshot.tree is not None) is not (snapshot.state is SnapshotState.STORED):
        raise ValueError("its image, tree and state do not fit together")
    if snapshot.state is SnapshotState.CAPTURED or snapshot.own_layers > len(snapshot.stack.layers):
        raise ValueError("what it says about its layers cannot be")
    if top.integer("start") + len(messages) != snapshot.messages or (
        snapshot.continues is None and top.integer("start")
    ):
        raise ValueError("its messages do not fit into the conversation")
    if snapshot.id in (snapshot.parent, snapshot.follows, snapshot.base, trajectory.forked_from):
        raise ValueError("it comes from itself")
    state = top.within_or_none("state")
    known = Record(
        snapshot,
        trajectory,
        image,
        messages,
        read_entries(top.items("entries"), snapshot),
        None if state is None else shallow(state.whole),
    )
    return replace(known, unknown=_leftover(top.whole, _document(known)))


def _read_message(fields: Fields) -> Message:
    return Message(fields.text("role"), shallow(fields.value("content")))


def _read_image(fields: Fields) -> Image:
    tree = fields.text_or_none("tree", DIGEST)
    return Image(
        ImageID(fields.text("id", ID)),
        fields.text("name", _IMAGE_NAME),
        fields.text("source"),
        fields.text("source_id"),
        fields.integer("bytes"),
        fields.integer("files"),
        fields.integer("created_at_ns", ANY_TIME),
        fields.pairs("env"),
        fields.text("workdir"),
        None if tree is None else TreeID(tree),
    )


def _read_trajectory(fields: Fields, head: SnapshotID) -> Trajectory:
    spec, agent = fields.within("spec"), fields.within_or_none("agent")
    limits = spec.within("limits")
    forked_from, experiment, began = (fields.text_or_none(name, ID) for name in ("forked_from", "experiment", "began"))
    return Trajectory(
        TrajectoryID(fields.text("id", ID)),
        fields.text_or_none("name", KNOWN_NAME_PATTERN),
        SandboxSpec(
            ImageID(spec.text("image", ID)),
            spec.text("runtime", NAME_PATTERN),
            Network.parse(spec.text("network")),
            Limits(
                limits.integer("memory_bytes"),
                limits.number("cpus"),
                limits.integer("pids"),
                limits.integer_or_none("disk_bytes") or 0,
            ),
        ),
        None
        if agent is None
        else AgentSpec(
            agent.texts("argv"),
            agent.integer("program"),
            agent.text("cwd"),
            agent.pairs("env"),
            agent.text_or_none("user"),
        ),
        head,
        TrajectoryStatus.STOPPED if agent is None else TrajectoryStatus.INTERRUPTED,
        fields.integer("created_at_ns", ANY_TIME),
        None if forked_from is None else SnapshotID(forked_from),
        None if experiment is None else ExperimentID(experiment),
        env=fields.pairs("env"),
        began=None if began is None else SnapshotID(began),
    )


def _read_facts(fields: Fields, trajectory: TrajectoryID, call: ToolCall) -> Snapshot:
    parent, base, follows = (fields.text_or_none(name, ID) for name in ("parent", "base", "follows"))
    tree, files = fields.text_or_none("tree", DIGEST), fields.within_or_none("files")
    stack = Stack(ImageID(fields.text("image", ID)), tuple(LayerID(layer) for layer in fields.texts("layers", ID)))
    return Snapshot(
        SnapshotID(fields.text("id", ID)),
        None if parent is None else SnapshotID(parent),
        trajectory,
        fields.integer("seq"),
        stack,
        call,
        fields.integer("messages"),
        fields.one_of("state", SnapshotState),
        fields.integer("pause_ns", ANY_TIME),
        fields.integer("created_at_ns", ANY_TIME),
        fields.text("method", NAME_PATTERN),
        None
        if files is None
        else FileChanges(*(files.integer(name) for name in ("added", "changed", "deleted", "bytes"))),
        (),
        None if base is None else SnapshotID(base),
        fields.integer("own_layers"),
        None if tree is None else TreeID(tree),
        None if follows is None else SnapshotID(follows),
        fields.texts("warnings") if fields.has("warnings") else (),
        fields.texts("refused") if fields.has("refused") else (),
    )


def _read_call(fields: Fields) -> ToolCall:
    output, stdout, stderr = (fields.text_or_none(name, DIGEST) for name in ("output", "stdout", "stderr"))
    return ToolCall(
        CallID(fields.text("id", ID)),
        fields.text("name"),
        shallow(fields.value("arguments")),
        fields.one_of("status", CallStatus),
        fields.integer("started_at_ns", ANY_TIME),
        fields.integer("duration_ns", ANY_TIME),
        fields.integer_or_none("exit_code", ANY_TIME),
        fields.text_or_none("error"),
        None if output is None else BlobID(output),
        None if stdout is None else BlobID(stdout),
        None if stderr is None else BlobID(stderr),
        _read_damaged(fields.within("damaged")) if fields.has("damaged") else (),
    )


def _read_damaged(fields: Fields) -> tuple[DamagedOutput, ...]:
    found = []
    for which in _OUTPUTS:
        if fields.has(which):
            lost = fields.items(which)
            if len(lost) != 2:
                raise ValueError("a damaged output has an id and a length")
            facts = Fields({"hash": lost[0], "bytes": lost[1]}, "damaged")
            found.append(DamagedOutput(which, BlobID(facts.text("hash", DIGEST)), facts.integer_or_none("bytes")))
    return tuple(found)
