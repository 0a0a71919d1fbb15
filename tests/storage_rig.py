"""A daemon that tests kill, cut off and starve, and what its snapshots must hold. Driven through the client."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec
from unittest.mock import patch

from snapshotd.api.wire import log_path_of, socket_path_of
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.client.autostart import daemon_argv
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ExecInfo, Policy, SnapshotInfo
from snapshotd.errors import OutOfSpace, error_of
from snapshotd.failpoints import EXIT_CODE
from snapshotd.kernel import syscalls
from snapshotd.kernel.holding import cgroup
from snapshotd.layers import ballast
from snapshotd.layers.store import READY_LAYERS
from snapshotd.types import NO_ISOLATION, TrajectoryStatus
from tests import forked, way

START_S = 60.0
P = ParamSpec("P")
Content = dict[str, tuple[int, str]]
"""What is below /workspace: path to (mode, digest of the content; for a symbolic link its target)."""

_STATE_NAMES = {
    "layers",
    "layers.img",
    "layers.state",
    "abilities.json",
    "layers.as-1700000000",
    "repo",
    "commands",
    "runs",
    "lock",
    "reserve",
    "snapshotd.sock",
    "daemon.log",
    "secrets.key",
    "secrets.db",
    "secrets.db-wal",
    "secrets.db-shm",
    "find.db",
    "find.db-wal",
    "find.db-shm",
    *(["namespace"] if way.WAY else []),
}
_REPO_NAMES = {
    "key",
    "blobs",
    "tmp",
    "store",
    "index.db",
    "index.db-wal",
    "index.db-shm",
    "index.db.lock",
    "index.db.reserve",
}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Poll until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Daemon:
    """The daemon of one state directory: started with the environment a test wants, ended as it wants."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        with patch.dict(os.environ, SNAPSHOTD_RECONNECT_S="0"):  # a request is made once, to one daemon
            self.client = Snapshotd(state_dir, autostart=False)
        self.process: forked.Process | subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        """What a test had it started with the last time."""
        self.repaired = False
        """Packs of this state directory were damaged and repaired once: what was moved aside then stays."""
        self._log_start = 0

    def start(self, **env: str) -> Snapshotd:
        """Start it and return the client when it answers. Raises the error that it died of."""
        assert self.process is None
        self.env = env
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_path = log_path_of(self.state_dir)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        ready_r, ready_w = os.pipe()
        argv = daemon_argv(self.state_dir, socket_path_of(self.state_dir), ready_w)
        with open(log_path, "ab") as log:
            whole = {**os.environ, "DOCKER_HOST": "unix:///nowhere", **env}
            if forked.can_be_forked(whole):
                fds = {1: log.fileno(), 2: log.fileno(), ready_w: ready_w}
                self.process = forked.start(
                    argv[argv.index("snapshotd") + 1 :], fds, env=whole, cwd="/", new_session=True
                )
            else:
                self.process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(ready_w,),
                    start_new_session=True,
                    cwd="/",
                    env=whole,
                )
        os.close(ready_w)
        try:
            assert select.select([ready_r], [], [], START_S)[0], f"the daemon is not ready after {START_S} s"
            line = os.read(ready_r, 65536)
        finally:
            os.close(ready_r)
        news = json.loads(line) if line else {}
        if "ready" in news:
            return self.client
        self.process.wait(START_S)
        self.process = None
        if "error" in news:
            raise error_of(news)
        raise AssertionError(f"the daemon died while starting: {self.log()[-3000:]}")

    def log(self) -> str:
        """What it logged since its last start."""
        with open(log_path_of(self.state_dir), "rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Have a failure of the block tell what the daemon logged."""
        try:
            yield
        except BaseException as exc:
            exc.add_note(f"the daemon's log ends with:\n{self._last_words()}")
            raise

    def _last_words(self) -> str:
        try:
            return self.log()[-6000:]
        except OSError as exc:
            return str(exc)  # its disk is gone

    def reached(self, name: str) -> int:
        """How often a process died at the failpoint since the last start."""
        return self.log().count(f"failpoint {name} reached by process ")

    def children(self, role: str = "") -> list[int]:
        """Its own child processes (not those in sandboxes); with `role` (archive, cold, lazy, worker), those of that
        role."""
        assert self.process is not None
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            ours = b"snapshotd.daemon.children" in words or b"snapshotd.engine.storage.worker" in words
            if (
                parent == self.process.pid
                and ours
                and (not role or role.encode() in words or f"snapshotd.engine.{role}".encode() in words)
            ):
                found.append(int(name))
        return found

    def kill(self) -> None:
        """SIGKILL, and wait until it and its children are gone (they die with it)."""
        assert self.process is not None
        children = self.children()
        self.process.kill()
        self.process.wait(START_S)
        self.process = None
        wait_until(lambda: not any(_lives(pid) for pid in children), "the daemon's children are gone")

    def died(self) -> bool:
        """Whether it has ended by itself at a failpoint; then it may be started again."""
        if self.process is None:
            return True
        if self.process.poll() is None:
            return False
        assert self.process.returncode == EXIT_CODE, (self.process.returncode, self.log()[-3000:])
        self.process = None
        return True

    def stop(self) -> None:
        """An orderly end. Not an error when it is not running."""
        if self.process is not None:
            self.process.terminate()
            code = self.process.wait(120)
            self.process = None
            assert code == 0, (code, self.log()[-3000:])

    def end(self) -> None:
        """Whatever state it is in: afterwards it does not run, and has no containers any more."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None
            self.start()
            self.stop()

    @property
    def root(self) -> Path:
        """The state directory as the daemon sees it: the layers may be on an image that only it has mounted."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/root{self.state_dir}")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Line:
    """One trajectory and what its sandbox has below /workspace now."""

    id: str
    content: Content = field(default_factory=dict)


