"""The verbs of durable storage, of images, and of the daemon itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Unpack

from snapshotd.api import operations
from snapshotd.api.operation import Operation
from snapshotd.api.record import Request
from snapshotd.api.service import StatsInfo, VersionInfo
from snapshotd.api.storage import (
    CheckInfo,
    CheckOptions,
    CheckRequest,
    EnsureImageRequest,
    ImageInfo,
    ImageRequest,
    MountRequest,
    Policy,
    PruneInfo,
    PruneOptions,
    PruneRequest,
    RepairInfo,
    UsageInfo,
)
from snapshotd.api.trajectories import LimitOptions, LimitsRequest
from snapshotd.api.wire import check_ref
from snapshotd.client.local.arguments import local_path
from snapshotd.client.local.sizes import limit_fields
from snapshotd.client.twofold import verb
from snapshotd.client.verbs.base import Progress, VerbPart, result_of


class StorageVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @verb
    async def usage(self) -> UsageInfo:
        """Disk use."""
        return await self._transport.call(operations.USAGE)

    @verb
    async def policy(self, trajectory: str | None = None) -> Policy:
        """The global retention policy, or the one that holds for a trajectory."""
        return await self._transport.call(operations.POLICY, query=_line(trajectory))

    @verb
    async def set_policy(self, policy: Policy | None, trajectory: str | None = None) -> Policy:
        """Set the global policy, or a trajectory's own; None removes it. No files go before the next prune, which a
        user's folder has every hour. Returns the
        policy that holds now. UsageError for a number out of range."""
        if policy is not None:
            return await self._transport.call(operations.SET_POLICY, query=_line(trajectory), body=policy)
        await self._transport.call(operations.CLEAR_POLICY, query=_line(trajectory))
        return await self.policy(trajectory)

    @verb
    async def prune(
        self, policy: Policy | None = None, *, progress: Progress | None = None, **options: Unpack[PruneOptions]
    ) -> PruneInfo:
        """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to; with
        `dry_run`, only say what would go. `policy` replaces the stored policies. Packs younger than `grace_s` stay as
        they are, until a later prune. Goes on when this process goes away."""
        body = PruneRequest(policy, **options)
        done = await self._work(operations.PRUNE, body, progress, "the prune", "`snapshotd df` shows what there is")
        return PruneInfo.of(done["report"])

    @verb
    async def check(self, *, progress: Progress | None = None, **options: Unpack[CheckOptions]) -> CheckInfo:
        """Verify the repository; with `read_data` also every object against its id. Damage is in the answer and not
        raised."""
        body = CheckRequest(**options)
        done = await self._work(operations.CHECK, body, progress, "the check", "it changes nothing: repeat it")
        return CheckInfo.of(done["report"])

    @verb
    async def repair(self, *, progress: Progress | None = None) -> RepairInfo:
        """Rebuild damaged parts from intact ones. Does nothing to a healthy repository. Goes on when this process goes
        away."""
        done = await self._work(
            operations.REPAIR, None, progress, "the repair", "`snapshotd check` shows how it stands"
        )
        return RepairInfo.of(done["report"])

    @verb
    async def mount(self, directory: str | Path) -> None:
        """Show every stored snapshot below a local directory, read-only, as `trajectories/`, `snapshots/` and `tags/`.
        UsageError, Unsupported."""
        body = MountRequest(str(local_path(directory)))
        self._check_paths(body)
        await self._transport.call(operations.MOUNT, body=body)

    @verb
    async def unmount(self, directory: str | Path) -> None:
        """End it. NotFound when nothing of the daemon's is mounted there."""
        body = MountRequest(str(local_path(directory)))
        self._check_paths(body)
        await self._transport.call(operations.UNMOUNT, body=body)

    @verb
    async def images(self) -> list[ImageInfo]:
        return await self._transport.call(operations.IMAGES)

    @verb
    async def ensure_image(
        self, name: str, *, progress: Progress | None = None, **limits: Unpack[LimitOptions]
    ) -> ImageInfo:
        """The image that a sandbox of this name would start from. One that is not there is built or imported, as it
        would be by `create` and `run`, which say nothing meanwhile. With the limits of the sandbox, Unsupported comes
        before that where they cannot be kept."""
        body = EnsureImageRequest(name, LimitsRequest(**limit_fields(limits)))
        return await self._make_image(operations.ENSURE_IMAGE, body, progress, f"the image {name}")

    @verb
    async def build_image(self, recipe: str, *, name: str | None = None, progress: Progress | None = None) -> ImageInfo:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`)."""
        body = ImageRequest(self._local_or_name(recipe), name)
        return await self._make_image(operations.BUILD_IMAGE, body, progress, f"the build of {body.source}")

    @verb
    async def import_image(
        self, source: str, *, name: str | None = None, progress: Progress | None = None
    ) -> ImageInfo:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""
        body = ImageRequest(self._local_or_name(source), name)
        return await self._make_image(operations.IMPORT_IMAGE, body, progress, f"the import of {body.source}")

    @verb
    async def remove_image(self, ref: str) -> None:
        await self._transport.call(operations.REMOVE_IMAGE, ref)

    @verb
    async def version(self) -> VersionInfo:
        return await self._transport.call(operations.VERSION)

    @verb
    async def status(self) -> dict[str, Any]:
        return await self._transport.call(operations.STATUS)

    @verb
    async def stats(self, *, trajectories: int = 50) -> StatsInfo:
        """Figures of the moment: sandboxes, disk, the pauses of the last hour, requests. `trajectories`: so many have
        their disk use told, the largest first."""
        return await self._transport.call(operations.STATS, query={"trajectories": trajectories})

    @verb
    async def metrics(self) -> str:
        """The figures of `stats` in the text format of Prometheus."""
        text = b""
        async for piece in await self._transport.pieces(*operations.METRICS.at()):
            text += piece
        return text.decode()

    def _local_or_name(self, source: str) -> str:
        """A path as an absolute one, since the daemon's working directory is another; a name as it is."""
        if source.startswith(("/", ".")):
            self._check_here(f"the path {source}")
        return os.path.abspath(source) if self._transport.way.is_here and os.path.exists(source) else source

    async def _work(
        self, operation: Operation[Any], body: Request | None, progress: Progress | None, what: str, then: str
    ) -> dict[str, Any]:
        return await result_of(await self._transport.lines(*operation.at(), body=body), progress, what, then)

    async def _make_image(
        self, operation: Operation[Any], body: Request, progress: Progress | None, what: str
    ) -> ImageInfo:
        done = await self._work(operation, body, progress, what, "`snapshotd image ls` shows what is there")
        return ImageInfo.of(done["image"])


def _line(trajectory: str | None) -> dict[str, str | None]:
    return {"trajectory": None if trajectory is None else check_ref(trajectory, "trajectory")}
