"""Exporting: the files of a snapshot for other programs, bundles for another state directory (everything is pinned
meanwhile), and trajectories for evaluation and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from snapshotd.engine.base import ProgressSink
from snapshotd.engine.context import Context
from snapshotd.engine.storage.look import open_view
from snapshotd.engine.transfer import bundle, export
from snapshotd.engine.transfer.trajectories.turns import Replies, family
from snapshotd.errors import DataLoss, UsageError
from snapshotd.formats.tar_writer import write_tree
from snapshotd.types import Image, Snapshot, Trajectory, short


def export_files(context: Context, snapshot: Snapshot, form: str, write: Callable[[bytes], object]) -> tuple[str, ...]:
    """Export the files as a `tar`, or as an `oci` image. Returns warnings. The image leaves out the trajectory's
    environment, which may hold secrets."""
    with open_view(context, snapshot) as view:
        if form == "tar":
            return write_tree(view, write)
        image = _image(context, snapshot)
        name = context.catalog.trajectories.get(snapshot.trajectory).name
        facts = export.ImageFacts(export.reference_of(snapshot, name), snapshot.created_at_ns, image.env, image.workdir)
        return export.export_oci(view, facts, write, context.state_dir)


def export_bundle(
    context: Context,
    line: Sequence[Snapshot],
    since: Snapshot | None,
    write: Callable[[bytes], object],
    progress: ProgressSink,
) -> tuple[str, ...]:
    """Export snapshots as a bundle; all are stored, or have no files. Returns warnings."""
    with ExitStack() as pinned:
        base = pinned.enter_context(context.pins.pinned(since.id)) if since is not None else None
        snapshots = [pinned.enter_context(context.pins.pinned(snapshot.id)) for snapshot in line]
        source = bundle.StoredSource(
            context.catalog, context.repo, lambda snapshot: _image(context, snapshot), str(context.state_dir)
        )
        return bundle.export_bundle(snapshots, source, write, since=base, progress=progress)


def export_trajectories(
    context: Context,
    replies: Replies,
    ref: str,
    form: Literal["atif", "jsonl"],
    forks: bool,
    write: Callable[[bytes], object],
    progress: ProgressSink,
) -> tuple[str, ...]:
    """Export a trajectory up to a snapshot or its head; with `forks` also all trajectories that were forked from it, each
    up to its head. Returns warnings. UsageError: the named trajectory has no records."""
    # few are exported, and the schema of their documents would be a twentieth of each daemon's start
    from snapshotd.engine.transfer.trajectories.documents import export_trajectory

    catalog = context.catalog
    head = catalog.refs.find_snapshot(ref)
    named = ref in head.tags or head.id.startswith(ref)
    line = catalog.trajectories.get(head.trajectory) if named else catalog.refs.find_trajectory(ref)
    warnings = list(export_trajectory(context, replies, line, head, form, _score(context, line), write))
    for number, one in enumerate(family(catalog, line.id)[1:] if forks else (), 1):
        progress(f"fork {number}: {short(one)}")
        fork = catalog.trajectories.get(one)
        try:
            warnings += export_trajectory(
                context, replies, fork, catalog.snapshots.get(fork.head), form, _score(context, fork), write
            )
        except UsageError as exc:
            warnings.append(exc.message)
    return tuple(warnings)


def _score(context: Context, line: Trajectory) -> dict[str, Any] | None:
    """The record that an experiment keeps of a branch."""
    found = context.catalog.experiments.of_trajectory(line.id)
    if found is None:
        return None
    name, branch = found
    kept = ("label", "run", "state", "score", "passed")
    return {"experiment": name, **{field: getattr(branch, field) for field in kept}}


def _image(context: Context, snapshot: Snapshot) -> Image:
    image = context.image(snapshot.stack.image)
    if image is None:
        raise DataLoss(f"the image of snapshot {short(snapshot.id)} is missing in the catalog; run `snapshotd repair`")
    return image
