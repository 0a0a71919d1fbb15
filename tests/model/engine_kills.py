"""The walk's kills: the daemon at random moments and at failpoints, its children, its FUSE process, the power; and each
start after."""
# ruff: noqa: PT017 - errors are expected or not depending on what was killed

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from snapshotd.catalog.file import open_database
from snapshotd.client.autostart import start_daemon
from snapshotd.client.verbs.base import Wait
from snapshotd.daemon.lock import lock_holder
from snapshotd.errors import Conflict, DaemonUnavailable, InternalError, SnapshotdError
from snapshotd.failpoints import NAMES
from tests.e2e.support import alive, wait_until
from tests.model.engine_looks import same
from tests.model.engine_oracle import Line, Taken, Tree, inside_view, parse_inside
from tests.model.engine_starter import Starter

if TYPE_CHECKING:
    from tests.model.engine_machine import Machine

BUDGETS = ("0", "0", "20000", "300000", "")
AS_A_CLIENT = 0.1
"""How many of the daemons are started as a client does it, which takes several times as long."""
START_S = 60.0
FAILPOINT_S = 10.0
SOON_S = 60.0
"""Work that has not ended by then is killed in its middle instead."""
_STORING = ("engine.archive.", "repo.pack.", "repo.index.", "layers.evict.")
_STEP = ("engine.step.", "engine.start.", "engine.cold.")


