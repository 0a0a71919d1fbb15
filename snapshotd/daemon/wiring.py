"""The composition root: the only module that names concrete stores and drivers."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from snapshotd import sqlite
from snapshotd.api.wire import lock_path_of
from snapshotd.catalog import migration
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.file import meta_in_file
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.config import Config
from snapshotd.daemon import state_files
from snapshotd.daemon.children import StatePlaces, open_repository
from snapshotd.daemon.host import AS_ROOT, Footing, choose_mode, hand_down_controllers, host_mounts
from snapshotd.daemon.instances import find_abandoned, inode_of, make_run_dir
from snapshotd.daemon.library import write_share
from snapshotd.daemon.lock import StateLock
from snapshotd.engine.context import Context
from snapshotd.engine.engine import Engine, EnginePart, Life
from snapshotd.engine.events import EventLogs
from snapshotd.engine.experiments.parts import Services
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.folders.folders import Folders
from snapshotd.engine.host.system_packages import CATATONIT
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.approval.records import ApprovalRecords
from snapshotd.engine.journal.approval.webhook import Webhooks
from snapshotd.engine.journal.gateways import GatewayMaker, Gateways
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.ownership import ALONE
from snapshotd.engine.pins import Pins
from snapshotd.engine.requests import Requests
from snapshotd.engine.runs import recover
from snapshotd.engine.runs.file_calls import FileCalls
from snapshotd.engine.runs.forks import Forks
from snapshotd.engine.runs.launch import Launcher
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.root import LayerSources
from snapshotd.engine.search.filling import Filling
from snapshotd.engine.search.index import TextIndex
from snapshotd.engine.search.service import FindService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.engine.services.approvals import ApprovalService
from snapshotd.engine.services.branching import BranchingService
from snapshotd.engine.services.fleet import FleetService
from snapshotd.engine.services.images import ImageService
from snapshotd.engine.services.journal import JournalService
from snapshotd.engine.services.runs import RunService
from snapshotd.engine.services.snapshots import SnapshotService
from snapshotd.engine.services.stats import StatsService
from snapshotd.engine.services.storage import StorageService
from snapshotd.engine.storage import rebuild, reserve
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.engine.storage.browse import Browse
from snapshotd.engine.storage.child import EngineChild
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.evict import Disposal
from snapshotd.engine.storage.linkgroups import LinkGroups
from snapshotd.engine.storage.merging import Merger
from snapshotd.engine.storage.upkeep import Upkeep
from snapshotd.engine.storage.worker import Worker
from snapshotd.errors import SnapshotdError, Unsupported, UsageError
from snapshotd.failpoints import hit
from snapshotd.fuse.lazy import LazyMount
from snapshotd.gateway.base import Budget, Gateway, GatewayHandler, RecordedReply, Upstream
from snapshotd.images.shared import SharedBuilds
from snapshotd.images.store import ImageStore
from snapshotd.kernel.abilities import BY_USER, Abilities, Mode, container_ids
from snapshotd.kernel.files import sync_dir
from snapshotd.kernel.holding.members import BY_CGROUP, BY_NAMESPACE
from snapshotd.kernel.namespaces import CONTAINER_IDS
from snapshotd.kernel.probes import useful
from snapshotd.layers import filesystem
from snapshotd.layers.store import LayerStore
from snapshotd.repo.format.index import Index
from snapshotd.repo.format.pack import PREFIX
from snapshotd.repo.key import load_key
from snapshotd.repo.spool import Spool
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.writing import reserve as index_reserve
from snapshotd.runtime.base import Runtime
from snapshotd.runtime.docker import DockerRuntime
from snapshotd.runtime.folder import FolderRuntime
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.runc import RuncRuntime
from snapshotd.runtime.starter import Starter
from snapshotd.secrets.vault import Vault
from snapshotd.store.base import Store
from snapshotd.store.open import open_store
from snapshotd.types import NO_ISOLATION, IdMap, Message, new_id

if TYPE_CHECKING:
    from snapshotd.engine.node.node import FleetNode
    from snapshotd.engine.node.rights import NodeRights

_STORE_URL, _LOCAL = "store_url", "local"
"""Default place of packs: the state directory itself."""
_WAY = "way"
_WAYS = {
    "root": "root's daemon",
    "rootless": "an ordinary user's daemon",
    "folder": "a daemon that has no user namespace (SNAPSHOTD_MODE=folder)",
}
"""Ways to keep layers: with other owners, or with other marks."""
_INSTANCE = "instance"
"""The name of an instance in the catalog."""
_SWITCH_INTERVAL_S = 0.0005
"""Time for which a busy thread may hold the interpreter against one that answers a tool call; every system call of a
pivot gives it up once."""


def open_engine(config: Config, footing: Footing = AS_ROOT) -> Engine:
    """Open the engine of a state directory, recovered from any earlier end. The caller holds the directory's lock.

    Raises Unsupported (something is missing on this machine), DataLoss (a file is damaged, or missing although others
    say that it was there), VersionMismatch, OutOfSpace.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    state_dir = Path(config.state_dir)
    state_files.check_catalog(state_dir, may_have_key=bool(config.fleet))
    reserve.adjust(state_dir)  # reading a database takes some blocks
    facts = partial(meta_in_file, state_dir / state_files.CATALOG)
    state_files.check_logs(state_dir, lambda: recover.was_killed(facts))
    catalog = SqliteCatalog(state_dir / state_files.CATALOG)  # before all else that says that there was one
    state_files.check_repository(state_dir, lambda: bool(catalog.trajectories.list()))
    if _settle_store_url(config, catalog) == _local_url(state_dir):
        state_files.check_packs(state_dir, lambda: bool(catalog.snapshots.referenced_records()))
    index_reserve.make(state_dir / "repo" / "index.db")
    store = filesystem.prepare(state_dir)
    with contextlib.ExitStack() as opened:
        opened.callback(filesystem.release, store)
        where = footing.places
        mode, no_isolation = choose_mode(store.host, footing)
        _check_way(catalog, state_dir, _way(store, in_folder=mode is Mode.FOLDER))
        instance = catalog.get_meta(_INSTANCE)
        if instance is None:
            instance = new_id()[:12]
            catalog.set_meta(_INSTANCE, instance)
        run_dir = make_run_dir(where, instance, state_dir)
        keeper = KeeperClient(run_dir / "keeper" / "keeper.sock", host_mounts())
        # The kernel tells no process of a user namespace the filters that the starter copies.
        starter = Starter(used=config.starts_with == "starter" and mode is not Mode.ROOTLESS)
        runtimes: dict[str, Runtime] = {
            NO_ISOLATION: FolderRuntime(run_dir / "none", keeper, leaves_rights=footing.in_namespace)
        }
        if mode is not Mode.FOLDER:
            hand_down_controllers(store.host)
            runtimes["runc"] = RuncRuntime(
                instance,
                run_dir / "runc",
                _container_ids(mode, store.host),
                keeper=keeper,
                starter=starter,
                cgroup_parent=store.host.cgroup_parent,
                grouping=BY_CGROUP if store.host.cgroup_version else BY_NAMESPACE,
            )
        if mode not in (Mode.FOLDER, Mode.ROOTLESS):
            runtimes["docker"] = DockerRuntime(
                instance, config.docker_host, run_dir=run_dir / "docker", keeper=keeper, starter=starter
            )
        spool = Spool(state_dir / "repo")
        rights: NodeRights | None = None
        if config.fleet:
            from snapshotd.daemon.joining import join_fleet, open_rights  # few daemons are nodes

            rights = open_rights(
                config, run_dir, inode_of(state_dir), lambda: [one.id for one in catalog.trajectories.list()]
            )
            opened.callback(rights.lease.close)
        places = StatePlaces(
            state_dir,
            store.root,
            store.kind,
            _settle_store_url(config, catalog),
            store.marks.prefix.decode(),
            "" if rights is None else rights.lease.facts.node,
            -1 if config.node_cache_bytes is None else config.node_cache_bytes,
        )
        cache = None if rights is None else join_fleet(catalog, places, rights)
        if cache is not None:
            opened.callback(cache.close)
        context = Context(
            config=config,
            state_dir=state_dir,
            run_dir=run_dir,
            share_dir=write_share(where.share_root / instance, None if mode is Mode.FOLDER else CATATONIT),
            instance=instance,
            catalog=catalog,
            spool=spool,
            repo=open_repository(places, (rights or ALONE).catch_up),
            store=store,
            images=ImageStore(store.root, catalog, SharedBuilds(Path(config.image_builds))),
            runtimes=runtimes,
            events=EventLogs(state_dir / "runs", config.followed_bytes),
            pins=Pins(catalog.snapshots.get),
            secrecy=Secrecy(Vault(state_dir, lambda: not catalog.trajectories.list()), catalog),
            keeper=keeper,
            child=places.command,
            ownership=rights or ALONE,
            cache=cache,
            mode=mode,
            no_isolation=no_isolation,
        )
        lazy = LazyMount(places.command("lazy"), run_dir / "lazy", _lazy_refusal(mode, store.host))
        survivors = recover.recover(context)
        gateways = _gateway_maker(load_key(places.repo_dir), Budget(config.gateway_memory_bytes))
        engine = _assemble(context, lazy, gateways, rights)
        engine.life.start(survivors)
        opened.pop_all()
        return engine