class World:
    """Takes steps with known outcomes and remembers what every snapshot must hold."""

    def __init__(self, client: Snapshotd, scratch: Path, seed: int = 0, runtime: str = "runc") -> None:
        self.client, self._scratch, self._rng, self.runtime = client, scratch, random.Random(seed), runtime
        scratch.mkdir(parents=True, exist_ok=True)
        self.expected: dict[str, Content] = {}
        """Snapshots that were reported captured."""
        self.stored: set[str] = set()
        """Those that were reported stored."""
        self.pruned: set[str] = set()
        self.disk_may_be_full = False
        """Commands may fail half way; what their snapshots hold is then noted when they are first seen."""
        self.importing: dict[str, Content] = {}
        """What the snapshots of a bundle hold, which may be taken in or not."""
        self._begun: list[tuple[str, Content]] = []
        """Steps (trajectory, what it would have) that no answer was got for: after a crash they are there, or not."""
        self._number = 0

    def create(self, image: str = "small") -> Line:
        root = {} if self.runtime == NO_ISOLATION else {"image": image}
        made, first = self.client.create(**root, runtime=self.runtime)
        line = Line(made.id)
        self.expected[first.id] = {}
        return line

    def step(self, line: Line, *, wait: bool = False, live: bool = False) -> ExecInfo:
        """One random change of a few files; with `live`, a process stays behind, so that the copy path is taken."""
        script, after = self._change(line.content)
        return self._do(line, f"set -e; {script}" + ("; sleep 1000 >/dev/null 2>&1 &" if live else ""), after, wait)

    def fill(self, line: Line, *, small: bool = False) -> ExecInfo:
        """Put some 900 KB, unlike all before, in place of everything; with `small`, a few bytes."""
        self._number += 1
        first, count = self._number * 100_000_000, 1 if small else 100_000
        data = "".join(f"{n}\n" for n in range(first, first + count)).encode()
        after = {"all": (stat.S_IFREG | 0o640, _digest(data))}
        return self._do(line, f"rm -rf * && seq {first} {first + count - 1} > all && chmod 0640 all", after, False)

    def patch(self, line: Line, part: int) -> ExecInfo:
        """A file of several MB of which only a few bytes are others than the last time."""
        first, count = 7_000_000, 800_000
        text = bytearray("".join(f"{n}\n" for n in range(first, first + count)).encode())
        offset = 8 * 200_000 * part
        text[offset : offset + 5] = b"patch"
        after = {"large": (stat.S_IFREG | 0o640, _digest(bytes(text)))}
        write = f"printf patch | dd of=large bs=1 seek={offset} conv=notrunc 2>/dev/null"
        script = f"rm -rf *; seq {first} {first + count - 1} > large; {write}; chmod 640 large"
        return self._do(line, script, after, False)

    def many(self, line: Line) -> ExecInfo:
        """Put 500 files of 72 KB in place of everything: so much that the archive has processes that help it."""
        self._number += 1
        first = self._number * 10_000_000
        after = {}
        for start in range(first, first + 500 * 9000, 9000):
            data = "".join(f"{n}\n" for n in range(start, start + 9000)).encode()
            after[f"m{start}"] = (stat.S_IFREG | 0o640, _digest(data))
        script = f"umask 027; rm -rf *; for n in $(seq {first} 9000 {first + 500 * 9000 - 1}); do seq $n $((n + 8999)) > m$n; done"
        return self._do(line, script, after, False)

    def _do(self, line: Line, script: str, after: Content, wait: bool) -> ExecInfo:
        begun = (line.id, after)
        self._begun.append(begun)
        done = self.client.exec(line.id, ["sh", "-c", script])
        assert done.snapshot is not None
        self._begun.remove(begun)
        if done.exit_code != 0 and self.disk_may_be_full:
            raise OutOfSpace("the command met the full disk by itself")
        assert done.exit_code == 0, script
        line.content = after
        self.expected[done.snapshot.id] = after
        if wait:
            self.client.flush(line.id)
            assert self.client.snapshot(done.snapshot.id).state == "stored"
            self.stored.add(done.snapshot.id)
        return done

    def _change(self, before: Content) -> tuple[str, Content]:
        after, parts = dict(before), []
        self._number += 1
        for place in range(self._rng.randrange(1, 4)):
            kind = self._rng.random()
            files = sorted(path for path, (mode, _) in after.items() if stat.S_ISREG(mode))
            name = f"f{self._rng.randrange(12)}"
            if kind < 0.55 or not files:
                first, count = self._number * 1000 + place, self._rng.choice((1, 40, 3000, 40_000))
                data = "".join(f"{n}\n" for n in range(first, first + count)).encode()
                parts.append(f"rm -rf {name}; seq {first} {first + count - 1} > {name}; chmod 0640 {name}")
                after[name] = (stat.S_IFREG | 0o640, _digest(data))
            elif kind < 0.7:
                gone = self._rng.choice(files)
                parts.append(f"rm {gone}")
                del after[gone]
            elif kind < 0.85:
                old, new = self._rng.choice(files), f"moved{self._number}-{place}"
                parts.append(f"mv {old} {new}")
                after[new] = after.pop(old)
            else:
                link = f"link{self._number}-{place}"
                parts.append(f"ln -s {name} {link}")
                after[link] = (stat.S_IFLNK | 0o777, name)
        return "; ".join(parts), after

    def settle(self) -> None:
        """After a crash. What was reported is there, as durable as was said; what was not reported is there as a whole
        or not at all."""
        found = {s.id: s for s in self.client.all_snapshots()}
        assert self.expected.keys() <= found.keys(), "snapshots that were reported are gone"
        for one in found.values():
            if one.id not in self.expected:
                self.expected[one.id] = self._outcome(one)
        assert all(found[s].state == "stored" for s in self.stored), "snapshots that were stored are not any more"
        for s in self.pruned:
            assert found[s].state == "pruned"
        self._begun.clear()

    def _outcome(self, one: SnapshotInfo) -> Content:
        """What a snapshot that nobody was told of must hold."""
        if one.id in self.importing:
            assert self.actual(one.id) == self.importing[one.id], f"snapshot {one.id} was imported with other files"
            return self.importing[one.id]
        if self.disk_may_be_full:
            return {} if one.state == "pruned" else self.actual(one.id)
        if one.tool.name != "exec":
            assert one.tool.name in ("start", "stop", "rewind"), one.tool.name
            return {} if one.parent is None else self.expected[one.parent]
        possible = [after for line, after in self._begun if line == one.trajectory]
        actual = self.actual(one.id)
        assert actual in possible, f"snapshot {one.id} is neither of the steps that were begun"
        return actual

    def verify_outcome(self, one: SnapshotInfo) -> None:
        """It holds what it must, whether it was reported or only begun."""
        if one.id in self.expected:
            self.verify(one.id)
        else:
            self.expected[one.id] = self._outcome(one)

    def begun_is_over(self) -> None:
        """Steps that no answer was got for are there now, or never will be."""
        self._begun.clear()

    def note_stored(self) -> None:
        """Remember what the daemon says of how durable each snapshot is."""
        for one in self.client.all_snapshots():
            if one.state == "stored":
                self.stored.add(one.id)
            elif one.state == "pruned":
                self.stored.discard(one.id)
                self.pruned.add(one.id)

    def actual(self, snapshot: str) -> Content:
        """What the snapshot has below /workspace."""
        target = self._scratch / "restored"
        shutil.rmtree(target, ignore_errors=True)
        self.client.restore(snapshot, target, path="/workspace")
        found = content_of(target)
        shutil.rmtree(target)
        return found

    def verify(self, snapshot: str) -> None:
        """The snapshot's workspace is exactly what it must be."""
        assert self.actual(snapshot) == self.expected[snapshot], (
            f"snapshot {snapshot} has other files than it was taken with"
        )

    def verify_all(self) -> None:
        """All that have files."""
        for snapshot in self.expected.keys() - self.pruned:
            self.verify(snapshot)

    def forget(self, line: Line) -> None:
        """Remove a trajectory."""
        own = {s.id for s in self.client.log(line.id)}
        self.client.remove(line.id, force=True)
        self.forget_snapshots(own)

    def forget_snapshots(self, own: set[str]) -> None:
        """They were removed."""
        self.expected = {s: content for s, content in self.expected.items() if s not in own}
        self.stored -= own
        self.pruned -= own

    def prune_to(self, keep_last: int) -> None:
        """Which snapshots may go is settled before anything does, so a prune that is cut off gives up all of them or
        none. Nothing waits to be stored then: it would keep what it is built on, and let that go once it is stored."""
        self.client.flush()
        plan = self.client.prune(Policy(keep_last=keep_last), dry_run=True, grace_s=0)
        may_go = {p.snapshot for p in plan.pruned}
        self.stored -= may_go
        self.client.prune(Policy(keep_last=keep_last), grace_s=0)


