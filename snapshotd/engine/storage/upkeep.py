"""Keeping the repository small and whole: prune, check, repair, usage. One at a time.

A prune goes in the reverse order of storing: first the catalog says `pruned` and is flushed, then the packs are
collected, then unneeded layers go. After an interruption anywhere, the next prune finishes it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from snapshotd.api.forms import iso_time, path_text
from snapshotd.api.storage import (
    CheckInfo,
    CheckRequest,
    DamageInfo,
    Policy,
    PrunedInfo,
    PruneInfo,
    PruneRequest,
    RepairInfo,
    UsageInfo,
)
from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import ProgressSink
from snapshotd.engine.context import Context
from snapshotd.engine.storage import records, retention
from snapshotd.engine.storage.archive_queue import TAGS_RECORD, Archive
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.retention import RetentionDecision
from snapshotd.errors import DataLoss, NotFound, Unsupported
from snapshotd.failpoints import hit
from snapshotd.repo.base import CheckResult, Peers, Reclaimed, Roots
from snapshotd.terms import number_of
from snapshotd.types import (
    BlobID,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TreeID,
    short,
)

READERS = "reader"
"""Owner of a tree that only a reader, or a layer in the course of writing, still needs."""


class PruneScope:
    """The things that a prune has to know besides the daemon's own catalog. This one is of a daemon that is alone; a fleet has the
    other nodes (engine/node/collecting.py). `catalog`: has every reference to what is stored, but for `more_roots`."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def refresh(self) -> None:
        """Bring what is here of other nodes up to what they have given up and removed."""

    def choose_own(self, trajectories: Iterable[Trajectory]) -> Iterable[Trajectory]:
        """Choose the ones whose snapshots this daemon may give up."""
        return trajectories

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around all that a prune changes. Conflict: another node prunes; Unavailable."""
        yield

    def choose_unneeded(self, snapshots: Sequence[SnapshotID]) -> Collection[SnapshotID]:
        """Choose the ones of `snapshots` that no other node needs."""
        return snapshots

    def give_up(self, snapshots: Sequence[SnapshotID]) -> Collection[SnapshotID]:
        """Let the other nodes know that these have no files any more, within `turn`. Returns those that nobody needs."""
        return snapshots

    def more_roots(self) -> Roots:
        """References that `catalog` does not have."""
        return Roots({}, {}, {})

    def peers(self) -> Peers | None:
        """The other nodes, as the archive process is to know them. Asked for when `catalog` has been read."""
        return None

    def tell(self, reclaimed: Reclaimed) -> None:
        """Let the other nodes know where things are now. Unavailable: they find out by themselves."""

    def find_still_known(self, removed: Collection[TrajectoryID]) -> Collection[TrajectoryID]:
        """Choose the ones of `removed` that other nodes have."""
        return ()


class Upkeep:
    """See the module's text. `running`: the snapshots that live sandboxes stand on. `evict`: bring the layers within
    their budget, and say how many bytes that gave up."""

    def __init__(
        self,
        context: Context,
        archive: Archive,
        archiver: Archiver,
        cold: Cold,
        running: Callable[[], set[SnapshotID]],
        evict: Callable[[], int],
    ) -> None:
        self._scope = PruneScope(context.catalog)
        self._context, self._archive, self._archiver = context, archive, archiver
        self._cold, self._pins = cold, context.pins
        self._running, self._evict = running, evict
        self._one_at_a_time = threading.Lock()

    def share(self, scope: PruneScope) -> None:
        """Prune as a node of a fleet from now on."""
        self._scope = scope

    # -- prune ---------------------------------------------------------------------------------------------------------

    def prune(
        self, request: PruneRequest, progress: ProgressSink, *, only: Callable[[Trajectory], bool] | None = None
    ) -> PruneInfo:
        """See `StorageService.prune`. `only`: of these trajectories, by their own rules; it costs little when nothing goes."""
        dry_run = request.dry_run
        with self._one_at_a_time:
            progress("deciding what goes")
            decisions = self._decide(request.policy, only, progress)
            if only is not None and all(decision.keep for decision in decisions):
                return PruneInfo(dry_run, (), len(decisions), 0, 0, self._context.repo.stored_bytes())
            with nullcontext() if dry_run else self._scope.turn():
                if not dry_run:
                    decisions = self._record(decisions)
                gone = [d for d in decisions if not d.keep]
                progress("collecting what nothing refers to")
                reclaimed = self._collect({d.snapshot.id for d in gone}, request.grace_s, progress, dry_run=dry_run)
            lines = tuple(
                PrunedInfo(s.id, s.trajectory, s.seq, iso_time(s.created_at_ns), reason)
                for s, reason in ((d.snapshot, d.reason) for d in gone)
            )
            evicted = 0 if dry_run else self._evict()
            kept = sum(d.keep and d.snapshot.state in (SnapshotState.STORED, SnapshotState.CAPTURED) for d in decisions)
            return PruneInfo(dry_run, lines, kept, reclaimed.freed_bytes, evicted, reclaimed.packs_bytes)

    def _collect(
        self, without: Iterable[SnapshotID], grace_s: float, progress: ProgressSink, *, dry_run: bool
    ) -> Reclaimed:
        catalog, scope = self._context.catalog, self._scope
        with self._archive.pause():  # data that are in the repository but not in the catalog yet would count as garbage
            removed = self._find_removed()
            roots = self._find_roots(scope.catalog, without).join(scope.more_roots())
            peers = scope.peers()  # after the roots: the index has to know all that they need, of every node
            reclaimed = self._archiver.prune(
                roots, self._find_known(), removed, grace_s=grace_s, dry_run=dry_run, progress=progress, peers=peers
            )
            if not dry_run:
                scope.tell(reclaimed)
            if not dry_run and not reclaimed.packs_unknown:
                catalog.trajectories.forget_removed(removed.difference(scope.find_still_known(removed)))
        return reclaimed

    def _decide(
        self, policy: Policy | None, only: Callable[[Trajectory], bool] | None, progress: ProgressSink
    ) -> list[RetentionDecision]:
        with self._pins.frozen() as pinned:
            protected = retention.find_protected(self._context.catalog, self._running() | pinned)
        decisions: list[RetentionDecision] = []
        now = time.time_ns()
        for trajectory in self._scope.choose_own(filter(only, self._context.catalog.trajectories.list())):
            rules = policy or retention.get_policy(self._context.catalog, trajectory.id)
            own = self._context.catalog.snapshots.of_trajectory(trajectory.id)
            decisions += retention.plan(own, rules, protected=protected, now_ns=now)
        if only is not None:
            return decisions
        limit = (policy or retention.get_policy(self._context.catalog, None)).max_bytes

        def size(kept: set[SnapshotID]) -> int:
            without = {d.snapshot.id for d in decisions} - kept
            # Without grace: data too young to go now go with the next prune, and count as gone here.
            return self._collect(without, 0, progress, dry_run=True).packs_bytes

        return _keep_needed(retention.trim(decisions, size, limit), self._scope.choose_unneeded)

    def _record(self, decisions: list[RetentionDecision]) -> list[RetentionDecision]:
        """Make the decisions true in the catalog. Snapshots that came into use since then stay after all."""
        catalog = self._context.catalog
        decisions = _keep_needed(decisions, self._scope.give_up)
        with self._pins.frozen() as pinned:
            protected = retention.find_protected(catalog, self._running() | pinned)
            decisions = [replace(d, keep=d.keep or d.snapshot.id in protected) for d in decisions]
            catalog.snapshots.set_pruned([d.snapshot.id for d in decisions if not d.keep])
            catalog.flush()
        hit("engine.prune.recorded")
        return decisions

    # -- what must stay ------------------------------------------------------------------------------------------------

    def _find_roots(self, catalog: Catalog, without: Iterable[SnapshotID] = (), *, readers: bool = True) -> Roots:
        """Everything that a catalog refers to, except the files of the snapshots in `without`; with `readers`, the
        trees that readers use as well."""
        left_out = set(without)
        trees: dict[TreeID, str] = dict.fromkeys(self._pins.trees() | self._cold.trees() if readers else (), READERS)
        contents: dict[BlobID, str] = {}
        for snapshot in catalog.snapshots.all():
            if snapshot.tree is not None and snapshot.id not in left_out:
                trees.setdefault(snapshot.tree, snapshot.id)
            if snapshot.state in (SnapshotState.STORED, SnapshotState.PRUNED):
                for blob in snapshot.call.outputs:
                    contents.setdefault(blob, snapshot.id)
        for image in catalog.images.list():
            if image.tree is not None:
                trees[image.tree] = image.id
        records: dict[RecordID, str] = dict.fromkeys(catalog.snapshots.referenced_records(), "")
        tags = catalog.get_meta(TAGS_RECORD)
        if tags:
            records[RecordID(tags)] = ""
        return Roots(trees, contents, records)

    def _find_known(self) -> list[SnapshotID]:
        """The snapshots whose files the catalog has or has given up: no pack can bring them back."""
        catalogs = {id(each): each for each in (self._context.catalog, self._scope.catalog)}
        return [
            one.id for each in catalogs.values() for one in each.snapshots.all() if one.state is not SnapshotState.LOST
        ]

    def _find_removed(self) -> set[TrajectoryID]:
        """Trajectories that a pack could bring back against the user's will. One that was imported again is none."""
        catalog = self._context.catalog
        return catalog.trajectories.removed().difference(one.id for one in catalog.trajectories.list())

    # -- check and repair ----------------------------------------------------------------------------------------------

    def check(self, request: CheckRequest, progress: ProgressSink) -> CheckInfo:
        """See `StorageService.check`."""
        self._scope.refresh()
        with self._one_at_a_time:
            with self._archive.pause():
                # Without readers: a failed start from a snapshot that is lost by now is one, and nothing could repair
                # its tree.
                result = self._archiver.check(
                    self._find_roots(self._context.catalog, readers=False),
                    read_data=request.read_data,
                    progress=progress,
                )
            report = self._report(result)
        remedy = "`snapshotd daemon --rebuild-catalog` makes it again from the stored snapshots"
        found = [
            DamageInfo(None, None, f"the catalog is damaged ({problem}); {remedy}", None, None)
            for problem in self._context.catalog.problems()
        ]
        return replace(report, damages=(*found, *report.damages))

    def _report(self, result: CheckResult) -> CheckInfo:
        snapshots = {s.id: s for s in self._context.catalog.snapshots.all()}
        damages = tuple(
            DamageInfo(
                pack=f.pack,
                object=f.object_id,
                what=f.what,
                snapshot=f.owner if f.owner in snapshots else None,
                path=None if f.path is None else path_text(f.path),
            )
            for f in result.faults
        )
        return CheckInfo(
            result.objects,
            result.packs,
            result.bytes_read,
            damages,
            tuple(self._find_damaged(result, snapshots.values())),
        )

    def _find_damaged(self, result: CheckResult, snapshots: Iterable[Snapshot]) -> list[SnapshotID]:
        """All snapshots whose files or outputs are damaged. The check names one owner of a tree or output, and
        several may share it."""
        owners = set(result.owners)
        by_id = {s.id: s for s in snapshots}
        bad = [by_id[SnapshotID(owner)] for owner in owners if SnapshotID(owner) in by_id]
        trees = {s.tree for s in bad if s.tree is not None}
        outputs = {blob for s in bad for blob in s.call.outputs}
        return [
            s.id for s in by_id.values() if s.id in owners or s.tree in trees or outputs.intersection(s.call.outputs)
        ]

    def repair(self, progress: ProgressSink) -> RepairInfo:
        """See `StorageService.repair`."""
        with self._one_at_a_time:
            with self._archive.pause():
                sizes = self._output_sizes()
                given_up = _give_up_spooled(self._context)
                try:
                    repaired = self._archiver.repair(progress)
                except Unsupported:  # the packs are a fleet's
                    if not given_up:
                        raise
                    self._archive.retry()
                    self._context.catalog.flush()
                    return RepairInfo(tuple(given_up), ())
                actions = [*given_up, *repaired.actions]
                progress("checking every byte")
                bad = self._find_unreadable(progress)
                actions += self._store_images_again(bad)
                dropped = _give_up_outputs(self._context, bad, sizes)
                actions += dropped
            self._archive.retry()
            stored = [
                s for s in self._context.catalog.snapshots.all() if s.tree in bad and s.state is SnapshotState.STORED
            ]
            hot = [s for s in stored if self._cold.is_hot(s)]
            lost = [s for s in stored if s not in hot]
            # All of them before any is stored again: nothing may be built on a tree that is damaged.
            self._context.catalog.snapshots.set_state([s.id for s in lost], SnapshotState.LOST)
            self._context.catalog.snapshots.set_state([s.id for s in hot], SnapshotState.CAPTURED)
            if hot:
                progress(f"storing {number_of(len(hot), 'snapshot')} again from layers")
                self._archive.wait()
                actions += [f"snapshot {short(s.id)} was stored again from its layers" for s in hot]
            if lost:
                actions += [
                    f"snapshot {short(s.id)} was marked as lost: a part of it is damaged and nowhere else" for s in lost
                ]
            with self._archive.pause():
                actions += self._write_records_again(bad)
            if repaired.gone and (lost or dropped):  # else nothing needed them, or the layers still had them
                actions.append(f"{number_of(len(repaired.gone), 'object')} cannot be brought back")
            self._context.catalog.flush()
            return RepairInfo(tuple(actions), tuple(s.id for s in lost))

    def _find_unreadable(self, progress: ProgressSink) -> set[str]:
        """The ids of all trees, contents and records that the catalog needs and that cannot be read in full."""
        roots = self._find_roots(self._context.catalog, readers=False)
        own_names = Roots({t: t for t in roots.trees}, {c: c for c in roots.contents}, {r: r for r in roots.records})
        return set(self._archiver.check(own_names, read_data=True, progress=progress).owners)

    def _store_images_again(self, bad: set[str]) -> list[str]:
        damaged = [image for image in self._context.catalog.images.list() if image.tree in bad]
        for image in damaged:
            self._archiver.archive_image(image.id)
        self._archiver.flush()
        return [f"image {image.name or short(image.id)} was stored again from its directory" for image in damaged]

    def _output_sizes(self) -> dict[BlobID, int]:
        """Sizes of outputs, as far as the index knows them: a repair takes damaged outputs out of it."""
        sizes: dict[BlobID, int] = {}
        for blob in self._find_roots(self._context.catalog, readers=False).contents:
            with suppress(DataLoss, NotFound):
                sizes[blob] = self._context.repo.size_bytes(blob)
        return sizes

    def _write_records_again(self, bad: set[str]) -> list[str]:
        """The catalog has everything that a record says."""
        catalog, done = self._context.catalog, []
        for snapshot in catalog.snapshots.all():
            if snapshot.state is SnapshotState.CAPTURED or catalog.snapshots.record(snapshot.id) not in bad:
                continue
            image = self._context.image(snapshot.stack.image)
            if image is not None:
                done.append(
                    (snapshot, self._archiver.archive_record(records.encode_from(catalog, snapshot, image), None))
                )
        self._archiver.flush()
        for snapshot, record in done:
            catalog.snapshots.set_record(snapshot.id, record)
        if catalog.get_meta(TAGS_RECORD) in bad:
            catalog.set_meta(TAGS_RECORD, "")
            self._archive.save_tags_soon()
        return [f"the record of snapshot {short(snapshot.id)} was written again" for snapshot, _ in done]

    # -- usage ---------------------------------------------------------------------------------------------------------

    def usage(self, budget: int) -> UsageInfo:
        """See `StorageService.usage`."""
        context = self._context
        states = context.catalog.figures.states()
        return UsageInfo(
            layer_bytes=context.store.sizes.total(),
            layer_budget_bytes=budget,
            repository_bytes=context.repo.stored_bytes(),
            spool_bytes=_directory_bytes(str(context.state_dir / "repo" / "blobs")),
            states={state.value: count for state, count in states.items()},
            unarchived=states[SnapshotState.CAPTURED],
            cache_bytes=0 if context.cache is None else context.cache.used_bytes(),
            cache_budget_bytes=0 if context.cache is None else context.cache.budget_bytes,
        )


