"""The live record: it lets the next daemon go on with a sandbox whose agent still runs when this daemon is killed.

    <run_dir>/live/<container id>/sandbox.json     the layers of its root, written before every change of the root; and its commands
                                  pending.ndjson   the agent's calls and messages since the head: a line each (engine/journal/pending.py)
                                  state.json       the agent's state, if no snapshot has it yet
                                  wire.ndjson      the gateway's knowledge of its conversations (engine/journal/wire/model_calls.py)

It lies below /run, like the sandbox: it survives the daemon and not the machine, and nothing is synced. All text of
agents has gone through the funnel. A sandbox without `sandbox.json` is between two states (a rewind, a replay): the
next daemon ends it, and `resume` goes on. If a record cannot be written, the daemon goes on without it; the sandbox is
lost only if the daemon dies.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from snapshotd.kernel import files
from snapshotd.types import ImageID, LayerID, SnapshotID, Stack

_log = logging.getLogger(__name__)
_VERSION = 1
_FACTS, _PENDING, _STATE, _WIRE = "sandbox.json", "pending.ndjson", "state.json", "wire.ndjson"
MAX_PENDING_BYTES = 256 << 20
"""Size limit of `pending.ndjson`: beyond it, records since the last snapshot are not kept for the next daemon."""
_REWRITE_BYTES = 1 << 20
"""From this size on, bound records are removed at the next snapshot."""


@dataclass(frozen=True, slots=True)
class Root:
    """A root that a sandbox has, or is about to get. `head`: the trajectory's, when it got it; the others as in
    `SandboxRoot`."""

    mount_id: int
    upper: LayerID
    stack: Stack
    base: SnapshotID | None
    fresh: int
    head: SnapshotID
    lazy: bool
    """Some of its files come through FUSE, from a child of the daemon: it does not outlive it."""


class LiveRecord:
    """The live record of one sandbox. The caller holds the sandbox's lock, but for `note_wire`."""

    def __init__(self, directory: Path) -> None:
        """Nothing is written before `open`."""
        self.directory = directory
        self.kept = False
        """True if `sandbox.json` exists."""
        self._pending: BinaryIO | None = None
        self._wire: BinaryIO | None = None
        self._bytes = 0
        self._has_state = False

    def open(self) -> None:
        """Record from now on, behind the notes of an earlier daemon."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._pending = open(self.directory / _PENDING, "ab", buffering=0)  # noqa: SIM115 - closed by `remove`
            self._wire = open(self.directory / _WIRE, "ab", buffering=0)  # noqa: SIM115
        except OSError as exc:
            self._give_up(exc)
            return
        self._bytes = self._pending.tell()
        self._has_state = (self.directory / _STATE).exists()

    def keep(self, facts: dict[str, Any], roots: Sequence[Root]) -> None:
        """Record that the sandbox has one of these roots: another daemon can go on with it from now on. `facts`: everything
        else that this daemon has to know."""
        if self._pending is not None:
            self._replace(_FACTS, {"version": _VERSION, **facts, "roots": [asdict(root) for root in roots]})
            self.kept = self._pending is not None

    def forget(self) -> None:
        """Remove `sandbox.json`, so that no daemon goes on with the sandbox until the next `keep`: it is between two states."""
        self.kept = False
        (self.directory / _FACTS).unlink(missing_ok=True)

    def note(self, head: SnapshotID, fields: dict[str, Any]) -> None:
        """Note a record that the next snapshot after `head` will bind."""
        if self._pending is None:
            return
        line = _line({"head": head, **fields})
        self._bytes += len(line)
        if self._bytes > MAX_PENDING_BYTES:
            self.forget()
            return
        self._append(self._pending, line)

    def set_state(self, head: SnapshotID, state: dict[str, Any]) -> None:
        """Keep the agent's state, which has changed since `head`."""
        if self._pending is not None:
            self._replace(_STATE, {"head": head, "state": state})
            self._has_state = True

    def drop_bound(self, head: SnapshotID, residue: dict[str, Any]) -> None:
        """Drop the pending records and the state, which the snapshot `head` binds. The `residue`, which it does not bind,
        was noted for it before."""
        if self._pending is None:
            return
        try:
            if not residue and self._bytes:
                os.ftruncate(self._pending.fileno(), 0)
                self._bytes = 0
            elif residue and self._bytes > _REWRITE_BYTES:
                self._replace(_PENDING, {"head": head, **residue})
                self._pending.close()
                self._pending = open(self.directory / _PENDING, "ab", buffering=0)  # noqa: SIM115 - closed by `remove`
                self._bytes = self._pending.tell()
            if self._has_state:
                (self.directory / _STATE).unlink(missing_ok=True)
                self._has_state = False
        except OSError as exc:
            self._give_up(exc)

    def note_wire(self, fields: dict[str, Any]) -> None:
        """Note a record that the gateway needs as long as the sandbox lives."""
        if self._wire is not None:
            self._append(self._wire, _line(fields))

    def remove(self) -> None:
        """Remove the record: the sandbox ends. Idempotent."""
        self.kept = False
        for file in (self._pending, self._wire):
            if file is not None:
                file.close()
        self._pending = self._wire = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _append(self, file: BinaryIO, line: bytes) -> None:
        try:
            if file.write(line) != len(line):
                raise OSError("only a part of a line could be written")
        except OSError as exc:
            self._give_up(exc)

    def _replace(self, name: str, value: dict[str, Any]) -> None:
        """Replace a file of the record. The two names change places, and the old file goes before the next one is written:
        if a rename replaced it, ext4 would first write the new one's data to the disk, while an agent waits."""
        path, temporary = self.directory / name, self.directory / f"{name}.new"
        try:
            temporary.unlink(missing_ok=True)
            temporary.write_bytes(_line(value))
            try:
                files.exchange(-1, os.fsencode(temporary), -1, os.fsencode(path))
            except OSError as exc:  # the first one, or a file system that cannot
                if exc.errno not in (errno.ENOENT, errno.EINVAL):
                    raise
                temporary.rename(path)
        except OSError as exc:
            self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        _log.warning("if this daemon dies, the sandbox of %s ends with it: %s", self.directory.name, exc)
        self.remove()


