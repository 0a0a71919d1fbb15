"""Exporting: the files of a snapshot for other programs, and bundles for another state directory. Everything is pinned
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from snapshotd.engine.base import ProgressSink
from snapshotd.engine.context import Context
from snapshotd.engine.storing.look import open_view
from snapshotd.engine.transfer import bundle, export
from snapshotd.errors import DataLoss
from snapshotd.types import Image, Snapshot, short


def export_files(context: Context, snapshot: Snapshot, form: str, write: Callable[[bytes], object]) -> tuple[str, ...]:
    """As a `tar` of the tree, or as an `oci` image. Returns warnings. The image says nothing of the trajectory's
    environment: it may hold secrets."""
    with open_view(context, snapshot) as view:
        if form == "tar":
            return export.export_tar(view, write)
        image = _image(context, snapshot)
        name = context.catalog.get_trajectory(snapshot.trajectory).name
        facts = export.ImageFacts(export.reference_of(snapshot, name), snapshot.created_at_ns, image.env, image.workdir)
        return export.export_oci(view, facts, write, context.state_dir)


def export_bundle(
    context: Context,
    line: Sequence[Snapshot],
    since: Snapshot | None,
    write: Callable[[bytes], object],
    progress: ProgressSink,
) -> tuple[str, ...]:
    """As a bundle; all are stored, or have no files. Returns warnings."""
    with ExitStack() as pinned:
        base = pinned.enter_context(context.pins.pinned(since.id)) if since is not None else None
        snapshots = [pinned.enter_context(context.pins.pinned(snapshot.id)) for snapshot in line]
        source = bundle.StoredSource(
            context.catalog, context.repo, lambda snapshot: _image(context, snapshot), str(context.state_dir)
        )
        return bundle.export_bundle(snapshots, source, write, since=base, progress=progress)


def _image(context: Context, snapshot: Snapshot) -> Image:
    image = context.image(snapshot.stack.image)
    if image is None:
        raise DataLoss(f"the image of snapshot {short(snapshot.id)} is missing in the catalog; run `snapshotd repair`")
    return image