def content_of(root: Path) -> Content:
    """The same for a folder of the host."""
    found: Content = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        found[str(path.relative_to(root))] = (
            mode,
            os.readlink(path) if stat.S_ISLNK(mode) else _digest(path.read_bytes()),
        )
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


# -- what must hold whenever a daemon is up again ----------------------------------------------------------------------


MERGED_HEADS_BYTES = 4096
"""A prune makes one pack of several small ones, and the next may make one of those: each time some heads of 39 bytes
go. More may go where a history has more packs than a hundred."""


def clean(daemon: Daemon, *, damaged: bool = False, merged: bool = False) -> None:
    """The repository is whole, nothing leaks, and everything in the state directory is accounted for. `damaged`: packs
    were damaged on purpose and repaired, so the damaged ones are still kept. `merged`: the daemon knows of layers that
    only it needs."""
    client = daemon.client
    daemon.repaired |= damaged
    client.flush()
    report = client.check(read_data=True)
    assert not report.damages, report
    assert not report.unreadable, report
    client.prune(Policy(), grace_s=0)
    packs = [path for path in (daemon.state_dir / "repo/store/packs").rglob("*") if path.is_file()]
    again = client.prune(Policy(), grace_s=0)
    assert again.freed_bytes < max(MERGED_HEADS_BYTES, 64 * len(packs)), (again, len(packs))
    assert not again.pruned, again
    found: list[str] = []

    def accounted() -> bool:
        found[:] = unaccounted(daemon, damaged=daemon.repaired, merged=merged)
        return not found

    with suppress(AssertionError):
        wait_until(accounted, "everything is accounted for")
    assert not found, found