class Survival:
    """The survival of a sandbox beyond the daemon: what the next one needs to go on with it. Only a sandbox with a
    program, or with a command in the background, has a record; for any other, nothing is written. The sandbox's lock
    guards it, but for `note_wire`."""

    def __init__(self, kept: Sequence[str] = ()) -> None:
        self.kept = list(kept)
        """Names of the descriptors that the keeper holds for the sandbox."""
        self.residue: Callable[[], dict[str, Any]] = dict
        """Returns the records that stay pending beyond a snapshot that was just taken (engine/journal/pending.py)."""
        self._record: LiveRecord | None = None
        self._facts: dict[str, Any] | None = None
        self._roots: tuple[Root, ...] = ()
        """The roots in the record: the present root last, or the one that it is about to become."""

    @property
    def has_record(self) -> bool:
        """True from `use` on."""
        return self._record is not None

    @property
    def is_kept(self) -> bool:
        """True if the next daemon could go on with the sandbox now."""
        return self._record is not None and self._record.kept

    def use(self, record: LiveRecord) -> None:
        """Write to this record, which is open, from now on."""
        self._record = record

    def noting(self, residue: Callable[[], dict[str, Any]]) -> None:
        """Ask `residue` for the records that stay pending."""
        self.residue = residue

    def note(self, head: SnapshotID, fields: dict[str, Any]) -> None:
        """See `LiveRecord.note`."""
        if self._record is not None:
            self._record.note(head, fields)

    def set_state(self, head: SnapshotID, state: dict[str, Any]) -> None:
        """See `LiveRecord.set_state`."""
        if self._record is not None:
            self._record.set_state(head, state)

    def note_wire(self, fields: dict[str, Any]) -> None:
        """See `LiveRecord.note_wire`."""
        if self._record is not None:
            self._record.note_wire(fields)

    def outlive(self, facts: dict[str, Any], present: Root) -> None:
        """Let the next daemon go on with the sandbox if this one dies from now on. `facts`: as `LiveRecord.keep`."""
        self._facts = facts
        self._keep((present,))

    def announce(self, root: Root) -> None:
        """Note the root that the sandbox is about to get beside the present one: after a crash, the next daemon sees by the
        mount which of the two it is."""
        if self._record is not None and self._record.kept:
            self._keep((*self._roots[:1], root))

    def confirm_announced(self) -> None:
        """Note that the sandbox has got the announced root."""
        self._roots = self._roots[-1:]

    def update_root(self, present: Callable[[], Root]) -> None:
        """Note that the root is now `present()`: the same mount as before, but with another stack of layers."""
        if self._record is not None and self._record.kept:
            self._keep((present(),))

    def forget(self) -> None:
        """Let no daemon go on with the sandbox until the next snapshot: from here on its files match none."""
        if self._record is not None:
            self._record.forget()

    def prepare_commit(self, snapshot: SnapshotID) -> None:
        """Note the records that this snapshot, which is about to become the head, does not bind."""
        residue = self.residue() if self._record is not None else None
        if residue:
            self.note(snapshot, residue)

    def finish_commit(self, head: SnapshotID, present: Callable[[], Root]) -> None:
        """Drop the records that this snapshot, which is the head now, binds; and have the sandbox kept again."""
        if self._record is not None:
            self._record.drop_bound(head, self.residue())
            if self._facts is not None and not self._record.kept:
                self._keep((present(),))

    def remove(self) -> None:
        """Remove the live record: the sandbox ends. Idempotent."""
        if self._record is not None:
            self._record.remove()

    def _keep(self, roots: tuple[Root, ...]) -> None:
        if self._record is not None and self._facts is not None:
            self._roots = roots
            self._record.keep(self._facts, roots)


def read(directory: Path) -> tuple[dict[str, Any], list[Root]] | None:
    """The facts and the possible roots of a sandbox of an earlier daemon; None where there is nothing to go on with."""
    facts = _read(directory / _FACTS)
    if facts is None or facts.pop("version", None) != _VERSION:
        return None
    roots = [
        Root(
            one["mount_id"],
            LayerID(one["upper"]),
            Stack(ImageID(one["stack"]["image"]), tuple(map(LayerID, one["stack"]["layers"]))),
            None if one["base"] is None else SnapshotID(one["base"]),
            one["fresh"],
            SnapshotID(one["head"]),
            one["lazy"],
        )
        for one in facts.pop("roots")
    ]
    return facts, roots


def pending(directory: Path, head: SnapshotID) -> Iterator[dict[str, Any]]:
    """The records noted since `head`, in order."""
    yield from (line for line in _lines(directory / _PENDING) if line["head"] == head)


def state(directory: Path, head: SnapshotID) -> dict[str, Any] | None:
    """The agent's state if it was changed since `head`."""
    found = _read(directory / _STATE)
    changed: dict[str, Any] | None = found["state"] if found is not None and found["head"] == head else None
    return changed


def wire(directory: Path) -> Iterator[dict[str, Any]]:
    """The gateway's records, in order."""
    yield from _lines(directory / _WIRE)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # the daemon may have died in the middle of one
                    yield json.loads(line)
    except FileNotFoundError:
        return


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