def _assemble(context: Context, lazy: LazyMount, gateway: GatewayMaker, rights: NodeRights | None = None) -> Engine:
    """Make the engine of its parts. `lazy`: the mount that serves layers which are not there yet. `gateway`: makes a model
    endpoint. `rights`: of a node of a fleet."""
    context.catalog.trajectories.notify(context.events.tell_of_change)
    worker = Worker(context.store.root, context.store.kind, context.store.marks)
    merger, links = Merger(context.store, worker), LinkGroups(worker)
    archiver = Archiver(context.child("archive"))
    archive = Archive(context, archiver)
    rebuilder = EngineChild(context.child("cold"))
    cold = Cold(context, merger.apply, rebuilder, lazy, archive.wait, archive.evict_soon)
    disposal = Disposal(context, merger, cold)
    launcher = Launcher(context, cold.take, LayerSources(merger.apply, links.of, cold.server))
    background = Background(context, merger, links, worker, archive)
    webhooks = Webhooks()
    approvals = ApprovalRecords(context, webhooks)
    gate = Gate(context.catalog, approvals)
    values = KeyValueStore(context.catalog, lambda value: context.secrecy.shared_funnel().conceal(value))
    gateways = Gateways(context, gateway)
    sessions = Sessions(context, launcher, background, cold, gate, values, gateways)
    resumes = Resumes(context, sessions)
    forks = Forks(context, sessions, disposal.forget, lambda made: resumes.resume(made, ()))
    filling = Filling(context, index := TextIndex(context.state_dir / "find.db"))
    context.events.watch.listen(filling.tell)
    steps, browse, folders = background.submit, Browse(context), Folders(context, cold, background.submit)
    values.start_sweeping()
    upkeep = Upkeep(context, archive, archiver, cold, sessions.used_snapshots, disposal.evict)
    node: FleetNode | None = None
    if rights is not None:
        from snapshotd.daemon.joining import open_node

        node = open_node(context, rights, sessions, lambda: launcher.starting, archiver, archive, cold, upkeep)
    ends: tuple[EnginePart, ...] = (
        filling,
        index,
        approvals,
        context.events.watch,
        values,
        folders,
        webhooks,
        browse,
        sessions,
        launcher,
        background,
        *(() if node is None else (node.publisher,)),
        archive,
        cold,
        worker,
        context.keeper,
        *context.runtimes.values(),
        *(part for part in (rights and rights.lease, context.cache) if part),
    )
    services = Services(
        runs=RunService(context, sessions, resumes, background, archive, disposal),
        snapshots=SnapshotService(context, cold, archive, node.publisher.is_published if node else None),
        branching=BranchingService(
            context, sessions, cold, gate, folders.rewinds, forks, resumes, steps, disposal.forget
        ),
        journal=JournalService(context),
        watch=context.events.watch.follow,
    )
    storage = StorageService(context, upkeep, archive, background, browse, _reply_messages)
    experiments = ExperimentService(services, context.catalog, context.secrecy)
    return Engine(
        runs=services.runs,
        snapshots=services.snapshots,
        files=FileCalls(context, sessions, steps),
        branching=services.branching,
        experiments=experiments,
        journal=services.journal,
        approvals=ApprovalService(context, approvals),
        values=values,
        folders=folders,
        storage=storage,
        stats=StatsService(context, sessions, storage, background.pauses, node.describe_fleet if node else None),
        images=ImageService(context),
        requests=Requests(context.catalog),
        find=FindService(context, index, filling),
        fleet=FleetService(context.catalog, None if rights is None else rights.lease.fleet),
        life=Life(
            context,
            sessions,
            cold,
            archive,
            background,
            disposal,
            upkeep,
            experiments,
            filling,
            str(approvals.policy.path),
            ends,
            node,
        ),
    )


