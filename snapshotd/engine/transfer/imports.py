"""Taking a bundle in: every layer through the hardened ingest into a layer of ours, every output into the spool, and
then, when the whole bundle was read and its checksum is right, everything into the catalog in one transaction.

The bundle is hostile. It decides the content of its snapshots and nothing else: runtime, network and limits are the
importer's, sandboxes see ids and mounts as in any other snapshot, overlay's attributes are left out, and present
snapshots are never replaced.

A bundle without `since` stands on an empty image. One with `since` stands on that snapshot, which must be here; it
becomes a trajectory that was forked there. A snapshot follows one in the bundle, or one on the way to `since`.
Snapshots keep their ids, so that the next bundle finds the one it stands on, and journal entries theirs; a trajectory
keeps its id and name when they are free, a snapshot its tags. Imported snapshots are `captured`, and are stored like
any others. A bundle whose snapshots are all here is read and checked, and only tags are taken from it.

    write order: layers and outputs, then the rows                                                            <- the commit point
    after a crash before that, the next start removes the layers and outputs
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.engine.base import Imported, ProgressSink
from snapshotd.engine.context import Context
from snapshotd.engine.secrecy import TENANT
from snapshotd.engine.storage import records
from snapshotd.engine.transfer.bundle_reading import BundleReader
from snapshotd.engine.transfer.import_checks import check_agent, check_env, check_text, read_record
from snapshotd.engine.transfer.import_layers import BundleLimits, BundleLine, ImportedLayers
from snapshotd.errors import NO_ROOM, Conflict, LimitExceeded, NotFound, OutOfSpace, UsageError
from snapshotd.failpoints import hit
from snapshotd.repo.base import Reader
from snapshotd.trees.base import Warnings
from snapshotd.types import (
    ID_FORM,
    NAME_PATTERN,
    BlobID,
    Image,
    ImageID,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
    short,
)

BaseImage = Callable[[tuple[tuple[str, str], ...], str], Image]
"""Gives the image with nothing in it that has these defaults (environment, working directory); made once for each pair.
The defaults are the bundle's, checked."""

MAX_TRAJECTORIES = 1000
_READ_BYTES = 1 << 20
_WARNINGS_LIMIT = 200
_SEQ_LIMIT = 1 << 53
_NOT_TAKEN = "could be taken for an id, or is in a user's own space"


@dataclass(frozen=True, slots=True)
class _Taken:
    """The part of a snapshot that stays in memory until the rows are written. `record`: position of its record in the
    file of records."""

    record: tuple[int, int]
    id: SnapshotID
    parent: SnapshotID | None
    follows: SnapshotID | None
    trajectory: TrajectoryID
    stack: Stack
    state: SnapshotState
    base: SnapshotID | None
    own_layers: int


def import_bundle(
    context: Context,
    read: Reader,
    *,
    name: str | None,
    policy: SandboxSpec,
    base_image: BaseImage,
    progress: ProgressSink,
    limits: BundleLimits | None = None,
) -> Imported:
    """Take a bundle in, all or nothing. `policy`: the specification that every imported trajectory gets, without its
    image. `name`: for the last trajectory.

    The snapshots are `captured` when this returns; the caller has them archived. If all of them are here already, none
    is taken, and the trajectories are those that hold them. UsageError (no bundle, malformed,
    damaged, cut off), NotFound (the snapshot it builds on), Conflict (some snapshots, or `name`, are here already; the
    base lost its files), LimitExceeded, OutOfSpace, VersionMismatch.
    """
    with tempfile.TemporaryFile(dir=context.state_dir) as kept:
        importer = _Importer(context, policy, base_image, kept, limits or BundleLimits())
        try:
            return importer.run(read, name, progress)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            raise OutOfSpace(
                "the bundle cannot be taken in: the state directory's disk is full; free space and try again"
            ) from exc
        finally:
            importer.end()


@contextlib.contextmanager
def _one_that_is_whole() -> Iterator[None]:
    """Report errors of archives inside a bundle as damage of the bundle, whose beginning was right."""
    try:
        yield
    except UsageError as exc:
        if exc.message.startswith("the bundle "):
            raise
        raise UsageError(f"the bundle is damaged: {exc.message}") from exc


