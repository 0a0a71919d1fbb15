"""The stores, runtimes and paths that the parts of the engine share. Built once, in daemon/wiring.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from snapshotd.catalog.base import Catalog, present_tenant
from snapshotd.config import Config
from snapshotd.engine.events import EventLogs
from snapshotd.engine.ownership import ALONE, Ownership
from snapshotd.engine.pins import Pins
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import DataLoss, NotFound, Unsupported, UsageError
from snapshotd.images.store import ImageStore
from snapshotd.kernel.abilities import Mode
from snapshotd.kernel.holding.members import Members
from snapshotd.layers.store import LayerStore
from snapshotd.repo.base import Repository
from snapshotd.repo.spool import Spool
from snapshotd.runtime.base import Container, Keeper, Runtime
from snapshotd.types import (
    FOLDER,
    NO_ISOLATION,
    BlobID,
    Image,
    ImageID,
    Network,
    OutputKind,
    SandboxSpec,
    Snapshot,
    TrajectoryID,
    short,
)


class PackCache(Protocol):
    """The parts of the fleet's packs that a node's disk keeps (repo/fleet/blocks.py)."""

    budget_bytes: int

    def used_bytes(self) -> int: ...

    def give_room(self) -> None:
        """Remove some of it where others have filled the disk."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """`state_dir` is durable; `run_dir` (below /run, searchable by everyone) holds sockets and is empty after a boot.

    `share_dir` appears read-only in every sandbox: `init` and `lib/`.
    """

    config: Config
    state_dir: Path
    run_dir: Path
    share_dir: Path
    instance: str
    catalog: Catalog
    spool: Spool
    repo: Repository
    store: LayerStore
    images: ImageStore
    runtimes: Mapping[str, Runtime]
    events: EventLogs
    pins: Pins
    secrecy: Secrecy
    keeper: Keeper
    child: Callable[[str], list[str]]
    """The command line of a child process of this state directory, by its role (daemon/children.py)."""
    ownership: Ownership = ALONE
    """The daemon's right to act for its trajectories."""
    cache: PackCache | None = None
    """None: the packs lie on this machine, or nothing is kept of them."""
    mode: Mode = Mode.PIVOT
    no_isolation: str = ""
    """The reason why only sandboxes that are asked to be without isolation can run; empty: others can, or the settings
    ask for it."""

    def image(self, image_id: ImageID) -> Image | None:
        """An image by its exact id; None when it is gone."""
        return next((image for image in self.images.list() if image.id == image_id), None)

    def ensure_image(self, name: str, progress: Callable[[str], None]) -> Image:
        """The image that `name` stands for, made if need be; a caller of one tenant takes those that are there. As
        `ImageStore.ensure`."""
        return self.images.ensure(name, progress) if present_tenant() is None else self.images.find_made(name)

    def members(self, runtime: Runtime, container: Container) -> Members:
        """The processes of a container, which a node freezes when its lease is over. SandboxFailed."""
        return self.ownership.hold(runtime.members(container))

    def command_logs(self, trajectory: TrajectoryID) -> Path:
        """Folder of the logs of a trajectory's background commands (runs/commands.py). It need not exist."""
        return self.state_dir / "commands" / trajectory

    def sandbox_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec of a sandbox that begins at a snapshot of a trajectory with this one. Unsupported."""
        if spec.runtime != FOLDER:
            return spec
        name = self.runtime("auto").name
        return replace(spec, runtime=name, network=Network.HOST if name == NO_ISOLATION else spec.network)

    def imported_spec(self) -> SandboxSpec:
        """The spec of imported trajectories, without an image: a bundle does not choose how it is isolated. Where nothing
        isolates and no setting says that it need not, they can be looked at, and running them is refused. Unsupported."""
        spec = SandboxSpec(ImageID(""), FOLDER)
        return replace(spec, runtime="runc") if self.no_isolation else self.sandbox_spec(spec)

    def output(self, blob: BlobID) -> Iterator[bytes]:
        """A recorded output in pieces, from the spool or the repository. NotFound, DataLoss."""
        try:
            return self.spool.load_blob(blob)
        except NotFound:
            return self.repo.load(blob)  # archived

    def recorded_output(self, snapshot: Snapshot, which: OutputKind) -> Iterator[bytes] | None:
        """An output of a snapshot's call; None if it had none. As `output`; DataLoss also where a repair has given it
        up."""
        lost = snapshot.call.damage_of(which)
        if lost is not None:
            size = "an unknown number of" if lost.bytes is None else lost.bytes
            raise DataLoss(
                f"the {which} of snapshot {short(snapshot.id)} was damaged on disk and is gone: {size} bytes with the hash {lost.hash}; "
                "its call and files are still there"
            )
        blob: BlobID | None = getattr(snapshot.call, which)
        return None if blob is None else self.output(blob)

    def runtime(self, name: str) -> Runtime:
        """The driver for `--runtime NAME`. `auto`: docker if its engine answers, else runc; without isolation only where
        the daemon has no other driver. UsageError, Unsupported."""
        if self.no_isolation and name != NO_ISOLATION:
            raise Unsupported(self.no_isolation)
        if name == "auto" and self.runtimes.keys() == {NO_ISOLATION}:
            return self.runtimes[NO_ISOLATION]
        if name == "auto":
            reasons = []
            for candidate in ("docker", "runc"):
                reason = self.runtimes[candidate].unavailable() if candidate in self.runtimes else "not configured"
                if reason is None:
                    return self.runtimes[candidate]
                reasons.append(f"{candidate}: {reason}")
            raise Unsupported(f"no container runtime can be used here ({'; '.join(reasons)}); run `snapshotd setup`")
        runtime = self.runtimes.get(name)
        if runtime is None and name in ("docker", "runc"):
            if self.mode is Mode.FOLDER:
                raise Unsupported(
                    f"this daemon runs in the mode folder, where there are no containers, so not of {name} either"
                )
            raise Unsupported(f"sandboxes in containers of {name} need root's daemon: run the command with sudo")
        if runtime is None:
            raise UsageError(f"unknown runtime {name!r}; choose auto, {', '.join(sorted(self.runtimes))}")
        reason = runtime.unavailable()
        if reason is not None:
            raise Unsupported(f"the {name} runtime cannot be used here: {reason}")
        return runtime