def _keep_needed(
    decisions: list[RetentionDecision], let_go: Callable[[Sequence[SnapshotID]], Collection[SnapshotID]]
) -> list[RetentionDecision]:
    """Keep what other nodes need. `let_go`: returns what may go."""
    gone = set(let_go([d.snapshot.id for d in decisions if not d.keep]))
    why = "another node needs it, or it is not published yet"
    return [d if d.keep or d.snapshot.id in gone else replace(d, keep=True, reason=why) for d in decisions]


def _give_up_outputs(context: Context, bad: Collection[str], sizes: Mapping[BlobID, int]) -> list[str]:
    """Give up outputs in the repository. A damaged one must not take the files of its snapshot along. Returns what was done."""
    stored = [one for one in context.catalog.snapshots.all() if one.state is not SnapshotState.CAPTURED]
    gone = {BlobID(blob) for one in stored for blob in one.call.outputs if blob in bad}
    context.catalog.snapshots.forget_outputs({blob: sizes.get(blob) for blob in gone})
    return _describe_given_up(stored, gone)


def _give_up_spooled(context: Context) -> list[str]:
    """Give up damaged outputs that are not stored yet. They must not keep their snapshots, and those after them, from being stored."""
    gone: dict[BlobID, int | None] = {}
    for blob in context.catalog.snapshots.unstored_blobs():
        try:
            if not context.repo.contains(blob):
                for _ in context.spool.load_blob(blob):
                    pass
        except (DataLoss, NotFound):
            gone[blob] = None
            with suppress(DataLoss, NotFound):
                gone[blob] = context.spool.size_bytes(blob)
    captured = context.catalog.snapshots.get_many(context.catalog.snapshots.unstored()).values() if gone else ()
    context.catalog.snapshots.forget_outputs(gone, spooled=True)
    return _describe_given_up(captured, gone.keys())


def _describe_given_up(snapshots: Iterable[Snapshot], gone: Set[BlobID]) -> list[str]:
    return [
        f"an output of snapshot {short(one.id)} is damaged and was given up"
        for one in snapshots
        if gone & set(one.call.outputs)
    ]


def _directory_bytes(path: str) -> int:
    """Disk use of all files below; only this daemon writes here."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # archived meanwhile
    return total