def rebuild_catalog(config: Config, progress: Callable[[str], object], footing: Footing) -> rebuild.Report:
    """Move the catalog aside and make a new one from the repository, whose index is repaired first. Layers are dropped:
    no record is left that tells if they are whole. The caller is alone with the state directory. DataLoss (not even the
    key is there), OutOfSpace."""
    state_dir = Path(config.state_dir)
    store = filesystem.prepare(state_dir)
    try:
        url = _find_store_url(config)
        places = StatePlaces(state_dir, store.root, store.kind, url, store.marks.prefix.decode())
        packs = _packs_to_rebuild_from(state_dir, url)
        maintenance = PackMaintenance(packs, places.repo_dir / "index.db", load_key(places.repo_dir))
        for action in maintenance.repair(progress).actions:
            progress(action)
        made = state_dir / "catalog.rebuilt.db"  # a catalog that is half filled is never the catalog
        sqlite.remove(made)  # left by a rebuild that was cut off
        catalog, repository = SqliteCatalog(made), open_repository(places)
        try:
            if url != _local_url(state_dir):
                catalog.set_meta(_STORE_URL, url)
            if (instance := find_abandoned(footing.places.run_root, state_dir)) is not None:
                catalog.set_meta(_INSTANCE, instance)
            catalog.set_meta(_WAY, _way(store, in_folder=footing.in_folder))
            report = rebuild.rebuild(repository.records(), catalog, repository.contains)
            rebuild.count_changes(catalog, repository)
            catalog.flush()
        finally:
            repository.close()
            catalog.close()
        hit("engine.rebuild.filled")
        aside = f"catalog.damaged-{time.strftime('%Y%m%d-%H%M%S')}.db"
        sqlite.set_aside(state_dir / state_files.CATALOG, state_dir / aside)
        progress(f"the old catalog, if there was one, is now {aside}")
        hit("engine.rebuild.aside")
        sqlite.set_aside(made, state_dir / state_files.CATALOG)
        sync_dir(state_dir)
        store.sweep(set)
        return report
    finally:
        filesystem.release(store)


