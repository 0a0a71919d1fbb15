"""Records to rows and back. Pure: no database here.

A value that does not decode is damage (DataLoss): this module wrote the columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from snapshotd.catalog.database import TextBytes
from snapshotd.errors import DataLoss, LimitExceeded, UsageError
from snapshotd.types import (
    ID_HEX_CHARS,
    AgentSpec,
    BlobID,
    CallStatus,
    DamagedOutput,
    FileChanges,
    Image,
    ImageID,
    LayerID,
    Limits,
    Message,
    Network,
    OutputKind,
    RecordID,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryStatus,
)

Row = tuple[Any, ...]

MAX_JSON_DEPTH = 200
"""Greatest depth of a stored JSON value."""

META_INSERT = "INSERT INTO meta VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"

IMAGE_COLUMNS = "i.id, i.name, i.source, i.source_id, i.bytes, i.files, i.created_at_ns, i.env, i.workdir, i.tree"
IMAGE_SELECT = f"SELECT {IMAGE_COLUMNS} FROM images i"

IMAGE_INSERT = """
INSERT INTO images (id, name, source, source_id, bytes, files, created_at_ns, env, workdir, tree) VALUES (?,?,?,?,?,?,?,?,?,?)
"""

TRAJECTORY_INSERT = """
INSERT INTO trajectories (id, name, image, runtime, network, memory_bytes, cpus, pids, disk_bytes, agent, env, status, exit_code,
    created_at_ns, experiment, forked_from, head)
VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
"""

TRAJECTORY_SELECT = """
SELECT t.id, t.name, i.id, t.runtime, t.network, t.memory_bytes, t.cpus, t.pids, t.disk_bytes, t.agent, h.id, t.status, t.created_at_ns,
       f.id, t.experiment, t.exit_code, t.env, b.id
FROM trajectories t JOIN images i ON i.pk = t.image JOIN snapshots h ON h.pk = t.head LEFT JOIN snapshots f ON f.pk = t.forked_from
     LEFT JOIN snapshots b ON b.pk = t.began
"""

ID = re.compile(f"[0-9a-f]{{{ID_HEX_CHARS}}}")

SNAPSHOT_SELECT = """
SELECT s.pk, s.id, p.id, t.id, s.seq, i.id, k.layers, s.messages, s.state, s.pause_ns, s.created_at_ns, s.method,
       s.files_added, s.files_changed, s.files_deleted, s.files_bytes,
       (SELECT string_agg(name, '/' ORDER BY name) FROM tags WHERE snapshot = s.pk),
       s.call_id, s.call_name, s.call_status, s.call_started_at_ns, s.call_duration_ns, s.call_exit_code, s.call_error,
       s.call_output, s.call_stdout, s.call_stderr, b.id, s.own_layers, s.tree, w.id,
       (SELECT value FROM meta WHERE key = 'warnings/' || s.id), (SELECT value FROM meta WHERE key = 'refused/' || s.id),
       (SELECT string_agg(which || ' ' || hash || ' ' || coalesce(CAST(bytes AS TEXT), ''), '/' ORDER BY which)
        FROM damaged_outputs WHERE snapshot = s.pk),
       CASE s.method WHEN 'reused' THEN (SELECT details ->> 'reused' FROM entries WHERE id = s.call_id) END, s.call_arguments
FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory JOIN stacks k ON k.pk = s.stack JOIN images i ON i.pk = k.image
     LEFT JOIN snapshots p ON p.pk = s.parent LEFT JOIN snapshots b ON b.pk = s.base LEFT JOIN snapshots w ON w.pk = s.follows
"""

SNAPSHOT_INSERT = """
INSERT INTO snapshots (id, trajectory, seq, parent, stack, messages, state, pause_ns, created_at_ns, method,
    files_added, files_changed, files_deleted, files_bytes, call_id, call_name, call_status, call_started_at_ns, call_duration_ns,
    call_exit_code, call_error, call_output, call_stdout, call_stderr, call_arguments, base, own_layers, tree, record,
    line, follows, agent_state)
VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
"""

MESSAGE_INSERT = "INSERT INTO messages (line, position, role, content) VALUES (?,?,?,?)"


def encode_json(value: Any) -> str:
    """Compact ASCII JSON. UsageError for a value that is not JSON (NaN included), LimitExceeded for one that nests too
    deep."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as exc:
        raise UsageError(f"a value cannot be recorded because it is not JSON ({exc}): send JSON values only") from exc
    except RecursionError as exc:
        raise LimitExceeded(_too_deep()) from exc
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(value) > MAX_JSON_DEPTH:
        raise LimitExceeded(_too_deep())
    return text


def _too_deep() -> str:
    return f"a value cannot be recorded because it nests deeper than {MAX_JSON_DEPTH} levels: flatten it"


def _depth(value: Any) -> int:
    """Depth of a JSON value, counted up to one more than is allowed. Iterative."""
    deepest, todo = 0, [(value, 1)]
    while todo and deepest <= MAX_JSON_DEPTH:
        item, depth = todo.pop()
        if isinstance(item, dict):
            children = list(item.values())
        elif isinstance(item, list | tuple):
            children = list(item)
        else:
            continue
        deepest = max(deepest, depth)
        todo.extend((child, depth + 1) for child in children)
    return deepest


def encode_text(text: str) -> str | bytes:
    """Free text as a database can hold it: as it is, or as bytes where it holds lone surrogates (hostile JSON can)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return TextBytes(text.encode(errors="surrogatepass"))
    return text


def encode_text_or_none(text: str | None) -> str | bytes | None:
    return None if text is None else encode_text(text)


def decode_text_or_none(value: str | bytes | None) -> str | None:
    return None if value is None else decode_text(value)


def decode_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogatepass")


def encode_pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    return encode_json([list(pair) for pair in pairs])


def decode_pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in json.loads(text))


def encode_layers(stack: Stack) -> str:
    return encode_json(list(stack.layers))


def encode_agent(agent: AgentSpec | None) -> str | None:
    if agent is None:
        return None
    return encode_json(
        {
            "argv": list(agent.argv),
            "program": agent.program,
            "cwd": agent.cwd,
            "env": [list(pair) for pair in agent.env],
            **({} if agent.user is None else {"user": agent.user}),
        }
    )


def _decode_agent(text: str | None) -> AgentSpec | None:
    if text is None:
        return None
    data = json.loads(text)
    return AgentSpec(
        tuple(data["argv"]),
        data["program"],
        data["cwd"],
        tuple((name, value) for name, value in data["env"]),
        data.get("user"),
    )


@contextmanager
def intact(kind: str, row: Row) -> Iterator[None]:
    """Turn a decoding error inside the block into DataLoss of the object whose id is the first value of `row`."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        UsageError,
        LimitExceeded,
    ) as exc:
        raise DataLoss(
            f"the catalog's record of {kind} {row[0]!s:.40} is damaged ({exc}): restore the catalog from a backup"
        ) from exc


def decode_image(row: Row) -> Image:
    with intact("image", row):
        image_id, name, source, source_id, size, files, created, env, workdir, tree = row
        return Image(
            image_id,
            name,
            decode_text(source),
            decode_text(source_id),
            size,
            files,
            created,
            decode_pairs(env),
            decode_text(workdir),
            tree,
        )


def image_values(image: Image) -> Row:
    """The values of IMAGE_INSERT."""
    return (
        image.id,
        image.name,
        encode_text(image.source),
        encode_text(image.source_id),
        image.bytes,
        image.files,
        image.created_at_ns,
        encode_pairs(image.env),
        encode_text(image.workdir),
        image.tree,
    )


def trajectory_values(trajectory: Trajectory, image: int, forked_from: int | None, head: int) -> Row:
    """The values of TRAJECTORY_INSERT; the numbers are the rows that the trajectory refers to."""
    spec = trajectory.spec
    return (
        trajectory.id,
        trajectory.name,
        image,
        spec.runtime,
        str(spec.network),
        spec.limits.memory_bytes,
        spec.limits.cpus,
        spec.limits.pids,
        spec.limits.disk_bytes,
        encode_agent(trajectory.agent),
        encode_pairs(trajectory.env),
        trajectory.status.value,
        trajectory.exit_code,
        trajectory.created_at_ns,
        trajectory.experiment,
        forked_from,
        head,
    )