def unaccounted(daemon: Daemon, *, damaged: bool, merged: bool) -> list[str]:
    """What lies in the state directory and belongs to nothing."""
    state, repo, store = daemon.state_dir, daemon.state_dir / "repo", daemon.state_dir / "repo/store"
    found = [
        f"{name} in {state}"
        for name in os.listdir(state)
        if not name.startswith("catalog.db") and name not in _STATE_NAMES
    ]
    kept = ("index.db.damaged",) if damaged else ()
    found += [f"repo/{name}" for name in os.listdir(repo) if name not in _REPO_NAMES and not name.startswith(kept)]
    found += [f"repo/tmp/{name}" for name in os.listdir(repo / "tmp")]
    found += [f"output {path.name} in the spool" for path in (repo / "blobs").rglob("*") if path.is_file()]
    places = {"@tmp", "packs", "damaged"} if damaged else {"@tmp", "packs"}
    found += [f"store/{name}" for name in os.listdir(store) if name not in places]
    found += [f"store/@tmp/{name}" for name in os.listdir(store / "@tmp")]
    packs = {path.name for path in (store / "packs").rglob("*") if path.is_file()}
    with sqlite3.connect(f"file:{repo}/index.db?mode=ro", uri=True) as db:
        indexed = {bytes(raw).hex() for (raw,) in db.execute("select id from packs")}
    db.close()
    found += [f"pack {name} is not in the index" for name in packs - indexed] + [
        f"pack {name} is missing" for name in indexed - packs
    ]
    return found + _layers(daemon, merged)