def migrate_catalog(
    state_dir: Path, source: str | None, target: str, progress: Callable[[str], object]
) -> list[migration.CopiedTable]:
    """See `catalog.migration.migrate`. `source`: None is the catalog of the state directory. Conflict: a daemon serves
    the state directory that a file is in."""

    @contextlib.contextmanager
    def alone(path: Path) -> Iterator[None]:
        lock = StateLock(path.parent) if lock_path_of(path.parent).exists() else None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    return migration.migrate(source or str(state_dir / state_files.CATALOG), target, progress, alone)


def _packs_to_rebuild_from(state_dir: Path, url: str) -> Store:
    """Open the store with the packs. DataLoss: it has none, although the catalog or the index says that there were some; an
    empty catalog would take the place of the old one."""
    local, index = url == _local_url(state_dir), state_dir / "repo" / "index.db"
    if local and not state_files.has_packs(state_dir):
        # Before the store is opened, which makes the folder where its disk is to be mounted.
        if _has_stored(state_dir / state_files.CATALOG):
            raise state_files.packs_missing(state_dir / "repo" / "store" / "packs")
        if _has_packs(index):
            raise state_files.nothing_to_rebuild_from(url, index)
    store = open_store(url)
    if not local and next(iter(store.keys(PREFIX)), None) is None and _has_packs(index):
        raise state_files.nothing_to_rebuild_from(url, index)
    return store


def _has_stored(path: Path) -> bool:
    """True if a catalog that can be read has stored snapshots."""
    if path.exists():
        with contextlib.suppress(SnapshotdError), contextlib.closing(SqliteCatalog(path)) as catalog:
            return bool(catalog.snapshots.referenced_records())
    return False