class Kills:
    """See the module's text."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._client, self._world = machine, machine.client, machine.world
        past = machine.past
        self._works: tuple[Callable[[], None], ...] = (
            self._crash_in_exec,
            self._crash_in_fork,
            past.crash_in_rewind,
            self._crash_in_prune,
            self._crash_in_flush,
            self.crash_in_remove,
            self._crash_in_repair,
            self._crash_in_create,
            past.crash_in_undo,
            past.crash_in_edit,
        )
        self._aimed: tuple[tuple[Callable[[], None], tuple[str, ...]], ...] = (
            (self._crash_in_exec, _STEP),
            (self._crash_in_exec, _STORING),
            (self._crash_in_fork, ("engine.fork.",)),
            (past.crash_in_rewind, _STEP),
            (past.crash_in_undo, _STEP),
            (past.crash_in_edit, ("engine.fork.", "engine.step.")),
            (self._crash_in_prune, ("engine.prune.", "repo.gc.", "layers.evict.")),
            (self.crash_in_remove, ("engine.remove.",)),
            (self._crash_in_create, ("engine.start.",)),
        )
        self._starter = Starter(machine.snap.state_dir, self._client.socket_path, machine.snap.env)
        self.left_rubbish = False
        """Somebody was killed, maybe between a pack and its entry in the index, and nothing was repaired since."""
        self._armed = False
        self._log_seen = 0

    # -- starting and ending -------------------------------------------------------------------------------------------

    def start(self, failpoint: str = "") -> bool:
        """Start a daemon. Whether it is ready; with `failpoint` it may have died of that."""
        m = self._machine
        env = {"SNAPSHOTD_LAYER_BUDGET": m.rng.choice(BUDGETS), "SNAPSHOTD_FAILPOINT": failpoint}
        m.note(f"daemon with {env}")
        if failpoint or m.rng.random() >= AS_A_CLIENT:
            ready = self._starter.start(START_S, **env)
            assert ready or failpoint, "the daemon died while starting; its log says why"
            return ready
        with mock.patch.dict(os.environ, {**m.snap.env, **env}, clear=True):
            start_daemon(m.snap.state_dir, self._client.socket_path)
        return True

    def pid(self) -> int:
        return self._client.version().pid

    def _kill(self, pid: int | None) -> None:
        """None: it died at a failpoint, and so will its children."""
        self.left_rubbish = True
        if pid is None:
            return
        children = [child for child in _children(pid) if b"snapshotd" in _command(child)]
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
        self._has_ended(pid)
        # inits go when the next daemon starts
        _poll(lambda: not any(alive(child) and not _is_init(child) for child in children), "its children died with it")

    def _has_ended(self, pid: int) -> None:
        _poll(lambda: not alive(pid), "the daemon ended")
        with contextlib.suppress(ChildProcessError):  # it is another's
            os.waitpid(pid, 0)

    def _after_crash(self) -> None:
        self.start()
        self._all_stopped()
        assert self._client.sandboxes() == []

    def _all_stopped(self) -> None:
        for line in self._world.lines.values():
            line.running, line.live_process, line.upper, line.loose_base = False, False, set(), False

    def restart(self) -> None:
        """The daemon is told to stop, and takes a last snapshot of every sandbox."""
        pid = self.pid()
        os.kill(pid, signal.SIGTERM)
        self._has_ended(pid)
        self._after_crash()
        for line in self._world.lines.values():
            self._machine.sync(line, {})
        self._machine.read_states()

    def crash(self) -> None:
        self._kill(self.pid())
        self._after_crash()
        self._machine.read_states()

    def power_cut(self) -> None:
        """As if the machine had gone down with everything on disk: only the repository counts, no layer is trusted."""
        m = self._machine
        if m.rng.random() < 0.8:
            m.flush_all()
        before = {item.id for item in self._world.snapshots.values() if item.state == "captured"}
        self._kill(self.pid())
        db = open_database(m.snap.state_dir / "catalog.db")  # each page it writes gets its checksum
        db.write("UPDATE meta SET value = 'another' WHERE key = 'boot_id'")
        db.close()
        self._after_crash()
        for info in self._client.all_snapshots():
            if info.state == "lost" and self._world.snapshots[info.id].state != "lost":
                assert info.id in before, "a stored snapshot was lost"
                self._world.snapshots[info.id].state = "lost"
        m.read_states()
        if m.readable():
            m.looks.check_restored(m.any_readable())

    # -- in the middle of something ------------------------------------------------------------------------------------

    def crash_during(self) -> None:
        """The daemon dies somewhere in the middle of something."""
        self._die_in(self._machine.rng.choice(self._works))

    def crash_at(self) -> None:
        """The daemon, or its child, dies at a failpoint: while it starts, or in the middle of something."""
        if not self._machine.usable_lines():
            return
        work, prefixes = self._machine.rng.choice(self._aimed)
        name = self._machine.rng.choice([name for name in NAMES if name.startswith(prefixes)])
        self._kill(self.pid())
        self._all_stopped()
        self._armed = self.start(f"{name}:{self._machine.rng.choice((1, 1, 1, 1, 2))}")
        if not self._armed:
            work = self._after_crash
        try:
            self._die_in(work)
        finally:
            self._armed = False
        self.read_log()

    def _die_in(self, work: Callable[[], None]) -> None:
        self._machine.note(work.__name__)
        work()
        for line in self._world.lines.values():
            self._machine.sync(line, {})
        self._machine.read_states()
        self._machine.verify(read_data=False)

    def read_log(self) -> None:
        """Count what only the daemon's log tells: who died at which failpoint, and that layers were evicted."""
        with (self._machine.snap.state_dir / "daemon.log").open(errors="replace") as log:
            log.seek(self._log_seen)
            for line in log:
                if line.startswith("failpoint "):
                    self._machine.note(line.rstrip())
                    self._machine.counts[line.split()[1]] += 1
                elif '"evicted layers of' in line:
                    self._machine.counts["evictions"] += 1
            self._log_seen = log.tell()

    def dying(self, work: Callable[[], object], within_s: float) -> tuple[object, SnapshotdError | None]:
        """Do something while the daemon dies. Whether it was done is for the caller to find out."""
        pid = lock_holder(self._machine.snap.state_dir)
        result: list[object] = []
        failures: list[SnapshotdError] = []

        def run() -> None:
            try:
                result.append(work())
            except SnapshotdError as exc:
                failures.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(FAILPOINT_S if self._armed else self._machine.rng.random() * within_s)
        self._kill(pid)
        thread.join(SOON_S)
        assert not thread.is_alive(), "the client hangs"
        self._after_crash()
        failure = failures[0] if failures else None
        # A child dies with the daemon, or a moment earlier.
        assert failure is None or isinstance(failure, DaemonUnavailable | InternalError), failure
        return (result[0] if result else None), failure

    def _crash_in_exec(self) -> None:
        m = self._machine
        line = m.line()
        script = m.script(line)
        wait: Wait = "stored" if self._armed else m.rng.choice(("captured", "stored"))
        m.note(f"in {line.id[:12]}, wait until {wait}: {script.text!r}")
        _, failure = self.dying(
            lambda: self._client.exec(line.id, ["sh", "-c", script.text], cwd="/workspace", wait=wait), 0.12
        )
        taken = m.sync(line, {"exec": script.tree})
        assert taken or failure, "an answered step is not there"
        line.upper = set()

    def _crash_in_fork(self) -> None:
        m = self._machine
        if m.is_full():
            return self.crash_in_remove()
        source = m.any_readable()
        forked, failure = self.dying(lambda: self._client.fork(source.id, 2), 0.3)
        found = [t for t in self._client.trajectories() if t.id not in self._world.lines]
        assert len(found) in (0, 2), "all or none"
        assert found or failure is not None, forked
        m.adopt_forks(source, found)
        for item in found:
            m.stop_line(self._world.lines[item.id])
        return None

    def _crash_in_create(self) -> None:
        if self._machine.is_full():
            return self.crash_in_remove()
        _, failure = self.dying(lambda: self._client.create(**self._machine.manner.options), 0.2)
        found = [t for t in self._client.trajectories() if t.id not in self._world.lines]
        assert len(found) <= 1
        assert found or failure
        for item in found:
            self._world.lines[item.id] = Line(item.id, item.head, None, Tree(), own=[item.head], running=False)
            info = self._client.snapshot(item.head)
            self._world.snapshots[info.id] = Taken(
                info.id, None, item.id, info.seq, Tree(), False, info.image, info.state
            )
        return None

    def _crash_in_prune(self) -> None:
        m = self._machine
        policy = m.policy()
        self.dying(lambda: self._client.prune(policy, grace_s=0), 0.5)
        m.pruned(policy, None, settled=False)
        if m.rng.random() < 0.5:
            m.verify(read_data=True)

    def _crash_in_flush(self) -> None:
        self.dying(self._client.flush, 0.3)

    def _crash_in_repair(self) -> None:
        self.dying(self._client.repair, 0.6)
        self._machine.repair()

    def crash_in_remove(self) -> None:
        m = self._machine
        line = m.removable()
        if line is None:
            return self._crash_in_flush()

        def work() -> None:
            try:
                self._client.remove(line.id, force=True)
            except Conflict as exc:
                assert "not stored yet" in exc.message, exc

        self.dying(work, 0.15)
        if line.id not in {t.id for t in self._client.trajectories()}:
            m.forget(line)
        return None

    # -- children ------------------------------------------------------------------------------------------------------

    def kill_child(self) -> None:
        """A child of the daemon dies, now or in the middle of something."""
        m = self._machine
        role = m.rng.choice(("archive", "archive", "cold", "lazy", "worker"))
        self.left_rubbish = True
        pid = self.pid()
        m.note(f"kill {role}")
        if role == "lazy":
            return self._kill_lazy(pid)
        work = m.rng.choice((None, m.flush_all, m.looks.restored, m.check, m.prune, m.fork))
        killer = threading.Timer(m.rng.random() * 0.1, lambda: _kill_children(pid, role))
        killer.start()
        try:
            if work is not None:
                work()
        finally:
            killer.join()
        assert self.pid() == pid, "the daemon died with its child"
        return None

    def _kill_lazy(self, pid: int) -> None:
        """What stands on its mount reads right bytes or an error, soon; and every sandbox can be started anew."""
        m = self._machine
        killed = _kill_children(pid, "lazy")
        for line in [line for line in self._world.lines.values() if line.running]:
            began = time.monotonic()
            try:
                code, printed = m.looks.look(self._client.exec, line.id)
            except SnapshotdError as exc:
                assert killed, exc
            else:
                m.sync(line, {"exec": line.tree})
                assert killed or code == 0, printed
                if code == 0:
                    same(parse_inside(printed), inside_view(line.tree.listing()), f"inside {line.id}")
            assert time.monotonic() - began < SOON_S, "who was not told would wait for ever"
            m.stop_line(line)


_CHILD_WORDS = {"worker": b"snapshotd.engine.storage.worker", "archive": b"archive", "cold": b"cold", "lazy": b"lazy"}


def _children(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1]) == pid and alive(int(name)):
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_init(pid: int) -> bool:
    """Whether it is a sandbox's init. Until its execve it has the starter's command line."""
    return _command(pid).startswith(b"/run/snapshotd/share/init")


def _kill_children(pid: int, role: str) -> bool:
    killed = False
    for child in _children(pid):
        if _CHILD_WORDS[role] in _command(child).split(b"\0"):
            os.kill(child, signal.SIGKILL)
            killed = True
    return killed


def _poll(condition: Callable[[], bool], what: str) -> None:
    """As `wait_until`, but finely: this is waited for thousands of times."""
    wait_until(condition, what, pause_s=0.003)