class _Importer:
    def __init__(
        self, context: Context, policy: SandboxSpec, base_image: BaseImage, kept: IO[bytes], limits: BundleLimits
    ) -> None:
        self._context = context
        self._policy, self._base_image = policy, base_image
        self._kept = kept
        self._image_defaults: tuple[tuple[tuple[str, str], ...], str] = ((), "/workspace")
        self._outputs: dict[BlobID, BlobID] = {}
        self._taken: list[_Taken] = []
        self._trajectories: dict[TrajectoryID, Trajectory] = {}
        """By the id they have in the bundle."""
        self._before: dict[SnapshotID, int] = {}
        """Lengths of the conversations that the next snapshot may continue: the bundle's, and the ones on the way to
        it."""
        self._warnings = Warnings(_WARNINGS_LIMIT)
        self._layers = ImportedLayers(context.store, limits, self._warnings)
        self._unpin: Callable[[], None] = lambda: None
        self._committed = False

    def run(self, read: Reader, name: str | None, progress: ProgressSink) -> Imported:
        reader = BundleReader(read, self._layers.left.bytes)
        if name is not None and not _may_be_taken(name):
            raise UsageError(
                f"{name[:80]!r} cannot be a name; use letters, digits, '.', '_' and '-', beginning with a letter or digit, "
                "and not what could be taken for an id"
            )
        known = _find_known(self._context.catalog, reader.snapshots)
        if len(known) == len(reader.snapshots):
            with _one_that_is_whole():
                return self._again(reader, known, name, progress)
        _check_free(self._context.catalog, known, name)
        line = self._begin(reader.since)
        with _one_that_is_whole():
            for number, snapshot_id in enumerate(reader.snapshots):
                progress(f"snapshot {number + 1} of {len(reader.snapshots)}")
                self._snapshot(reader, number, snapshot_id, line)
            reader.finish()
        hit("engine.import.ingested")
        trajectories = self._commit(reader, name)
        hit("engine.import.committed")
        return self._report(trajectories)

    def _report(self, trajectories: tuple[Trajectory, ...]) -> Imported:
        return Imported(trajectories, len(self._taken), self._warnings.all())

    def end(self) -> None:
        """Release pins and layers. Layers that no row needs are removed: all after a failure, else those that were made
        only to be merged. Outputs stay in the spool, because other snapshots may need them by now; the next start
        removes the rest."""
        self._unpin()
        needed = {layer for taken in self._taken for layer in taken.stack.layers} if self._committed else set()
        self._layers.settle(needed)

    # -- before anything is taken --------------------------------------------------------------------------------------

    def _again(self, reader: BundleReader, known: list[Snapshot], name: str | None, progress: ProgressSink) -> Imported:
        """Read a bundle whose snapshots are all here, to its end: before that nothing in it is verified."""
        for number, snapshot in enumerate(known):
            progress(f"snapshot {number + 1} of {len(known)} is here already")
            theirs = read_record(reader.record(number)).snapshot
            if (theirs.id, theirs.call.id, theirs.created_at_ns) != (
                snapshot.id,
                snapshot.call.id,
                snapshot.created_at_ns,
            ):
                raise Conflict(
                    f"snapshot {short(snapshot.id)} of the bundle is another one than the one here; nothing was taken"
                )
            if theirs.state is SnapshotState.STORED and snapshot.state in (SnapshotState.LOST, SnapshotState.PRUNED):
                whole = (
                    f"`snapshotd rm {short(snapshot.trajectory)}` forgets its trajectory, then import the bundle again"
                )
                raise Conflict(
                    f"snapshot {short(snapshot.id)} of the bundle is here, but its files are gone ({snapshot.state}); {whole}"
                )
            for _ in reader.outputs():
                pass
            stream = reader.layer(number)
            while stream is not None and stream.read(_READ_BYTES):
                pass
        reader.finish()
        catalog = self._context.catalog
        trajectories = tuple(
            catalog.trajectories.get(one) for one in dict.fromkeys(snapshot.trajectory for snapshot in known)
        )
        if name is not None and name != trajectories[-1].name:
            self._warnings.add(f"the trajectory {short(trajectories[-1].id)} is here already and keeps its name")
        for tag, snapshot_id in self._free_tags(reader, {one.name for one in catalog.trajectories.list()}):
            catalog.refs.tag(snapshot_id, tag)
        return self._report(trajectories)

    def _free_tags(self, reader: BundleReader, names: set[str | None]) -> Iterator[tuple[str, SnapshotID]]:
        """The tags of the bundle that are free here. `names`: names of trajectories, the bundle's included."""
        here = self._context.catalog.refs.tags()
        for name, snapshot_id in reader.tags.items():
            if not _may_be_taken(name):
                self._warnings.add(
                    f"the tag {name} was not taken, because it {_NOT_TAKEN}; give {short(snapshot_id)} another one"
                )
            elif name in names:
                self._warnings.add(
                    f"the tag {name} was not taken, because a trajectory has that name here; give {short(snapshot_id)} another one"
                )
            elif here.get(name, snapshot_id) != snapshot_id:
                self._warnings.add(
                    f"the tag {name} was not taken, because snapshot {short(here[name])} has it here; "
                    f"`snapshotd tag --move {short(snapshot_id)} {name}` moves it"
                )
            else:
                yield name, snapshot_id

    def _begin(self, since: SnapshotID | None) -> BundleLine:
        if since is None:
            return BundleLine(Stack(ImageID("")))
        try:
            base, self._unpin = self._context.pins.pin(since)
        except NotFound as exc:
            raise NotFound(
                f"the bundle builds on snapshot {since}, which is not here; import the bundle that holds it first"
            ) from exc
        if base.state in (SnapshotState.LOST, SnapshotState.PRUNED):
            raise Conflict(
                f"the bundle builds on snapshot {short(since)}, whose files are gone ({base.state}); import a whole bundle"
            )
        at: Snapshot | None = base
        while at is not None:
            self._before[at.id] = at.messages
            at = None if at.parent is None else self._context.catalog.snapshots.get(at.parent)
        return BundleLine(base.stack, since, since, base.messages, base.seq, whole=False)

    # -- one snapshot --------------------------------------------------------------------------------------------------

    def _snapshot(self, reader: BundleReader, number: int, snapshot_id: SnapshotID, line: BundleLine) -> None:
        data = reader.record(number)
        record = read_record(data)
        snapshot = record.snapshot
        first = number == 0 and reader.since is None
        follows = None if first else snapshot.follows
        before = line.messages if follows is None else self._before.get(follows, -1)
        kept = snapshot.messages - len(record.messages)
        fits = kept == before or (follows is not None and kept < before)
        if (
            snapshot.id != snapshot_id
            or (not first and snapshot.parent != line.parent)
            or not fits
            or snapshot.seq > _SEQ_LIMIT
        ):
            raise UsageError(
                f"the bundle is malformed: the record of snapshot {short(snapshot_id)} does not fit into its line"
            )
        trajectory = self._trajectory(record, line)
        if first:
            self._image_defaults = (check_env(record.image.env), check_text(record.image.workdir))
        has_files = snapshot.state is SnapshotState.STORED
        self._take_outputs(reader, snapshot)
        own_layers = self._layers.take(reader, number, line, has_files=has_files)
        state = SnapshotState.CAPTURED if has_files else snapshot.state
        self._taken.append(
            _Taken(
                self._keep(data),
                snapshot_id,
                line.parent,
                follows,
                trajectory.id,
                line.stack,
                state,
                line.base,
                own_layers,
            )
        )
        self._before[snapshot_id] = snapshot.messages
        line.parent, line.messages, line.seq = snapshot_id, snapshot.messages, snapshot.seq
        if has_files:
            line.base = snapshot_id

    def _keep(self, data: bytes) -> tuple[int, int]:
        offset = self._kept.seek(0, os.SEEK_END)
        self._kept.write(data)
        return offset, len(data)

    def _trajectory(self, record: records.Record, line: BundleLine) -> Trajectory:
        """The trajectory the snapshot is in: the last one, or one that begins here."""
        theirs, seq = record.trajectory, record.snapshot.seq
        last = next(reversed(self._trajectories), None)
        if theirs.id == last and seq > line.seq:
            return self._trajectories[theirs.id]
        if theirs.id in self._trajectories:
            raise UsageError("the bundle is malformed: its snapshots are not in the order of their trajectories")
        if len(self._trajectories) >= MAX_TRAJECTORIES:
            raise LimitExceeded(
                f"the bundle holds more than {MAX_TRAJECTORIES} trajectories; export fewer at a time, since a snapshot"
            )
        ours = theirs.id
        try:
            self._context.catalog.trajectories.get(ours)
            ours = TrajectoryID(new_id())
        except NotFound:
            pass
        made = Trajectory(
            ours,
            theirs.name,
            self._policy,
            check_agent(theirs.agent),
            record.snapshot.id,
            TrajectoryStatus.STOPPED,
            theirs.created_at_ns,
            line.parent,
            env=check_env(theirs.env),
            began=theirs.began,
        )
        self._trajectories[theirs.id] = made
        return made

    def _take_outputs(self, reader: BundleReader, snapshot: Snapshot) -> None:
        wanted = set(snapshot.call.outputs)
        for blob in reader.outputs():
            if blob not in wanted or blob in self._outputs:
                raise UsageError(f"the bundle is malformed: the output {blob} is not expected there")
            with self._context.spool.writer() as writer:
                for piece in reader.pieces():
                    writer.write(piece)
                self._outputs[blob] = writer.save()
        if not wanted <= self._outputs.keys():
            raise UsageError(f"the bundle is malformed: an output of snapshot {short(snapshot.id)} is missing in it")

    # -- the rows ------------------------------------------------------------------------------------------------------

    def _commit(self, reader: BundleReader, name: str | None) -> tuple[Trajectory, ...]:
        catalog, since = self._context.catalog, reader.since
        image = (
            self._base_image(*self._image_defaults).id if since is None else catalog.snapshots.get(since).stack.image
        )
        heads = {taken.trajectory: taken.id for taken in self._taken}
        places: dict[SnapshotID | None, int] = {snapshot: place for place, snapshot in enumerate(self._before)}
        names, here = {trajectory.name for trajectory in catalog.trajectories.list()}, catalog.refs.tags()
        trajectories = []
        for made in self._trajectories.values():
            own = made.name
            if made is next(reversed(self._trajectories.values())) and name is not None:
                own = name
            elif own is not None and not _may_be_taken(own):
                self._warnings.add(f"the trajectory {own} was imported without its name, which {_NOT_TAKEN}")
                own = None
            elif own is not None and (own in names or own in here):
                self._warnings.add(f"the trajectory {own} was imported without its name, which is taken here")
                own = None
            names.add(own)
            spec = replace(self._policy, image=image)
            on_the_way = (
                places.get(made.began, len(places)) <= places[heads[made.id]]
            )  # else neither could ever be removed
            began = made.began if on_the_way else None
            env = tuple(
                (key, value) for key, value in made.env if key != TENANT
            )  # a bundle does not decide which tenant it reaches here
            trajectories.append(replace(made, name=own, spec=spec, env=env, head=heads[made.id], began=began))
        tags: dict[SnapshotID, list[str]] = {}
        for tag, snapshot_id in self._free_tags(reader, names):
            tags.setdefault(snapshot_id, []).append(tag)
        catalog.others.restore([], trajectories, self._rows(image, tags))
        self._committed = True
        return tuple(trajectories)

    def _rows(self, image: ImageID, tags: dict[SnapshotID, list[str]]) -> Iterator[SnapshotRow]:
        for taken in self._taken:
            self._kept.seek(taken.record[0])
            record = read_record(self._kept.read(taken.record[1]))
            theirs = record.snapshot
            snapshot = Snapshot(
                taken.id,
                taken.parent,
                taken.trajectory,
                theirs.seq,
                Stack(image, taken.stack.layers),
                self._call(theirs.call),
                theirs.messages,
                taken.state,
                theirs.pause_ns,
                theirs.created_at_ns,
                theirs.method,
                theirs.files,
                tuple(tags.get(taken.id, ())),
                base=taken.base,
                own_layers=taken.own_layers,
                follows=taken.follows,
            )
            yield SnapshotRow(snapshot, record.messages, entries=record.entries, state=record.state)

    def _call(self, call: ToolCall) -> ToolCall:
        output, stdout, stderr = (
            None if blob is None else self._outputs[blob] for blob in (call.output, call.stdout, call.stderr)
        )
        return replace(call, output=output, stdout=stdout, stderr=stderr)


def _find_known(catalog: Catalog, snapshots: tuple[SnapshotID, ...]) -> list[Snapshot]:
    """The bundle's snapshots that this daemon already has."""
    known = []
    for snapshot_id in snapshots:
        with contextlib.suppress(NotFound):
            known.append(catalog.snapshots.get(snapshot_id))
    return known


def _check_free(catalog: Catalog, known: list[Snapshot], name: str | None) -> None:
    for one in known:
        raise Conflict(
            f"snapshot {short(one.id)} of the bundle is here already and others are not; import one that was exported since it"
        )
    if name is not None and any(trajectory.name == name for trajectory in catalog.trajectories.list()):
        raise Conflict(f"the name {name} belongs to another trajectory; choose another name")
    if name is not None and name in catalog.refs.tags():
        raise Conflict(
            f"the name {name} is a tag; choose another name, or take the tag away with `snapshotd tag --delete {name}`"
        )


def _may_be_taken(name: str) -> bool:
    return bool(NAME_PATTERN.fullmatch(name)) and not ID_FORM.fullmatch(name)