def _has_packs(path: Path) -> bool:
    """True if an index that can be read has packs."""
    if path.exists():
        with contextlib.suppress(SnapshotdError), contextlib.closing(Index(path, write=False)) as index:
            return bool(index.packs())
    return False


def _find_store_url(config: Config) -> str:
    """Find the URL of the store: in the catalog if that can be read, else in the settings, else the default. UsageError: the
    packs are not there."""
    state_dir = Path(config.state_dir)
    path = state_dir / state_files.CATALOG
    if path.exists():
        with contextlib.suppress(SnapshotdError), contextlib.closing(SqliteCatalog(path)) as catalog:
            return _settle_store_url(config, catalog)
    if not config.store and (state_dir / "repo" / "index.db").exists() and not state_files.has_packs(state_dir):
        raise UsageError(
            f"the lost catalog of {state_dir} knew where the packs lie, which are not below it: set SNAPSHOTD_STORE to their place"
        )
    return config.store or _local_url(state_dir)


def _local_url(state_dir: Path) -> str:
    return (state_dir / "repo" / "store").as_uri()


def _settle_store_url(config: Config, catalog: Catalog) -> str:
    """Return the URL of the store that holds the packs. The first call for a state directory decides on it: another place would
    not have its packs. UsageError."""
    state_dir, wanted, known = Path(config.state_dir), config.store, catalog.get_meta(_STORE_URL)
    if known is None:
        known = wanted or _LOCAL
        catalog.set_meta(_STORE_URL, known)
    if wanted and wanted != known:
        raise state_files.other_store(state_dir, known, wanted, can_unset=known == _LOCAL, is_node=bool(config.fleet))
    return _local_url(state_dir) if known == _LOCAL else known  # the state directory may move


def _gateway_maker(digest_key: bytes, memory: Budget) -> GatewayMaker:
    def make(
        listener: socket, handler: GatewayHandler, upstreams: Mapping[str, Upstream], capture_tokens: bool
    ) -> Gateway:
        from snapshotd.gateway.server import GatewayServer  # an HTTP client that most daemons never need

        return GatewayServer(
            listener, handler, upstreams, budget=memory, digest_key=digest_key, capture_tokens=capture_tokens
        )

    return make


def _reply_messages(api: str, reply: RecordedReply) -> Sequence[Message]:
    from snapshotd.gateway.routes import read_recorded  # most daemons never need it

    return read_recorded(api, reply)


def _way(store: LayerStore, *, in_folder: bool) -> str:
    if in_folder:
        return "folder" if store.marks == BY_USER else "root"
    return "rootless" if store.host.is_rootless else "root"


def _check_way(catalog: Catalog, state_dir: Path, way: str) -> None:
    """Note at the first start which daemon keeps a state directory: the layers of one are unusable for another.
    UsageError."""
    known = catalog.get_meta(_WAY)
    if known is None:
        known = "root" if catalog.get_meta(_INSTANCE) is not None else way  # from before there was another way
        catalog.set_meta(_WAY, known)
    if known != way:
        same = "set SNAPSHOTD_MODE=folder to go on with it, or " if known == "folder" else ""
        raise UsageError(
            f"the state directory {state_dir} is that of {_WAYS[known]}, and its layers cannot be used by {_WAYS[way]}: {same}start with "
            "another directory, and take trajectories over with `snapshotd export` there and `snapshotd import` here"
        )


def _container_ids(mode: Mode, host: Abilities) -> IdMap | None:
    if mode is Mode.ROOTLESS:
        return container_ids(host.ids)
    return CONTAINER_IDS if mode is Mode.PIVOT else None


def _lazy_refusal(mode: Mode, host: Abilities) -> Unsupported | None:
    """The reason why no layer is served before it is written; None: it can be."""
    if mode is Mode.FOLDER:
        return Unsupported("a sandbox without isolation is a folder with all files")
    if not host.redirects:
        return Unsupported(
            "a live upper begins with a copy of all files, so a layer that is not there yet is of no use"
        )
    missing = "pyfuse3 is not installed" if importlib.util.find_spec("pyfuse3") is None else useful.fuse()
    return None if missing is None else Unsupported(missing)
