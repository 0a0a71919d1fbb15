"""Durable storage: what it takes, what is kept, whether it is whole, and ways out of and into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snapshotd.api.storage import (
    CheckInfo,
    CheckRequest,
    ExportQuery,
    Policy,
    PruneInfo,
    PruneRequest,
    RepairInfo,
    UsageInfo,
)
from snapshotd.engine import share
from snapshotd.engine.base import Imported, ProgressSink
from snapshotd.engine.context import Context
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.storage import evict, reserve, retention
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.browse import Browse
from snapshotd.engine.storage.upkeep import Upkeep
from snapshotd.engine.transfer import bundle, imports
from snapshotd.engine.transfer.trajectories.turns import Replies
from snapshotd.errors import UsageError
from snapshotd.types import SnapshotState, TrajectoryID


class StorageService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(
        self,
        context: Context,
        upkeep: Upkeep,
        archive: Archive,
        background: Background,
        browse: Browse,
        replies: Replies,
    ) -> None:
        self._context, self._catalog, self._upkeep, self._archive = context, context.catalog, upkeep, archive
        self._background, self._browse, self._replies = background, browse, replies

    def usage(self) -> UsageInfo:
        """Disk use."""
        return self._upkeep.usage(evict.budget_bytes(self._context))

    def policy(self, ref: str | None) -> Policy:
        """The global policy, or a trajectory's own (the global one where it has none)."""
        return retention.get_policy(self._catalog, None if ref is None else self._catalog.refs.find_trajectory(ref).id)

    def set_policy(self, ref: str | None, policy: Policy | None) -> None:
        """Set the global policy, or a trajectory's own; None removes it. UsageError (a number that makes no sense)."""
        if ref is not None and policy is not None and policy.max_bytes is not None:
            raise UsageError(
                "a trajectory's own policy cannot limit the size of the repository, which is one for all: leave out its name"
            )
        retention.set_policy(self._catalog, None if ref is None else self._catalog.refs.find_trajectory(ref).id, policy)

    def prune(self, request: PruneRequest, progress: ProgressSink) -> PruneInfo:
        """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to. A policy in the request
        replaces the stored policies. Packs younger than the grace period stay as they are. DataLoss: the repository is
        damaged; nothing was collected."""
        reserve.adjust(self._context.state_dir)
        try:
            return self._upkeep.prune(request, progress)
        finally:
            reserve.adjust(self._context.state_dir)

    def check(self, request: CheckRequest, progress: ProgressSink) -> CheckInfo:
        """Verify index, packs, trees and the catalog's references; with `read_data` also every object against its id.
        Changes nothing."""
        return self._upkeep.check(request, progress)

    def repair(self, progress: ProgressSink) -> RepairInfo:
        """Rebuild the index and the catalog's rows from packs where they are damaged, store again the contents that
        layers still hold, and mark snapshots that are gone as lost. On a healthy repository it does nothing."""
        return self._upkeep.repair(progress)

    def export(
        self, ref: str, query: ExportQuery, *, write: Callable[[bytes], object], progress: ProgressSink
    ) -> tuple[str, ...]:
        """Write a snapshot (with `whole`: its trajectory up to it) as one file. `bundle` is for `import_bundle`; with
        `since` it holds only the snapshots after that one. `oci` is an image for `docker load`, `tar` the plain tree.
        `atif` and `jsonl` are the trajectory up to the snapshot, for evaluation and training (docs/agents/training.md); with
        `forks` all that were forked from it follow. Returns warnings (what the form cannot hold). UsageError for
        a combination that makes no sense."""
        form, whole, since, forks = query.form, query.whole, query.since, query.forks
        if form == "atif" or form == "jsonl":
            if whole or since is not None:
                raise UsageError(
                    f"an export as {form} holds a trajectory from its beginning; leave out what it begins after"
                )
            return share.export_trajectories(self._context, self._replies, ref, form, forks, write, progress)
        if forks:
            raise UsageError(f"an export as {form} holds no forks; export each of them")
        snapshot = self._catalog.refs.find_snapshot(ref)
        if form != "bundle":
            if whole or since is not None:
                raise UsageError(
                    f"the format {form} holds the files of one snapshot: name a single snapshot, and none that it begins after"
                )
            return share.export_files(self._context, snapshot, form, write)
        base = None if since is None else self._catalog.refs.find_snapshot(since)
        line = bundle.line_of(self._catalog, snapshot, whole=whole, since=base.id if base else None)
        if any(s.state is SnapshotState.CAPTURED for s in (*line, *([base] if base else ()))):
            progress("waiting until all is stored")
            self._archive.wait()
        return share.export_bundle(self._context, line, base, write, progress)

    def import_bundle(self, read: Callable[[int], bytes], name: str | None, progress: ProgressSink) -> Imported:
        """Take a bundle in, all or nothing. The bundle is hostile. If all its snapshots are here, only tags are taken,
        and `snapshots` is 0. UsageError (malformed), NotFound (the snapshot it builds on is not here), Conflict (parts
        of it are here already), LimitExceeded, VersionMismatch."""
        spec = self._context.imported_spec()
        imported = imports.import_bundle(
            self._context, read, name=name, policy=spec, base_image=self._context.images.empty, progress=progress
        )
        self._archive.kick()
        if self._catalog.refs.tags():
            self._archive.save_tags_soon()
        return imported

    def mount(self, directory: Path, namespace_pid: int) -> None:
        """Show every stored snapshot below `directory`, read-only, in the mount namespace of a process. UsageError,
        Unsupported."""
        self.flush()
        self._browse.mount(directory, namespace_pid)

    def unmount(self, directory: Path, namespace_pid: int) -> None:
        """End a mount. NotFound."""
        self._browse.unmount(directory, namespace_pid)

    def flush(self, ref: TrajectoryID | None = None) -> None:
        """Return when every snapshot so far is stored and its files are counted. OutOfSpace, DataLoss, InternalError:
        one cannot be."""
        self._background.wait()
        self._archive.wait()
