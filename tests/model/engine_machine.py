"""A seeded random walk through the engine, over its socket, with kills, against the oracle of `engine_oracle`.

Each step draws from a generator of its own (seed and number of the step), so a seed replays the same choices as far as
timing lets it.
"""
# ruff: noqa: PT017 - errors are expected or not depending on what was killed

from __future__ import annotations

import collections
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.client import Policy, Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Conflict, InternalError
from tests.e2e.support import Snap
from tests.model.engine_kills import Kills
from tests.model.engine_looks import Looks
from tests.model.engine_manner import Manner
from tests.model.engine_oracle import NOTHING, Line, Mind, Script, Taken, Tree, World
from tests.model.engine_past import Past

MAX_LINES, MAX_RUNNING = 9, 4
REPORT_STEPS = 250
SLOW_S = 120.0
"""No answer takes longer; more is a hang."""


class Machine:
    """See the module's text. `run` raises AssertionError with the seed and the last steps."""

    def __init__(self, snap: Snap, seed: int, folder: Path, runtime: str = "runc") -> None:
        self.snap, self.seed, self.folder, self.runtime = snap, seed, folder, runtime
        self.manner = Manner.of(runtime)
        self.client = Snapshotd(state_dir=snap.state_dir, autostart=False)
        self.world = World()
        self.rng = random.Random(seed)
        self.history: collections.deque[str] = collections.deque(maxlen=50)
        self.counts: collections.Counter[str] = collections.Counter()
        self.step = 0
        self.looks = Looks(self)
        self.past = Past(self)
        self.kills = kills = Kills(self)
        self._operations: tuple[tuple[float, Callable[[], None]], ...] = (
            (40, self.exec),
            (8, self.fork),
            (8, self.past.rewind),
            (4, self.past.undo),
            (4, self.past.edit),
            (4, self.tag),
            (2, self.untag),
            (5, self.stop),
            (5, self.prune),
            (5, self.flush),
            (1.5, kills.crash),
            (2.5, kills.crash_during),
            (3, kills.crash_at),
            (1, kills.restart),
            (2.5, kills.kill_child),
            (2, self.check),
            (0.7, self.repair),
            (3, self.remove),
            (4, self.create),
            (2, self.live_process),
            (1, kills.power_cut),
            (10, self.looks.restored),
            (6, self.looks.compared),
            (3, self.looks.inside),
            (1.5, self.exported),
            (2, self.looks.refused),
        )

    # -- the walk ------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        try:
            self.kills.start()
            self.create()
            for self.step in range(1, steps + 1):
                self.rng = random.Random(f"{self.seed}:{self.step}")
                ((_, operation),) = self.rng.choices(self._operations, [weight for weight, _ in self._operations])
                self.note(f"-- {self.step} {operation.__name__}")
                self.counts[operation.__name__] += 1
                began = time.monotonic()
                operation()
                took = time.monotonic() - began
                assert took < SLOW_S, f"it took {took:.0f} s"
                if self.step % REPORT_STEPS == 0 or self.step == steps:
                    self._report()
            self._end()
        except BaseException as exc:
            log = (self.snap.state_dir / "daemon.log").read_text(errors="replace").splitlines()
            what = [
                f"seed {self.seed}, step {self.step}; the daemon's last words:",
                *log[-30:],
                "the last steps:",
                *self.history,
            ]
            exc.add_note("\n".join(what))
            self.snap(
                "ls", code=None
            )  # a walk may fail while no daemon runs: the next one takes away what the last one left
            raise

    def _report(self) -> None:
        """What was done so far, and the failpoints that were reached, for whoever reads a long walk's output (`pytest
        -s` or `-rA`)."""
        self.kills.read_log()
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.most_common())
        print(f"seed {self.seed}, {self.step} steps on {self.runtime}: {counts}", flush=True)  # noqa: T201 - see above

    def note(self, text: str) -> None:
        self.history.append(f"{time.strftime('%H:%M:%S')} {text[:1500]}")

    def _end(self) -> None:
        """Everything is checked once more, then removed: nothing may be left."""
        self.note("-- end")
        self.flush_all()
        for item in self.readable():
            self.looks.check_restored(item)
        self.read_states()
        for item in self.world.snapshots.values():
            self.past.check_mind(item)
        self.verify(read_data=True)
        for tag in [tag for item in self.world.snapshots.values() for tag in item.tags]:
            self.client.untag(tag)
        while self.world.lines:
            for line in list(self.world.lines.values()):
                if not self._forks_of(line):
                    self.client.remove(line.id, force=True)
                    self.forget(line)
        self.flush_all()
        self.client.prune(grace_s=0)
        usage = self.client.usage()
        assert (usage.unarchived, sum(usage.states.values())) == (0, 0), usage
        self.kills.restart()  # outputs of trajectories that were removed before they were stored go at a start
        assert self.client.usage().spool_bytes == 0
        assert usage.repository_bytes < 8 << 20, f"the image alone is left, but it takes {usage.repository_bytes}"
        self._check_log((self.snap.state_dir / "daemon.log").read_text(errors="replace").splitlines())

    def _check_log(self, lines: list[str]) -> None:
        """No defect is in the daemon's log, nor in what its children wrote there, but that they died with the other end
        of their pipe."""
        for number, line in enumerate(lines):
            if line.startswith("Traceback"):
                last = next(
                    (text for text in lines[number + 1 :] if not text.startswith((" ", "{"))), ""
                )  # the daemon's own come between
                assert last.startswith("BrokenPipeError"), lines[number : number + 60]
            elif "Traceback" in line:
                assert "the worker process ended while" in line, line[:3000]

    # -- what is there -------------------------------------------------------------------------------------------------

    def readable(self) -> list[Taken]:
        return [item for item in self.world.snapshots.values() if item.readable]

    def any_readable(self) -> Taken:
        return self.rng.choice(self.readable())

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
            self.stop_line(self.rng.choice(running))

    def is_full(self) -> bool:
        return len(self.world.lines) >= MAX_LINES

    def _forks_of(self, line: Line) -> list[Line]:
        return [other for other in self.world.lines.values() if other.forked_from in line.own]

    # -- learning what happened ----------------------------------------------------------------------------------------

    def sync(self, line: Line, expected: dict[str, Tree], minds: dict[str, Mind] | None = None) -> list[Taken]:
        """Take the trajectory's new snapshots into the model; `expected` has the tree of each by its tool's name,
        `minds` what it remembers, where that is not what the snapshot before it does."""
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
            info.id,
            info.parent,
            line.id,
            info.seq,
            tree,
            info.tool.status == "failed",
            info.image,
            info.state,
            mind=mind,
            call=info.tool.name,
        )
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

    def read_states(self) -> None:
        """What the daemon says of all snapshots: none is missing or too many, parents and tags are right, what was
        stored stays so."""
        infos = {info.id: info for info in self.client.all_snapshots()}
        assert infos.keys() == self.world.snapshots.keys(), infos.keys() ^ self.world.snapshots.keys()
        for item in self.world.snapshots.values():
            info = infos[item.id]
            assert (info.parent, info.seq, info.trajectory, set(info.tags)) == (
                item.parent,
                item.seq,
                item.line,
                item.tags,
            ), (info, item)
            if item.state != info.state:
                assert (item.state, info.state) == ("captured", "stored"), (
                    f"{item.id} was {item.state} and is {info.state}"
                )
                item.state = info.state

    def flush_all(self, tries: int = 4) -> None:
        """Everything is stored. A child that was killed on the way is an error that goes away."""
        for left in reversed(range(tries)):
            try:
                self.client.flush()
                break
            except InternalError as exc:
                assert left > 0, exc
                assert "worker process ended" in exc.message, exc
        for item in self.readable():
            item.state = "stored"

    def patient(self, work: Callable[[], Any]) -> Any:
        """Work that a killed child may have cut off once."""
        try:
            return work()
        except InternalError as exc:
            assert "worker process ended" in exc.message, exc
            self.note(f"again, since {exc.message}")
            return work()

    # -- operations ----------------------------------------------------------------------------------------------------

    def create(self) -> None:
        if self.is_full():
            return self.exec()
        self.make_room()
        tree, workspace = Tree(), None
        if (
            self.readable() and self.rng.random() < 0.7
        ):  # directories that user space writes into a layer lack the kernel's marks
            item = self.any_readable()
            tree, workspace = self.manner.given(item.tree), self.folder / "given"
            self.patient(lambda: self.client.restore(item.id, self.folder / "given", path="/workspace"))
        try:
            made, info = self.client.create(**self.manner.options, workspace=workspace)
        finally:
            shutil.rmtree(self.folder / "given", ignore_errors=True)
        line = Line(made.id, info.id, None, tree)
        line.own.append(info.id)
        self.world.lines[line.id] = line
        self.world.snapshots[info.id] = Taken(info.id, None, line.id, info.seq, tree, False, info.image, info.state)
        self.looks.check_running(line)
        self.note(f"created {line.id[:12]}")
        return None

    def script(self, line: Line) -> Script:
        upper = set(line.tree.nodes) if self.manner.links_stay else line.upper
        script = Script(self.rng, line.tree, upper, owners=self.manner.owners)
        script.grow(self.rng.choice((0, 1, 1, 2, 3, 6)))
        return script

    def exec(self) -> None:
        line = self.line()
        script = self.script(line)
        code = 3 if self.rng.random() < 0.08 else 0
        self.note(f"in {line.id[:12]}: {script.text!r} exit {code}")
        printed: list[bytes] = []
        text = f"{script.text}\nexit {code}"
        done = self.client.exec(
            line.id, ["sh", "-c", text], cwd="/workspace", on_output=lambda _, data: printed.append(data)
        )
        assert done.exit_code == code, (done.exit_code, printed)
        self._executed(line, script)
        if self.rng.random() < 0.5:
            self.looks.check_cat(self.world.snapshots[line.head])
        if self.rng.random() < 0.15:
            self.looks.check_restored(self.world.snapshots[line.head])

    def _executed(self, line: Line, script: Script) -> None:
        line.running, line.upper = True, script.upper
        assert len(self.sync(line, {"exec": script.tree})) == 1
        self.looks.check_running(line)

    def fork(self) -> None:
        source = self.any_readable()
        count = self.rng.choice((1, 1, 1, 2))
        if len(self.world.lines) + count > MAX_LINES:
            return self.remove()
        self.make_room()
        self.note(f"fork {source.id[:12]} x {count}")
        self.adopt_forks(source, self.patient(lambda: self.client.fork(source.id, count)).trajectories)
        return None

    def adopt_forks(self, source: Taken, forks: Any) -> None:
        for item in forks:
            assert (item.forked_from, item.head) == (source.id, source.id)
            self.world.lines[item.id] = Line(item.id, source.id, source.id, source.tree)
            if self.rng.random() < 0.4:
                self.looks.check_inside(self.world.lines[item.id])

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
        self.stop_line(self.rng.choice(list(self.world.lines.values())))

    def stop_line(self, line: Line) -> None:
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
            script = "at=${TMPDIR:-/tmp}/pid; kill -9 $(cat $at); while [ -e /proc/$(cat $at)/exe ] 2>/dev/null; do sleep 0.01; done"
        else:
            script = "setsid sleep 100000 >/dev/null 2>&1 </dev/null & echo $! > ${TMPDIR:-/tmp}/pid"
        self.note(f"in {line.id[:12]}: {script}")
        done = self.client.exec(line.id, ["sh", "-c", script], cwd="/workspace")
        line.live_process = not (line.live_process and line.running)
        line.running = True
        assert done.exit_code in (0, 137)
        self.sync(line, {"exec": line.tree})

    def flush(self) -> None:
        self.flush_all()
        self.read_states()
        assert self.client.usage().unarchived == 0

    def policy(self) -> Policy:
        chance = self.rng.random
        return Policy(
            keep_last=self.rng.choice((1, 2, 5, 0)) if chance() < 0.8 else None,
            keep_every=self.rng.choice((2, 5)) if chance() < 0.3 else None,
            keep_failed=self.rng.choice((1, 3)) if chance() < 0.3 else None,
            max_bytes=self.rng.choice((1, 3_000_000)) if chance() < 0.15 else None,
        )

    def prune(self) -> None:
        policy = self.policy()
        if self.rng.random() < 0.6:
            self.flush_all()
        dry = self.rng.random() < 0.3
        self.note(f"prune {policy} dry={dry}")
        settled = all(item.state != "captured" for item in self.world.snapshots.values())
        if dry:
            wanted = self.patient(lambda: self.client.prune(policy, grace_s=0, dry_run=True))
            self._check_pruned({item.snapshot for item in wanted.pruned}, policy, settled=settled)
            self.read_states()
        done = self.patient(lambda: self.client.prune(policy, grace_s=0))
        # One that was cut off has recorded its decisions, and the second finds less to decide: the states tell.
        self.pruned(policy, {item.snapshot for item in done.pruned}, settled=settled)

    def pruned(self, policy: Policy, said: set[str] | None, *, settled: bool) -> None:
        infos = {info.id: info for info in self.client.all_snapshots()}
        gone = {i for i, info in infos.items() if info.state == "pruned" and self.world.snapshots[i].state != "pruned"}
        if said is not None:
            assert said <= gone, "it said it took what is still there"
        self._check_pruned(gone, policy, settled=settled)
        for each in gone:
            self.world.snapshots[each].state = "pruned"
        self.read_states()

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
        self.verify(read_data=self.rng.random() < 0.4)

    def verify(self, *, read_data: bool) -> None:
        report = self.patient(lambda: self.client.check(read_data=read_data))
        assert not report.damages, report
        assert not report.unreadable, report

    def repair(self) -> None:
        """Nothing is to do, but for a pack that a process did not put into the index because it was killed; and never
        twice."""
        report = self.patient(self.client.repair)
        assert report.lost == (), report
        if report.actions:
            assert self.kills.left_rubbish, report
            assert all(action.startswith(("took the pack", "corrected")) for action in report.actions), report
            report = self.patient(self.client.repair)
            assert report.actions == (), report
        self.kills.left_rubbish = False

    def removable(self) -> Line | None:
        """A trajectory that nothing was forked from; None when few are left."""
        lines = [line for line in self.world.lines.values() if not self._forks_of(line)]
        return self.rng.choice(lines) if len(self.world.lines) >= 3 and lines else None

    def remove(self) -> None:
        line = self.removable()
        if line is None:
            return
        self.note(f"remove {line.id[:12]}")
        try:
            self.client.remove(line.id, force=True)
        except Conflict as exc:
            assert "not stored yet" in exc.message, exc
            self.flush_all()
            self.client.remove(line.id, force=True)
        self.forget(line)

    def forget(self, line: Line) -> None:
        del self.world.lines[line.id]
        for each in line.own:
            del self.world.snapshots[each]

    def exported(self) -> None:
        """A whole trajectory goes out, is removed, and comes back as it was."""
        lines = [line for line in self.usable_lines() if line.forked_from is None and not self._forks_of(line)]
        if not lines:
            return
        line = self.rng.choice(lines)
        if line.running:
            self.stop_line(line)
        own = [self.world.snapshots[each] for each in line.own]
        bundle = self.folder / "bundle"
        self.note(f"export and import {line.id[:12]}, {len(own)} snapshots")
        self.patient(lambda: self.client.export_file(line.head, bundle, whole=True))
        for item in own:
            for tag in item.tags:
                self.client.untag(tag)
            item.tags.clear()
        self.flush_all()
        self.client.remove(line.id, force=True)
        imported = self.patient(lambda: self.client.import_bundle(bundle))
        bundle.unlink()
        assert imported.snapshot_count == len(own)
        (again,) = imported.trajectories
        assert (again.id, again.head, again.status) == (line.id, line.head, "stopped"), (again, line)
        for info in self.client.log(line.id):
            item = self.world.snapshots[info.id]
            assert item.readable == (info.state in ("captured", "stored")), (info, item)
            item.state, item.image, item.tags = info.state, info.image, set(info.tags)
            self.past.check_mind(item)
        self.read_states()
        self.looks.check_restored(self.rng.choice([item for item in own if item.readable]))