def _layers(daemon: Daemon, merged: bool) -> list[str]:
    """Layers that nothing needs (of those made ahead, which are empty, there may be some), and images that no row
    names."""
    catalog = SqliteCatalog(daemon.state_dir / "catalog.db")
    try:
        layers, images = set(catalog.snapshots.referenced_layers()), {image.id for image in catalog.images.list()}
        trajectories = {t.id for t in catalog.trajectories.list()}
        running = catalog.trajectories.list(TrajectoryStatus.RUNNING)
    finally:
        catalog.close()
    directory = daemon.root / "layers"
    names = set(os.listdir(directory)) - {"images", ballast.NAME, ballast.SPARE}
    found = [f"layers/images/{name}" for name in os.listdir(directory / "images") if name not in images]
    stray = sorted(name for name in names - layers if name.startswith(".") or _is_filled(directory / name / "upper"))
    live = sum(1 for one in running if way.WAY or one.spec.runtime == NO_ISOLATION)
    """Sandboxes whose files lie in one layer as long as they run, which is theirs alone."""
    if len(stray) > live:
        found += [f"layer {name} belongs to no snapshot" for name in stray if not merged or name.startswith(".")]
    empty = len(names - layers) - len(stray)
    if empty > READY_LAYERS + len(running):
        found.append(f"{empty} layers are empty, {len(running)} sandboxes run")
    for logs in (daemon.state_dir / "runs", daemon.state_dir / "commands"):
        names = set(os.listdir(logs)) if logs.exists() else set()
        found += [f"{logs.name}/{name}" for name in sorted(names) if name.split(".")[0] not in trajectories]
    return found


def _is_filled(upper: Path) -> bool:
    """Whether a layer has something; not if it was removed meanwhile."""
    try:
        return any(upper.iterdir())
    except FileNotFoundError:
        return False


def in_own_mount_namespace(test: Callable[P, None]) -> Callable[P, None]:
    """A test whose mounts nobody else sees: another daemon that starts meanwhile would get a copy of them and keep
    their device."""

    @functools.wraps(test)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        def body() -> None:
            syscalls.call("unshare", syscalls.CLONE_NEWNS | syscalls.CLONE_FS)
            syscalls.call("mount", "none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE, None)
            test(*args, **kwargs)

        with ThreadPoolExecutor(1) as thread:
            thread.submit(body).result()

    return wrapped


def another_boot(state_dir: Path) -> None:
    """Make the next daemon believe that the machine was started anew since the last one."""
    catalog = SqliteCatalog(state_dir / "catalog.db")
    try:
        catalog.set_meta("boot_id", "00000000-0000-0000-0000-000000000000")
    finally:
        catalog.close()


def kill_containers(instance: str) -> None:
    """What a loss of power does to sandboxes whose daemon was killed: SIGKILL to every process in their cgroups, until
    none is left."""

    def gone() -> bool:
        living = [pid for pid in _in_cgroups(instance) if _lives(pid)]
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    wait_until(gone, "the containers are gone")


def _in_cgroups(instance: str) -> Iterator[int]:
    for hierarchy in cgroup.hierarchies():
        for directory, _, _ in os.walk(f"{hierarchy}/snapshotd-{instance}"):
            try:
                yield from map(int, (Path(directory) / "cgroup.procs").read_text().split())
            except OSError:
                continue  # removed meanwhile