def decode_trajectory(row: Row) -> Trajectory:
    with intact("trajectory", row):
        trajectory_id, name, image, runtime, network, memory, cpus, pids, disk, agent = row[:10]
        head, status, created, forked_from, experiment, exit_code, env, began = row[10:]
        spec = SandboxSpec(ImageID(image), runtime, Network.parse(network), Limits(memory, cpus, pids, disk))
        return Trajectory(
            trajectory_id,
            name,
            spec,
            _decode_agent(agent),
            head,
            TrajectoryStatus(status),
            created,
            forked_from,
            experiment,
            exit_code,
            decode_pairs(env),
            began,
        )


def _decode_damaged(text: str) -> tuple[DamagedOutput, ...]:
    items = (item.split(" ") for item in text.split("/"))
    return tuple(
        DamagedOutput(cast(OutputKind, which), BlobID(blob), int(size) if size else None) for which, blob, size in items
    )


class SnapshotDecoder:
    """Decodes rows of SNAPSHOT_SELECT; layer ids and stacks that repeat among them are held once."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerID] = {}
        self._last: tuple[str, str, Stack] | None = None

    def __call__(self, row: Row) -> Snapshot:
        with intact("snapshot", row[1:]):
            _, snapshot_id, parent, trajectory, seq, image, layers, messages, state, pause, created, method = row[:12]
            added, changed, deleted, size, tags = row[12:17]
            call_id, name, status, started, duration, exit_code, error, output, stdout, stderr = row[17:27]
            base, own_layers, tree, follows, warnings, refused, damaged, reused, arguments = row[27:]
            call = ToolCall(
                call_id,
                decode_text(name),
                json.loads(arguments),
                CallStatus(status),
                started,
                duration,
                exit_code,
                decode_text_or_none(error),
                output,
                stdout,
                stderr,
                _decode_damaged(damaged) if damaged else (),
            )
            return Snapshot(
                snapshot_id,
                parent,
                trajectory,
                seq,
                self._stack(image, layers),
                call,
                messages,
                SnapshotState(state),
                pause,
                created,
                method,
                None if added is None else FileChanges(added, changed, deleted, size),
                tuple(tags.split("/")) if tags else (),
                base,
                own_layers,
                tree,
                follows,
                tuple(json.loads(warnings)) if warnings else (),
                tuple(json.loads(refused)) if refused else (),
                SnapshotID(reused)
                if isinstance(reused, str) and ID.fullmatch(reused)
                else None,  # a bundle may say anything
            )

    def _stack(self, image: str, layers: str) -> Stack:
        if self._last is None or self._last[:2] != (image, layers):
            names = tuple([self._layers.setdefault(name, LayerID(name)) for name in json.loads(layers)])
            self._last = (image, layers, Stack(ImageID(image), names))
        return self._last[2]


class Place(NamedTuple):
    """The rows that a snapshot refers to. `state`: the agent's."""

    trajectory: int
    line: int
    parent: int | None
    stack: int
    follows: int | None = None
    state: int | None = None


def snapshot_values(snapshot: Snapshot, place: Place, base: int | None, record: RecordID | None = None) -> Row:
    """The values of SNAPSHOT_INSERT."""
    call, files = snapshot.call, snapshot.files
    return (
        snapshot.id,
        place.trajectory,
        snapshot.seq,
        place.parent,
        place.stack,
        snapshot.messages,
        snapshot.state.value,
        snapshot.pause_ns,
        snapshot.created_at_ns,
        snapshot.method,
        *((files.added, files.changed, files.deleted, files.bytes) if files else (None,) * 4),
        call.id,
        encode_text(call.name),
        call.status.value,
        call.started_at_ns,
        call.duration_ns,
        call.exit_code,
        encode_text_or_none(call.error),
        call.output,
        call.stdout,
        call.stderr,
        encode_json(call.arguments),
        base,
        snapshot.own_layers,
        snapshot.tree,
        record,
        place.line,
        place.follows,
        place.state,
    )


def encode_message(message: Message) -> tuple[str | bytes, str]:
    """(role, content) as MESSAGE_INSERT takes them."""
    return encode_text(message.role), encode_json(message.content)


def decode_message(row: Row) -> Message:
    """The message of a row (position, role, content)."""
    with intact("message", row):
        return Message(decode_text(row[1]), json.loads(row[2]))
