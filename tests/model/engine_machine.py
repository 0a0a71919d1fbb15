"""A seeded random walk through the engine, over its socket, with kills, against the oracle of `engine_oracle`.

Each step draws from a generator of its own (seed and number of the step), so a seed replays the same choices as far as timing lets it.
"""
# ruff: noqa: PT017 - errors are expected or not depending on what was killed

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.client import Policy, Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Conflict, DaemonUnavailable, DataLoss, InternalError, NotFound, SnapshotdError
from tests.e2e.support import Snap, wait_until
from tests.model.engine_oracle import (
    INSIDE,
    NOTHING,
    Line,
    Listing,
    Mind,
    Script,
    Taken,
    Tree,
    World,
    changes,
    host_listing,
    inside_view,
    parse_inside,
)
from tests.model.engine_past import Past

BUDGETS = ("0", "0", "20000", "300000", "")
MAX_LINES, MAX_RUNNING = 9, 4
SLOW_S = 60.0
"""No answer takes longer; more is a hang."""


class Machine:
    """See the module's text. `run` raises AssertionError with the seed and the last steps."""

    def __init__(self, snap: Snap, seed: int, folder: Path) -> None:
        self.snap, self.seed, self.folder = snap, seed, folder
        self.client = Snapshotd(state_dir=snap.state_dir, autostart=False)
        self.world = World()
        self.rng = random.Random(seed)
        self.history: collections.deque[str] = collections.deque(maxlen=50)
        self.counts: collections.Counter[str] = collections.Counter()
        self.step = 0
        self.past = Past(self)
        self._operations: tuple[tuple[float, Callable[[], None]], ...] = (
            (40, self.exec), (8, self.fork), (8, self.past.rewind), (4, self.past.undo), (4, self.past.edit), (4, self.tag), (2,
            self.untag),
            (5, self.stop), (5, self.prune), (5, self.flush), (1.2, self.crash), (3, self.crash_during), (0.8, self.restart),
            (2.5, self.kill_child), (2, self.check), (0.7, self.repair), (3, self.remove), (2, self.create), (2, self.live_process),
            (0.7, self.power_cut), (10, self.restored), (6, self.compared), (3, self.inside), (1.5, self.exported), (2, self.refused),
        )  # fmt: skip

    # -- the walk --------------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        try:
            self._start_daemon()
            self.create()
            for self.step in range(1, steps + 1):
                self.rng = random.Random(f"{self.seed}:{self.step}")
                (_, operation), = self.rng.choices(self._operations, [weight for weight, _ in self._operations])
                self.note(f"-- {self.step} {operation.__name__}")
                self.counts[operation.__name__] += 1
                began = time.monotonic()
                operation()
                took = time.monotonic() - began
                assert took < SLOW_S, f"it took {took:.0f} s"
            self._end()
        except BaseException as exc:
            exc.add_note(f"seed {self.seed}, step {self.step}; the last steps:\n" + "\n".join(self.history))
            raise

    def note(self, text: str) -> None:
        self.history.append(f"{time.strftime('%H:%M:%S')} {text[:1500]}")

    def _start_daemon(self) -> None:
        budget = self.rng.choice(BUDGETS)
        self.note(f"daemon with a layer budget of {budget or 'half the disk'}")
        self.snap.env["SNAPSHOTD_LAYER_BUDGET"] = budget
        self.snap("ls")

    def _end(self) -> None:
        """Everything is checked once more, then removed: nothing may be left."""
        self.note("-- end")
        self._flush()
        for item in self._readable():
            self.check_restored(item)
        self._read_states()
        for item in self.world.snapshots.values():
            self.past.check_mind(item)
        self._check(read_data=True)
        for tag in [tag for item in self.world.snapshots.values() for tag in item.tags]:
            self.client.untag(tag)
        while self.world.lines:
            for line in list(self.world.lines.values()):
                if not self._forks_of(line):
                    self.client.remove(line.id, force=True)
                    self._forget(line)
        self._flush()
        self.client.prune(grace_s=0)
        usage = self.client.usage()
        assert (usage.unarchived, sum(usage.states.values())) == (0, 0), usage
        self.restart()  # outputs of trajectories that were removed before they were stored go at a start
        assert self.client.usage().spool_bytes == 0
        assert usage.repository_bytes < 8 << 20, f"the image alone is left, but it takes {usage.repository_bytes}"
        self._check_log((self.snap.state_dir / "daemon.log").read_text(errors="replace").splitlines())

    def _check_log(self, lines: list[str]) -> None:
        """No defect is in the daemon's log, nor in what its children wrote there, but that they died with the other end of their pipe."""
        for number, line in enumerate(lines):
            if line.startswith("Traceback"):
                last = next((text for text in lines[number + 1 :] if not text.startswith(" ")), "")
                assert last.startswith("BrokenPipeError"), lines[number : number + 40]
            elif "Traceback" in line:
                assert "the worker process ended while" in line, line[:3000]

    # -- what is there -----------------------------------------------------------------------------------------------------------

    def _readable(self) -> list[Taken]:
        return [item for item in self.world.snapshots.values() if item.readable]

    def any_readable(self) -> Taken:
        return self.rng.choice(self._readable())

    def usable_lines(self) -> list[Line]:
        return [line for line in self.world.lines.values() if self.world.snapshots[line.head].readable]

    def line(self) -> Line:
        """Any trajectory that can run; at most a few do."""
        if not self.usable_lines():
            self.create()
        line = self.rng.choice(self.usable_lines())
        if not line.running:
            self.make_room()
        return line

    def make_room(self) -> None:
        running = [line for line in self.world.lines.values() if line.running]
        if len(running) >= MAX_RUNNING:
            self._stop(self.rng.choice(running))

    def is_full(self) -> bool:
        return len(self.world.lines) >= MAX_LINES

    def _forks_of(self, line: Line) -> list[Line]:
        return [other for other in self.world.lines.values() if other.forked_from in line.own]

    # -- learning what happened --------------------------------------------------------------------------------------------------

    def sync(self, line: Line, expected: dict[str, Tree], minds: dict[str, Mind] | None = None) -> list[Taken]:
        """Take the trajectory's new snapshots into the model; `expected` has the tree of each by its tool's name, `minds` what it
        remembers, where that is not what the snapshot before it does."""
        found = [info for info in self.client.log(line.id, last=6) if info.id not in self.world.snapshots]
        taken = [self._take(line, info, expected, minds or {}) for info in found]
        assert self.client.trajectory(line.id).head == line.head
        return taken

    def _take(self, line: Line, info: SnapshotInfo, expected: dict[str, Tree], minds: dict[str, Mind]) -> Taken:
        head = self.world.snapshots.get(line.head)
        assert info.parent == (head.id if head else None), (info, line)
        if head is not None:
            assert info.seq == head.seq + 1, (info, head)
        tree = line.tree if info.tool.name in ("stop", "checkpoint") else expected[info.tool.name]
        mind = minds.get(info.tool.name, head.mind if head is not None else NOTHING)
        assert info.messages == len(mind.said), (info, mind)
        taken = Taken(
            info.id, info.parent, line.id, info.seq, tree, info.tool.status == "failed", info.image, info.state, mind=mind,
            call=info.tool.name,
        )  # fmt: skip
        if info.method == "unchanged" and head is not None and info.tool.name == "exec":
            assert tree.listing() == head.tree.listing(), "unchanged, but it did change"
        self.world.snapshots[taken.id] = taken
        line.own.append(taken.id)
        line.head, line.tree = taken.id, tree
        if info.method == "copy":
            line.loose_base = True
        else:
            line.upper, line.loose_base = set(), False
        return taken

    def _read_states(self) -> None:
        """What the daemon says of all snapshots: none is missing or too many, parents and tags are right, what was stored stays so."""
        infos = {info.id: info for info in self.client.all_snapshots()}
        assert infos.keys() == self.world.snapshots.keys(), infos.keys() ^ self.world.snapshots.keys()
        for item in self.world.snapshots.values():
            info = infos[item.id]
            assert (info.parent, info.seq, info.trajectory, set(info.tags)) == (item.parent, item.seq, item.line, item.tags), (info, item)
            if item.state != info.state:
                assert (item.state, info.state) == ("captured", "stored"), f"{item.id} was {item.state} and is {info.state}"
                item.state = info.state

    def _flush(self, tries: int = 4) -> None:
        """Everything is stored. A child that was killed on the way is an error that goes away."""
        for left in reversed(range(tries)):
            try:
                self.client.flush()
                break
            except InternalError as exc:
                assert left > 0, exc
                assert "worker process ended" in exc.message, exc
        for item in self._readable():
            item.state = "stored"

    def patient(self, work: Callable[[], Any]) -> Any:
        """Work that a killed child may have cut off once."""
        try:
            return work()
        except InternalError as exc:
            assert "worker process ended" in exc.message, exc
            self.note(f"again, since {exc.message}")
            return work()

    # -- operations ----------------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        if len(self.world.lines) >= MAX_LINES:
            return self.exec()
        self.make_room()
        made, info = self.client.create(runtime="runc")
        line = Line(made.id, info.id, None, Tree())
        line.own.append(info.id)
        self.world.lines[line.id] = line
        self.world.snapshots[info.id] = Taken(info.id, None, line.id, info.seq, Tree(), False, info.image, info.state)
        self.note(f"created {line.id[:12]}")
        return None

    def _script(self, line: Line) -> Script:
        script = Script(self.rng, line.tree, line.upper)
        script.grow(self.rng.choice((0, 1, 1, 2, 3, 6)))
        return script

    def exec(self) -> None:
        line = self.line()
        script = self._script(line)
        code = 3 if self.rng.random() < 0.08 else 0
        self.note(f"in {line.id[:12]}: {script.text!r} exit {code}")
        printed: list[bytes] = []
        text = f"{script.text}\nexit {code}"
        done = self.client.exec(line.id, ["sh", "-c", text], cwd="/workspace", on_output=lambda _, data: printed.append(data))
        assert done.exit_code == code, (done.exit_code, printed)
        self._executed(line, script)
        if self.rng.random() < 0.5:
            self._check_cat(self.world.snapshots[line.head])
        if self.rng.random() < 0.15:
            self.check_restored(self.world.snapshots[line.head])

    def _executed(self, line: Line, script: Script) -> None:
        line.running, line.upper = True, script.upper
        assert len(self.sync(line, {"exec": script.tree})) == 1

    def fork(self) -> None:
        source = self.any_readable()
        count = self.rng.choice((1, 1, 1, 2))
        if len(self.world.lines) + count > MAX_LINES:
            return self.remove()
        self.make_room()
        self.note(f"fork {source.id[:12]} x {count}")
        self._adopt_forks(source, self.patient(lambda: self.client.fork(source.id, count)).trajectories)
        return None

    def _adopt_forks(self, source: Taken, forks: Any) -> None:
        for item in forks:
            assert (item.forked_from, item.head) == (source.id, source.id)
            self.world.lines[item.id] = Line(item.id, source.id, source.id, source.tree)
            if self.rng.random() < 0.4:
                self.check_inside(self.world.lines[item.id])

    def tag(self) -> None:
        item, name = self.rng.choice(list(self.world.snapshots.values())), f"t{self.rng.randrange(12)}"
        self.note(f"tag {item.id[:12]} {name}")
        self.client.tag(item.id, name, move=True)
        for other in self.world.snapshots.values():
            other.tags.discard(name)
        item.tags.add(name)
        assert self.client.snapshot(name).id == item.id

    def untag(self) -> None:
        tagged = [item for item in self.world.snapshots.values() if item.tags]
        if not tagged:
            return
        item = self.rng.choice(tagged)
        name = sorted(item.tags)[0]
        self.client.untag(name)
        item.tags.discard(name)

    def stop(self) -> None:
        self._stop(self.rng.choice(list(self.world.lines.values())))

    def _stop(self, line: Line) -> None:
        self.note(f"stop {line.id[:12]}")
        stopped = self.client.stop(line.id)
        assert stopped.status == "stopped"
        self._stopped(line)

    def _stopped(self, line: Line) -> None:
        self.sync(line, {})
        line.running, line.live_process, line.upper, line.loose_base = False, False, set(), False

    def live_process(self) -> None:
        """Start, or end, a process that stays: captures copy meanwhile."""
        line = self.line()
        if line.live_process and line.running:
            script = "kill -9 $(cat /tmp/pid); while [ -e /proc/$(cat /tmp/pid)/exe ] 2>/dev/null; do sleep 0.01; done"
        else:
            script = "setsid sleep 100000 >/dev/null 2>&1 </dev/null & echo $! > /tmp/pid"
        self.note(f"in {line.id[:12]}: {script}")
        done = self.client.exec(line.id, ["sh", "-c", script], cwd="/workspace")
        line.live_process = not (line.live_process and line.running)
        line.running = True
        assert done.exit_code in (0, 137)
        self.sync(line, {"exec": line.tree})

    def flush(self) -> None:
        self._flush()
        self._read_states()
        assert self.client.usage().unarchived == 0

    def _policy(self) -> Policy:
        chance = self.rng.random
        return Policy(
            keep_last=self.rng.choice((1, 2, 5, 0)) if chance() < 0.8 else None,
            keep_every=self.rng.choice((2, 5)) if chance() < 0.3 else None,
            keep_failed=self.rng.choice((1, 3)) if chance() < 0.3 else None,
            max_bytes=self.rng.choice((1, 3_000_000)) if chance() < 0.15 else None,
        )  # fmt: skip

    def prune(self) -> None:
        policy = self._policy()
        if self.rng.random() < 0.6:
            self._flush()
        dry = self.rng.random() < 0.3
        self.note(f"prune {policy} dry={dry}")
        settled = all(item.state != "captured" for item in self.world.snapshots.values())
        if dry:
            wanted = self.patient(lambda: self.client.prune(policy, grace_s=0, dry_run=True))
            self._check_pruned({item.snapshot for item in wanted.snapshots}, policy, settled=settled)
            self._read_states()
        done = self.patient(lambda: self.client.prune(policy, grace_s=0))
        # One that was cut off has recorded its decisions, and the second finds less to decide: the states tell.
        self._pruned(policy, {item.snapshot for item in done.snapshots}, settled=settled)

    def _pruned(self, policy: Policy, said: set[str] | None, *, settled: bool) -> None:
        infos = {info.id: info for info in self.client.all_snapshots()}
        gone = {i for i, info in infos.items() if info.state == "pruned" and self.world.snapshots[i].state != "pruned"}
        if said is not None:
            assert said <= gone, "it said it took what is still there"
        self._check_pruned(gone, policy, settled=settled)
        for each in gone:
            self.world.snapshots[each].state = "pruned"
        self._read_states()

    def _check_pruned(self, gone: set[str], policy: Policy, *, settled: bool) -> None:
        """`settled`: everything was stored before, so that it is exactly what the policy says; else it may be less."""
        protected = gone & self.world.always_kept()
        assert not protected, f"pruned, but always kept: {protected}"
        if policy.max_bytes is not None:
            return
        wanted = self.world.candidates(policy)
        assert gone <= wanted, f"pruned against the policy: {gone - wanted}"
        if settled and not any(line.loose_base for line in self.world.lines.values()):
            assert gone == wanted, f"not pruned: {wanted - gone}"

    def check(self) -> None:
        self._check(read_data=self.rng.random() < 0.4)

    def _check(self, *, read_data: bool) -> None:
        report = self.patient(lambda: self.client.check(read_data=read_data))
        assert not report.damages, report
        assert not report.snapshots, report

    def repair(self) -> None:
        report = self.patient(self.client.repair)
        assert (report.actions, report.lost) == ((), ()), report

    def remove(self) -> None:
        lines = [line for line in self.world.lines.values() if not self._forks_of(line)]
        if len(self.world.lines) < 3 or not lines:
            return
        line = self.rng.choice(lines)
        self.note(f"remove {line.id[:12]}")
        try:
            self.client.remove(line.id, force=True)
        except Conflict as exc:
            assert "not stored yet" in exc.message, exc
            self._flush()
            self.client.remove(line.id, force=True)
        self._forget(line)

    def _forget(self, line: Line) -> None:
        del self.world.lines[line.id]
        for each in line.own:
            del self.world.snapshots[each]

    def refused(self) -> None:
        """What has no files cannot be read or started, and says why."""
        without = [item for item in self.world.snapshots.values() if not item.readable]
        if not without:
            return
        item = self.rng.choice(without)
        kind: type[SnapshotdError] = NotFound if item.state == "pruned" else DataLoss
        self.note(f"{item.state} {item.id[:12]} is refused")
        works: list[Callable[[], object]] = [
            lambda: b"".join(self.client.cat(item.id, "/etc/passwd")), lambda: self.client.fork(item.id),
            lambda: self.client.restore(item.id, self.folder / "refused"), lambda: self.client.exec_snapshot(item.id, ["true"]),
        ]  # fmt: skip
        try:
            self.rng.choice(works)()
        except kind as exc:
            assert "given up" in exc.message or "lost" in exc.message, exc
        else:
            raise AssertionError("it was read all the same")
        assert self.client.snapshot(item.id).id == item.id, "its call is still there"

    # -- kills -----------------------------------------------------------------------------------------------------------------------

    def _pid(self) -> int:
        return self.client.version().pid

    def _kill_daemon(self, pid: int) -> None:
        children = [child for child in _children(pid) if b"snapshotd" in _command(child)]  # containers go when the next one starts
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _ended(pid), "the daemon died")
        wait_until(lambda: all(map(_ended, children)), "its children died with it", 10)

    def _after_crash(self) -> None:
        self._start_daemon()
        for line in self.world.lines.values():
            line.running, line.live_process, line.upper, line.loose_base = False, False, set(), False
        assert self.client.sandboxes() == []

    def crash(self) -> None:
        self._kill_daemon(self._pid())
        self._after_crash()
        self._read_states()

    def crash_during(self) -> None:
        """The daemon dies somewhere in the middle of something."""
        works = (
            self._crash_in_exec, self._crash_in_fork, self.past.crash_in_rewind, self._crash_in_prune, self._crash_in_flush,
            self._crash_in_remove, self._crash_in_repair, self._crash_in_create, self.past.crash_in_undo, self.past.crash_in_edit,
        )  # fmt: skip
        work = self.rng.choice(works)
        self.note(work.__name__)
        work()
        for line in self.world.lines.values():
            self.sync(line, {})
        self._read_states()
        self._check(read_data=False)

    def dying(self, work: Callable[[], object], within_s: float) -> tuple[object, SnapshotdError | None]:
        """Do something while the daemon dies. Whether it was done is for the caller to find out."""
        delay = self.rng.random() * within_s
        pid = self._pid()
        result: list[object] = []
        failures: list[SnapshotdError] = []

        def run() -> None:
            try:
                result.append(work())
            except SnapshotdError as exc:
                failures.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(delay)
        self._kill_daemon(pid)
        thread.join(20)
        assert not thread.is_alive(), "the client hangs"
        self._after_crash()
        failure = failures[0] if failures else None
        # A child dies with the daemon, or a moment earlier.
        assert failure is None or isinstance(failure, DaemonUnavailable | InternalError), failure
        return (result[0] if result else None), failure

    def _crash_in_exec(self) -> None:
        line = self.line()
        script = self._script(line)
        self.note(f"in {line.id[:12]}: {script.text!r}")
        _, failure = self.dying(lambda: self.client.exec(line.id, ["sh", "-c", script.text], cwd="/workspace"), 0.12)
        taken = self.sync(line, {"exec": script.tree})
        assert taken or failure, "an answered step is not there"
        line.upper = set()

    def _crash_in_fork(self) -> None:
        if len(self.world.lines) >= MAX_LINES:
            return self._crash_in_remove()
        source = self.any_readable()
        forked, failure = self.dying(lambda: self.client.fork(source.id, 2), 0.3)
        found = [t for t in self.client.trajectories() if t.id not in self.world.lines]
        assert len(found) in (0, 2), "all or none"
        assert found or failure is not None, forked
        self._adopt_forks(source, found)
        for item in found:
            self._stop(self.world.lines[item.id])
        return None

    def _crash_in_create(self) -> None:
        if len(self.world.lines) >= MAX_LINES:
            return self._crash_in_remove()
        _, failure = self.dying(lambda: self.client.create(runtime="runc"), 0.2)
        found = [t for t in self.client.trajectories() if t.id not in self.world.lines]
        assert len(found) <= 1
        assert found or failure
        for item in found:
            self.world.lines[item.id] = Line(item.id, item.head, None, Tree(), own=[item.head], running=False)
            info = self.client.snapshot(item.head)
            self.world.snapshots[info.id] = Taken(info.id, None, item.id, info.seq, Tree(), False, info.image, info.state)
        return None

    def _crash_in_prune(self) -> None:
        policy = self._policy()
        self.dying(lambda: self.client.prune(policy, grace_s=0), 0.5)
        self._pruned(policy, None, settled=False)
        if self.rng.random() < 0.5:
            self._check(read_data=True)

    def _crash_in_flush(self) -> None:
        self.dying(self.client.flush, 0.3)

    def _crash_in_repair(self) -> None:
        self.dying(self.client.repair, 0.6)
        self.repair()

    def _crash_in_remove(self) -> None:
        lines = [line for line in self.world.lines.values() if not self._forks_of(line)]
        if len(self.world.lines) < 3 or not lines:
            return
        line = self.rng.choice(lines)

        def work() -> None:
            try:
                self.client.remove(line.id, force=True)
            except Conflict as exc:
                assert "not stored yet" in exc.message, exc

        self.dying(work, 0.15)
        if line.id not in {t.id for t in self.client.trajectories()}:
            self._forget(line)

    def restart(self) -> None:
        self.snap.stop_daemon()
        self._after_crash()
        for line in self.world.lines.values():
            self.sync(line, {})
        self._read_states()

    def power_cut(self) -> None:
        """As if the machine had gone down with everything on disk: only the repository counts, no layer is trusted."""
        if self.rng.random() < 0.8:
            self._flush()
        before = {item.id for item in self.world.snapshots.values() if item.state == "captured"}
        self._kill_daemon(self._pid())
        with sqlite3.connect(self.snap.state_dir / "catalog.db") as db:
            db.execute("UPDATE meta SET value = 'another' WHERE key = 'boot_id'")
        db.close()
        self._after_crash()
        for info in self.client.all_snapshots():
            if info.state == "lost" and self.world.snapshots[info.id].state != "lost":
                assert info.id in before, "a stored snapshot was lost"
                self.world.snapshots[info.id].state = "lost"
        self._read_states()
        if self._readable():
            self.check_restored(self.any_readable())

    def kill_child(self) -> None:
        """A child of the daemon dies, now or in the middle of something."""
        role = self.rng.choice(("archive", "archive", "cold", "lazy", "worker"))
        pid = self._pid()
        self.note(f"kill {role}")
        if role == "lazy":
            return self._kill_lazy(pid)
        work = self.rng.choice((None, self._flush, self.restored, self.check, self.prune, self.fork))
        killer = threading.Timer(self.rng.random() * 0.1, lambda: _kill_children(pid, role))
        killer.start()
        try:
            if work is not None:
                work()
        finally:
            killer.join()
        assert self._pid() == pid, "the daemon died with its child"
        return None

    def _kill_lazy(self, pid: int) -> None:
        """What stands on its mount reads right bytes or an error, soon; and every sandbox can be started anew."""
        killed = _kill_children(pid, "lazy")
        for line in [line for line in self.world.lines.values() if line.running]:
            began = time.monotonic()
            try:
                code, printed = self._look(self.client.exec, line.id)
            except SnapshotdError as exc:
                assert killed, exc
            else:
                self.sync(line, {"exec": line.tree})
                assert killed or code == 0, printed
                if code == 0:
                    _same(parse_inside(printed), inside_view(line.tree.listing()), f"inside {line.id}")
            assert time.monotonic() - began < 5
            self._stop(line)

    # -- looking ------------------------------------------------------------------------------------------------------------------------

    def _check_cat(self, item: Taken) -> None:
        paths = [path for path in item.tree.names if item.tree.node(path).kind == "f"]
        if paths:
            path = self.rng.choice(paths)
            assert b"".join(self.client.cat(item.id, f"/workspace/{path}".encode())) == item.tree.node(path).data, path

    def restored(self) -> None:
        if not self._readable():
            return
        item = self.any_readable()
        self.note(f"restore {item.id[:12]} ({item.state})")
        self._check_cat(item)
        self.check_restored(item)

    def check_restored(self, item: Taken) -> None:
        target = self.folder / "restored"
        report = self.patient(lambda: self.client.restore(item.id, target, path="/workspace"))
        try:
            listing, times = host_listing(target)
        finally:
            shutil.rmtree(target)
        _same(listing, item.tree.listing(), f"restored {item.id} ({item.state})")
        self.past.check_mind(item)
        assert report.warnings == ()
        if item.times is not None:
            wrong = {path: (times[path], ns) for path, ns in item.times.items() if times[path] != ns}
            assert not wrong, f"times of {item.id} changed: {wrong}"
        item.times = times

    def compared(self) -> None:
        if len(self._readable()) < 2:
            return
        a, b = self.any_readable(), self.any_readable()
        self.note(f"diff {a.id[:12]} {b.id[:12]}")
        said = {(c.change, c.path[10:].decode()) for c in self.client.diff(a.id, b.id) if c.path.startswith(b"workspace/")}
        _same_sets(said, changes(a.tree.listing(), b.tree.listing()))

    def inside(self) -> None:
        """A throw-away fork, looked at from the inside."""
        if not self._readable():
            return
        item = self.any_readable()
        self.note(f"look into {item.id[:12]} from the inside")
        code, printed = self.patient(lambda: self._look(self.client.exec_snapshot, item.id))
        assert code == 0, printed
        _same(parse_inside(printed), inside_view(item.tree.listing()), f"inside {item.id}")

    def _look(self, execute: Callable[..., Any], ref: str) -> tuple[int, bytes]:
        printed: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        def sink(stream: str, data: bytes) -> None:
            printed[stream] += data

        done = execute(ref, ["perl", "-e", INSIDE], cwd="/workspace", env={"LC_ALL": "C"}, on_output=sink)
        return done.exit_code, printed["stdout"] if done.exit_code == 0 else printed["stderr"]

    def check_inside(self, line: Line) -> None:
        code, printed = self._look(self.client.exec, line.id)
        line.running = True
        self.sync(line, {"exec": line.tree})
        assert code == 0, printed
        _same(parse_inside(printed), inside_view(line.tree.listing()), f"inside {line.id}")

    def exported(self) -> None:
        """A whole trajectory goes out, is removed, and comes back as it was."""
        lines = [line for line in self.usable_lines() if line.forked_from is None and not self._forks_of(line)]
        if not lines:
            return
        line = self.rng.choice(lines)
        if line.running:
            self._stop(line)
        own = [self.world.snapshots[each] for each in line.own]
        bundle = self.folder / "bundle"
        self.note(f"export and import {line.id[:12]}, {len(own)} snapshots")
        self.patient(lambda: self.client.export_file(line.head, bundle, whole=True))
        for item in own:
            for tag in item.tags:
                self.client.untag(tag)
            item.tags.clear()
        self._flush()
        self.client.remove(line.id, force=True)
        imported = self.patient(lambda: self.client.import_bundle(bundle))
        bundle.unlink()
        assert imported.snapshots == len(own)
        (again,) = imported.trajectories
        assert (again.id, again.head, again.status) == (line.id, line.head, "stopped"), (again, line)
        for info in self.client.log(line.id):
            item = self.world.snapshots[info.id]
            assert item.readable == (info.state in ("captured", "stored")), (info, item)
            item.state, item.image, item.tags = info.state, info.image, set(info.tags)
            self.past.check_mind(item)
        self._read_states()
        self.check_restored(self.rng.choice([item for item in own if item.readable]))


def _same(found: dict[str, Any], wanted: dict[str, Any] | Listing, what: str) -> None:
    if found != wanted:
        wrong = {path: (_short(found.get(path)), _short(wanted.get(path))) for path in found.keys() | wanted.keys()
                 if found.get(path) != wanted.get(path)}  # fmt: skip
        raise AssertionError(f"{what}: (found, wanted) of {wrong}")


def _short(value: Any) -> str:
    return repr(value)[:300]


def _same_sets(found: set[tuple[str, str]], wanted: set[tuple[str, str]]) -> None:
    assert found == wanted, f"too many: {found - wanted}; missing: {wanted - found}"


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


_CHILD_WORDS = {"worker": b"snapshotd.engine.worker", "archive": b"archive", "cold": b"cold", "lazy": b"lazy"}


def _children(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1]) == pid and not _ended(int(name)):
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _command(pid: int) -> bytes:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"" if words.startswith(b"/run/snapshotd/share/init") else words


def _kill_children(pid: int, role: str) -> bool:
    killed = False
    for child in _children(pid):
        if _CHILD_WORDS[role] in _command(child).split(b"\0"):
            os.kill(child, signal.SIGKILL)
            killed = True
    return killed
