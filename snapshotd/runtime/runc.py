"""The `runc` driver: containers without any engine. Needs root, its own or a user namespace's, runc 1.1 or newer, and
for outbound network slirp4netns.

runc makes the first container of each kind (limits and network). With user namespaces, the starter makes the others like
it, in a third of the processor's time, and what it cannot make runc does.

Files in the driver's run directory (all of it may be deleted when nothing runs):
    root/               the stub root that every container starts on, read-only
    state/<id>/         runc's own state
    bundles/<id>/       config.json and log of one container; short-lived files of each command
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from snapshotd.egress.resolver import RESOLV_CONF, write_resolver
from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.kernel import rootless
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.members import BY_CGROUP, Grouping
from snapshotd.kernel.namespaces import set_hostname
from snapshotd.kernel.processes import runs, wait_readable
from snapshotd.runtime import _oci, _slirp, failure
from snapshotd.runtime._checks import check_share_dir, find_container
from snapshotd.runtime._exec import ContainerCommands, RuncContainer
from snapshotd.runtime._pattern import Pattern, learn
from snapshotd.runtime._process import CHILDREN, become_subreaper, reap, run_bounded, wait_for_execve
from snapshotd.runtime._teardown import end_all, remove_files
from snapshotd.runtime.base import Container, ContainerSpec, ExecSpec, Process, Runtime
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.starter import Starter
from snapshotd.types import ContainerID, IdMap, Network, short

_log = logging.getLogger(__name__)
_START_DEADLINE_S = 60.0
_NO_KEYRING = "--no-new-keyring"
"""Sandboxes cannot use keyrings, and all of them together may have 200 (kernel.keys.maxkeys, by user): hundreds would
not start."""
_OWNERS = 1 << 20
"""Users of the host that user namespaces may belong to."""
_PATTERNS_MAX = 16
"""Each has some 100 KiB."""
_STRIPES = 64
"""Locks that make the removals of one container follow one another; removals of different containers run side by
side."""


class RuncRuntime(Runtime):
    """Containers through runc. See the module's text.

    `run_dir` must be searchable by everyone on the whole way (0711), because container root may be an unprivileged host
    id. With `id_map`, containers get a user namespace with that map.
    """

    name = "runc"

    def __init__(
        self,
        instance: str,
        run_dir: Path,
        id_map: IdMap | None,
        keeper: KeeperClient,
        starter: Starter,
        *,
        cgroup_parent: str = "",
        grouping: Grouping = BY_CGROUP,
    ) -> None:
        """Nothing is touched before the first container. `grouping`: without a cgroup of its own a
        container has no limits, and ends with its init. `keeper`: the parent of commands that are to outlive the
        daemon; `starter`: makes containers and starts the other commands where it can, and makes user namespaces;
        `cgroup_parent`: the path of the cgroup in which to make cgroups, "" for the root."""
        self._run_dir = run_dir
        self._id_map = id_map
        self._starter = starter
        self._commands = ContainerCommands(keeper, starter)
        self._cgroup = f"{cgroup_parent}/snapshotd-{instance}"
        self.grouping = grouping
        self._lock = threading.Lock()
        self._creating = 0
        self._patterns: OrderedDict[ContainerSpec, Pattern] = OrderedDict()
        self._init_fds: dict[ContainerID, int] = {}
        self._destroying = [threading.Lock() for _ in range(_STRIPES)]

    # -- the contract --------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        return None if shutil.which("runc") else "runc is not installed: `snapshotd setup` installs it"

    def create(self, spec: ContainerSpec) -> Container:
        kind = replace(spec, id=ContainerID(""), run_dir=spec.run_dir.parent, image_name="")
        pattern = self._patterns.get(kind) if spec.run_dir.name == spec.id else None
        reason = self.unavailable() if pattern is None else None
        if reason is not None:
            raise Unsupported(reason)
        if spec.network == Network.BRIDGE:
            _slirp.require()
        if self._bundle(spec.id).exists():
            raise SandboxFailed(f"container {short(spec.id)} exists already")
        become_subreaper()
        with self._lock:
            self._creating += 1
        try:
            try:
                return self._start(spec, kind, pattern)
            finally:
                with self._lock:
                    self._creating -= 1
        except BaseException as exc:
            self.destroy(spec.id)
            if isinstance(exc, OSError):
                raise SandboxFailed(f"container {short(spec.id)} could not be started: {exc}") from exc
            raise

    def exec(self, container: Container, spec: ExecSpec, *, keep: str | None = None) -> Process:
        return self._commands.start(
            container, self._runc_container(container.id), self._bundle(container.id), spec, keep
        )

    def prepare(self, container: Container) -> None:
        self._commands.prepare(container, self._runc_container(container.id))

    def attach(self, container_id: ContainerID) -> Container | None:
        pid, _ = init = self._init(container_id)
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            return None
        lives = runs(init)
        with self._lock:
            known = self._init_fds.setdefault(container_id, pidfd) if lives else None
        if known != pidfd:
            os.close(pidfd)  # made by this daemon, or attached before; or another process's
        return find_container(container_id, pid) if lives else None

    def rename(self, container: Container, hostname: str) -> None:
        set_hostname(container.pid, hostname)

    def destroy(self, container_id: ContainerID) -> None:
        with self._destroying[hash(container_id) % len(self._destroying)]:
            group, bundle = self._group(container_id), self._bundle(container_id)
            if not self.grouping.limits:
                self.attach(container_id)  # an earlier daemon's, which ends with its init
            with self._lock:
                init = self._init_fds.get(container_id)
            end_all(container_id, [group] if self.grouping.limits else [], init)
            with self._lock:
                init = self._init_fds.pop(container_id, None)
            if init is not None:
                reap(init, 0)
                os.close(init)
            _slirp.stop(bundle, self._init(container_id)[0])
            group.remove()
            # `runc delete` would do no more, in 10 ms: a container without processes and cgroups is a directory of state.
            remove_files(self._state_dir / container_id)
            remove_files(bundle)
            self._starter.forget(container_id)
        with self._lock:
            if self._creating == 0:
                cgroup.at(self._cgroup).remove_if_empty()

    def close(self) -> None:
        self._starter.close()

    def list(self) -> list[ContainerID]:
        names = cgroup.at(self._cgroup).children()
        for directory in (self._state_dir, self._run_dir / "bundles"):
            if directory.is_dir():
                names.update(os.listdir(directory))
        return [ContainerID(name) for name in sorted(names)]

    # -- pieces --------------------------------------------------------------------------------------------------------

    @property
    def _state_dir(self) -> Path:
        return self._run_dir / "state"

    def _bundle(self, container_id: ContainerID) -> Path:
        return self._run_dir / "bundles" / container_id

    def _group(self, container_id: ContainerID) -> cgroup.Cgroup:
        return cgroup.at(f"{self._cgroup}/{container_id}")

    def _runc_container(self, container_id: ContainerID) -> RuncContainer:
        return RuncContainer("runc", self._state_dir, container_id, rootless=not self.grouping.limits)

    def _init(self, container_id: ContainerID) -> tuple[int, int]:
        """A container's init and its start time, which tells it from another process that has got its number since; in runc's
        record. Zeros: there is none, or none that can be read."""
        try:
            record = json.loads((self._state_dir / container_id / "state.json").read_text())
            return int(record["init_process_pid"]), int(record["init_process_start"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0, 0

    def _start(self, spec: ContainerSpec, kind: ContainerSpec, pattern: Pattern | None) -> Container:
        root = self._run_dir / "root"
        if pattern is None or not root.is_dir():
            self._make_directories(root)
        check_share_dir(spec)
        bundle = self._bundle(spec.id)
        bundle.mkdir(mode=0o700)
        if spec.network != Network.NONE:
            write_resolver(spec.run_dir, spec.network, _slirp.NAMESERVER)
        pid = None if pattern is None else self._make_like(pattern, spec, root)
        if pattern is not None and pid is None:
            with self._lock:
                self._patterns.pop(kind, None)  # the machine may have changed, its processors for instance
        by_runc = pid is None
        if pid is None:
            pid = self._run(spec, root)
        if spec.network == Network.BRIDGE:
            _slirp.start(bundle, pid, user_namespace=self._id_map is not None)
        made = Container(spec.id, pid, self._id_map)
        if by_runc and spec.run_dir.name == spec.id and self._id_map is not None:
            self._learn(kind, made)
        return made

    def _run(self, spec: ContainerSpec, root: Path) -> int:
        """Have runc make a container. Its init."""
        bundle = self._bundle(spec.id)
        log = bundle / "run.log"
        argv = self._runc_container(spec.id).command(
            log, "run", "--detach", _NO_KEYRING, "--bundle", str(bundle), spec.id
        )
        with CHILDREN.starting(), self._user_namespace(spec.id) as user_namespace:
            group = self._group(spec.id).path if self.grouping.limits else None
            placement = _oci.Placement(root, group, cgroup.swap_is_counted(), user_namespace)
            (bundle / "config.json").write_text(json.dumps(_oci.bundle(spec, self._id_map, placement)))
            code = run_bounded(argv, _START_DEADLINE_S)
            if code == 0:
                pid, _ = self._init(spec.id)
                pidfd = self._note_init(spec.id, pid)
        if code != 0:
            CHILDREN.sweep()
        if code is None:
            raise SandboxFailed(
                f"container {short(spec.id)} did not start within {_START_DEADLINE_S:.0f} s; is the machine overloaded?"
            )
        if code != 0:
            reason = failure.log_reason(log) or f"runc ended with code {code} and no reason"
            raise SandboxFailed(f"container {short(spec.id)} could not be started: {reason}")
        if not wait_for_execve(pid, _START_DEADLINE_S) or wait_readable(pidfd, 0):
            raise SandboxFailed(
                f"container {short(spec.id)} could not be started: {spec.share_dir / 'init'} does not run; it must be a static program"
            )
        return pid

    def _make_like(self, pattern: Pattern, spec: ContainerSpec, root: Path) -> int | None:
        """Have the starter make a container like one that runc made. Its init; None: it cannot, and nothing is left."""
        assert self._id_map is not None
        group = self._group(spec.id)
        config = _oci.bundle(spec, self._id_map, _oci.Placement(root, group.path, swap_is_counted=False))
        order = pattern.order(config, self._owner(spec.id))
        with CHILDREN.starting():
            pid = self._starter.make(spec.id, order, group, pattern.settings, self._id_map)
            if pid is not None:
                self._note_init(spec.id, pid)
        if pid is None:
            end_all(spec.id, [group], None)
            group.remove()
            return None
        state = self._state_dir / spec.id
        state.mkdir(mode=0o711)
        (state / "state.json").write_text(pattern.record_of(spec.id, pid))
        return pid

    def _note_init(self, container_id: ContainerID, pid: int) -> int:
        """Hold an init by a pidfd, which is returned, until the container is destroyed."""
        pidfd = os.pidfd_open(pid)
        with self._lock:
            self._init_fds[container_id] = pidfd
        return pidfd

    def _learn(self, kind: ContainerSpec, container: Container) -> None:
        """Remember a container that runc has made as the pattern of its kind, if it can be one."""
        pattern = None
        try:
            resident = self._starter.enter(container, container.id)
            if resident is not None:
                state = self._state_dir / container.id / "state.json"
                pattern = learn(container.id, self._group(container.id).settings(), state, resident.filters)
        except (OSError, SandboxFailed):
            _log.info("container %s is no pattern for others", short(container.id), exc_info=True)
        if pattern is not None:
            with self._lock:
                self._patterns[kind] = pattern
                while len(self._patterns) > _PATTERNS_MAX:
                    self._patterns.popitem(last=False)

    def _owner(self, container_id: ContainerID) -> int:
        assert self._id_map is not None
        if rootless.in_own_namespace():
            return os.geteuid()  # there is no other
        return self._id_map.base + self._id_map.count + zlib.crc32(container_id.encode()) % _OWNERS

    @contextmanager
    def _user_namespace(self, container_id: ContainerID) -> Iterator[str | None]:
        """The path of a new one, for as long as it takes to start the container in it. Each belongs to a user of its
        own, beyond the ids of the map, because the kernel counts some resources by user: one container cannot use up
        root's or another container's."""
        if self._id_map is None:
            yield None
            return
        with closing_fd(self._starter.user_namespace(container_id, self._id_map, self._owner(container_id))) as fd:
            yield f"/proc/{os.getpid()}/fd/{fd}"

    def _make_directories(self, root: Path) -> None:
        """The run directory with the stub root in it. Modes are set explicitly: the daemon's umask may be anything."""
        if not self._run_dir.exists():
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._run_dir.chmod(0o711)
        for directory in (self._state_dir, self._run_dir / "bundles"):
            directory.mkdir(mode=0o700, exist_ok=True)
        root.mkdir(exist_ok=True)
        for name in _oci.STUB_DIRS:
            (root / name).mkdir(parents=True, exist_ok=True)
            for part in (root, root / name.split("/")[0], root / name):
                part.chmod(0o755)
        resolv_conf = root / "etc" / RESOLV_CONF
        resolv_conf.touch()
        resolv_conf.chmod(0o644)
