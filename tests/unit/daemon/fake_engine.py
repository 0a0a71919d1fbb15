"""A tiny engine in memory, for everything above the engine: it keeps trajectories and snapshots in dictionaries and
runs nothing.

Commands that `exec` understands (the first word; everything else ends with 0 and prints its arguments):

    missing         CommandNotFound            blocked     CommandNotRunnable
    fail N TEXT     prints TEXT to stderr and ends with N
    bytes N         N bytes to stdout          raw HEX     these bytes to stdout
    wait FILE       waits until FILE exists (polling, with a deadline), then ends with 0
    crash           raises ZeroDivisionError   full        raises OSError(ENOSPC)

An agent file's events: started, its text as output, one snapshot per line, finished with exit code 3 (or never, if its
name is `forever.py`, until it is stopped).

Durable storage: `flush` makes every captured snapshot stored. `prune` drops all but the newest `keep_last` (or 1) of
each trajectory. An export is 3 MiB of bytes that the request determines; one of a trajectory whose name begins with
`damaged` fails after the first. A bundle is `BUNDLE`, then anything; `BUNDLE damaged` fails, `BUNDLE crash` raises
ZeroDivisionError. A check finds damage while there is a trajectory whose name begins with `damaged`, until a repair.
Mounts are remembered with the process id that asked. The ports of a running trajectory are those of this machine's
loopback.

What it does about the agent's mind is in fake_mind.py, about files in fake_files.py, about commands in the background in
fake_commands.py.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from snapshotd import types as t
from snapshotd.api.commands import CommandFields, ExecRequest
from snapshotd.api.forms import iso_time
from snapshotd.api.storage import CheckInfo, DamageInfo, Policy, PrunedInfo, PruneInfo, RepairInfo, UsageInfo
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine import base
from snapshotd.engine.caller import Caller
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.requests import Asking, T
from snapshotd.engine.runs.forks import children
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import (
    Ambiguous,
    CommandNotFound,
    CommandNotRunnable,
    Conflict,
    DataLoss,
    NotFound,
    OutOfSpace,
    UsageError,
)
from snapshotd.secrets.vault import FileVault
from snapshotd.trees.base import Change, ChangeKind, Entry, RestoreReport
from snapshotd.types import Kind
from tests.unit.daemon.fake_commands import FakeCommands
from tests.unit.daemon.fake_figures import FOUND, STATS
from tests.unit.daemon.fake_files import FakeFiles, entry
from tests.unit.daemon.fake_mind import MIND_WORDS, NOW_NS, FakeMind

IMAGE = t.ImageID("1ba9e" + "0" * 27)


class _Asking(Asking):
    def once(self, make: Callable[[], T], recall: Callable[[tuple[str, ...]], T], *, recall_only: bool = False) -> T:
        return make()

    def asked_again(self) -> bool:
        return False


class FakeEngine(FakeMind, FakeFiles, FakeCommands):
    def __init__(self) -> None:
        super().__init__()
        self._made_experiments: ExperimentService | None = None
        self.changed = threading.Condition()
        self.lines: dict[str, t.Trajectory] = {}
        self.taken: dict[str, t.Snapshot] = {}
        self.contents: dict[str, dict[bytes, bytes]] = {}
        self.outputs: dict[str, dict[str, bytes]] = {}
        self.log_of: dict[str, list[base.Event]] = {}
        self.made_images = [t.Image(IMAGE, "default", "recipe default", "x", 1000, 10, NOW_NS)]
        self.background: dict[str, base.CommandInfo] = {}
        self.printed: dict[str, list[base.Event]] = {}
        self.closed = False
        self.policies: dict[str | None, Policy] = {}
        self.mounts: dict[tuple[Path, str], int] = {}
        self.imported: dict[str, int] = {}
        self.repaired = False
        self.connections: dict[socket.socket, tuple[str, Callable[[], object]]] = {}
        self.runs = self.snapshots = self.branching = self.mind = self.storage = self.requests = self.life = self
        self.find = SimpleNamespace(find=lambda *_, **__: FOUND)
        self.stats = SimpleNamespace(stats=lambda _: STATS)
        self.files = SimpleNamespace(
            read=self.read_file,
            stat=self.stat_file,
            list=self.list_files,
            archive=self.read_archive,
            write=self.write_file,
            unpack=self.write_archive,
            make_dir=self.make_dir,
            remove=self.remove_file,
            rename=self.rename_file,
        )
        self.approvals = SimpleNamespace(
            ask=self.ask, list=self.all_asked, view=self.approval, approve=self.approve, deny=self.deny
        )
        self.values = SimpleNamespace(
            put=self.put_value,
            get=self.get_value,
            delete=self.delete_value,
            search=self.search_values,
            history=self.value_history,
        )
        self.images = SimpleNamespace(
            list=lambda: self.made_images,
            ensure=self.ensure_image,
            build=self.build_image,
            import_=self.import_image,
            remove=self.remove_image,
        )

    # -- the test's side -----------------------------------------------------------------------------------------------

    def _take(
        self, trajectory: t.Trajectory, call: t.ToolCall, files: dict[bytes, bytes], follows: t.SnapshotID | None = None
    ) -> t.Snapshot:
        parent = trajectory.head or None
        seq = self.taken[parent].seq + 1 if parent else 0
        snapshot = t.Snapshot(
            id=t.SnapshotID(t.new_id()),
            parent=t.SnapshotID(parent) if parent else None,
            trajectory=trajectory.id,
            seq=seq,
            stack=t.Stack(IMAGE, ()),
            call=call,
            messages=2,
            state=t.SnapshotState.CAPTURED,
            pause_ns=2_100_000,
            created_at_ns=NOW_NS,
            files=t.FileChanges(1, 2, 0, 1234),
            follows=follows,
        )
        with self.changed:
            self.taken[snapshot.id] = snapshot
            self.contents[snapshot.id] = files
            self._replace(trajectory.id, head=snapshot.id)
            self.changed.notify_all()
        return snapshot

    def _replace(self, trajectory_id: str, **changes: Any) -> t.Trajectory:
        self.lines[trajectory_id] = dataclasses.replace(self.lines[trajectory_id], **changes)
        return self.lines[trajectory_id]

    def _call(self, name: str, arguments: Any, exit_code: int | None = 0) -> t.ToolCall:
        status = t.CallStatus.FAILED if exit_code else t.CallStatus.DONE
        return t.ToolCall(t.CallID(t.new_id()), name, arguments, status, NOW_NS, 5_000_000, exit_code)

    def _begin(self, request: base.SandboxRequest, agent: t.AgentSpec | None) -> t.Trajectory:
        if request.image not in {i.name for i in self.made_images}:
            raise NotFound(f"there is no image {request.image!r}; `snapshotd image ls` lists those there are")
        if request.name and request.name in {line.name for line in self.lines.values()}:
            raise Conflict(f"the name {request.name} is taken; choose another")
        runtime = "runc" if request.runtime == "auto" else request.runtime
        spec = t.SandboxSpec(IMAGE, runtime, request.network or t.Network.NONE, request.limits or t.Limits())
        line = t.Trajectory(
            t.TrajectoryID(t.new_id()),
            request.name,
            spec,
            agent,
            t.SnapshotID(""),
            t.TrajectoryStatus.RUNNING,
            NOW_NS,
            env=request.env,
        )
        self.lines[line.id] = line
        self.secret_names[line.id] = [name for name, _ in request.secrets]
        self.providers[line.id] = request.providers
        self._take(line, self._call("start", None, None), {b"workspace/a.txt": b"hello\n"})
        return self.lines[line.id]

    def asking(self, request: t.RequestKey | None) -> AbstractContextManager[Asking]:
        """Keys mean nothing here: `e2e/test_asked_again.py` has them."""
        return contextlib.nullcontext(_Asking())

    @property
    def experiments(self) -> ExperimentService:
        """The real one, over this engine."""
        if self._made_experiments is None:
            catalog, kept = SqliteCatalog(":memory:"), Path(tempfile.mkdtemp(prefix="snapshotd-fake-"))
            self._made_experiments = ExperimentService(self, catalog, Secrecy(FileVault(kept), catalog))
        return self._made_experiments

    # -- sandboxes and runs --------------------------------------------------------------------------------------------

    def create(
        self, request: base.SandboxRequest, *, experiment: t.ExperimentID | None = None
    ) -> tuple[t.Trajectory, t.Snapshot]:
        line = self._begin(request, None)
        line = self._replace(line.id, experiment=experiment)
        return line, self.taken[line.head]

    def run(self, request: base.RunRequest) -> t.Trajectory:
        argv = request.command or (str(request.agent), *request.args)
        if argv[0] == "missing":
            raise CommandNotFound("missing: no such program in the sandbox; check the image")
        line = self._begin(request.sandbox, t.AgentSpec(argv, 1))
        events: list[base.Event] = [
            {
                "event": "started",
                "trajectory": line.id,
                "snapshot": line.head,
                "runtime": line.spec.runtime,
                "image": "default",
            }
        ]
        self.log_of[line.id] = events
        text = Path(argv[0]).read_text() if request.agent else " ".join(argv) + "\n"
        events.append({"event": "output", "stream": "stdout", "data_b64": base64.b64encode(text.encode()).decode()})
        taken = self._take(line, self._call("run_tests", {"argv": list(argv)}), {b"workspace/a.txt": b"changed\n"})
        events.append(
            {
                "event": "snapshot",
                "id": taken.id,
                "seq": taken.seq,
                "tool": "run_tests",
                "status": "done",
                "files": {"added": 1, "changed": 2, "deleted": 0, "bytes": 1234},
                "pause_ms": 2.1,
                "method": "pivot",
            }
        )
        if request.agent is None or request.agent.name != "forever.py":
            self._finish(line.id, 3 if request.agent else 0, t.TrajectoryStatus.FINISHED)
        return self.lines[line.id]

    def _finish(self, trajectory_id: str, exit_code: int | None, status: t.TrajectoryStatus) -> None:
        with self.changed:
            self._replace(trajectory_id, status=status, exit_code=exit_code)
            own = [s for s in self.taken.values() if s.trajectory == trajectory_id]
            self.log_of[trajectory_id].append(
                {
                    "event": "finished",
                    "trajectory": trajectory_id,
                    "exit_code": exit_code,
                    "snapshots": len(own),
                    "status": status.value,
                }
            )
            self.changed.notify_all()

    def events(self, ref: str, *, follow: bool) -> Iterator[base.Event]:
        events = self.log_of.get(self.trajectory(ref).id, [])
        if not events:
            return
        at = 0
        while True:
            with self.changed:
                while follow and at == len(events) and not self.closed:
                    self.changed.wait()
                if at == len(events):
                    return
                event = events[at]
            at += 1
            yield event
            if event["event"] == "finished":
                return

    def exec(
        self, ref: str, request: ExecRequest, *, sink: base.OutputSink, caller: Caller | None = None
    ) -> base.ExecResult:
        line, argv, expected_head = self.trajectory(ref), request.argv, request.if_head
        if expected_head is not None and self.get(expected_head).id != line.head:
            raise Conflict(
                f"the head is {t.short(line.head)}: go on from there, or `snapshotd fork {expected_head[:12]}`"
            )
        if argv[0] in MIND_WORDS:
            self.mind_word(line, argv)
            argv = ("true", *argv)
        code = self._execute(argv, sink)
        limits = {"timeout_s": request.timeout_s, "idle_timeout_s": request.idle_timeout_s}
        limit = {key: value for key, value in limits.items() if value is not None}
        call = self._call(
            "exec", {"argv": list(argv), "cwd": request.cwd, "env": request.env, "user": request.user, **limit}, code
        )
        taken = self._take(line, call, {**self.contents[line.head], b"workspace/ran": " ".join(argv).encode()})
        self.bind_entries(line, taken)
        return base.ExecResult(code, taken, call)

    def exec_snapshot(
        self, ref: str, request: CommandFields, *, sink: base.OutputSink, caller: Caller | None = None
    ) -> base.ExecResult:
        self.get(ref)
        argv = request.argv
        code = self._execute(argv, sink)
        return base.ExecResult(code, None, self._call("exec", {"argv": list(argv)}, code))

    def _execute(self, argv: tuple[str, ...], sink: base.OutputSink) -> int:
        word, rest = argv[0], argv[1:]
        if word == "missing":
            raise CommandNotFound("missing: no such program in the sandbox; check the image")
        if word == "blocked":
            raise CommandNotRunnable("blocked: not executable; `chmod +x` it in the sandbox")
        if word == "crash":
            raise ZeroDivisionError("a defect")
        if word == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if word == "fail":
            sink("stderr", rest[1].encode() + b"\n")
            return int(rest[0])
        if word == "bytes":
            left = int(rest[0])
            while left:
                piece = min(left, 65536)
                sink("stdout", b"x" * piece)
                left -= piece
            return 0
        if word == "raw":
            sink("stdout", bytes.fromhex(rest[0]))
            return 0
        if word == "wait":
            sink("stdout", b"waiting\n")
            deadline, pause_s = time.monotonic() + 30, 0.005
            while not Path(rest[0]).exists():
                assert time.monotonic() < deadline, "the test never created the file"
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.08)  # hundreds may wait at once
            return 0
        sink("stdout", " ".join(argv).encode() + b"\n")
        return 0

    def take_snapshot(self, ref: str, *, name: str | None = None, if_changed: bool = False) -> t.Snapshot:
        line = self.trajectory(ref)
        if line.status is not t.TrajectoryStatus.RUNNING:
            raise Conflict(f"{line.name} is not running; `snapshotd tag {line.head[:12]} NAME` names its head")
        if if_changed and self.contents[line.head] == self.contents.get(self.taken[line.head].parent or ""):
            return self.taken[line.head]
        taken = self._take(line, self._call("snapshot", {"name": name}, None), self.contents[line.head])
        if name is not None:
            self.tag(taken.id, name, move=False)
        return self.taken[taken.id]

    def connect(self, ref: str, port: int, ended: Callable[[], object]) -> base.Connection:
        line = self.trajectory(ref)
        if line.status is not t.TrajectoryStatus.RUNNING:
            raise Conflict(f"{line.name} is not running; `snapshotd exec {line.name} -- CMD` starts it again")
        try:
            connected = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError as exc:
            raise Conflict(f"nothing listens on port {port} in {line.name}; start a server there") from exc
        self.connections[connected] = line.id, ended

        def close() -> None:
            self.connections.pop(connected, None)
            connected.close()

        return base.Connection(connected, close)

    def fork(
        self,
        ref: str,
        n: int,
        *,
        args: tuple[str, ...] | None,
        name: str | None,
        resume: bool = False,
        variants: tuple[base.Variant, ...] = (),
        idle_timeout_s: float | None = None,
        part: base.ForkPlace | None = None,
    ) -> base.Forked:
        origin = self.get(ref)
        if resume and self.lines[origin.trajectory].agent is None:
            raise UsageError(
                f"no program ever ran in {t.short(origin.trajectory)}, so there is nothing to resume; leave out --resume"
            )
        experiment = t.ExperimentID(t.new_id()) if part is None else part.experiment
        made = []
        for one in children(n, args, name, variants, part):
            line = t.Trajectory(
                t.TrajectoryID(t.new_id()),
                one.name,
                self.lines[origin.trajectory].spec,
                None if one.args is None else t.AgentSpec(one.args, 0),
                origin.id,
                t.TrajectoryStatus.RUNNING,
                NOW_NS,
                forked_from=origin.id,
                experiment=experiment,
            )
            self.lines[line.id] = line
            if args is not None and not resume:  # a program that ends at once
                self._take(line, self._call("run_tests", {"argv": list(one.args or ())}), self.contents[origin.id])
                self.log_of[line.id] = []
                self._finish(line.id, 0, t.TrajectoryStatus.FINISHED)
            made.append(self.lines[line.id])
        return base.Forked(experiment, tuple(made))

    def stop(self, ref: str, *, discard: bool = False) -> t.Trajectory:
        line = self.trajectory(ref)
        for trajectory, ended in list(self.connections.values()):
            if trajectory == line.id:
                ended()
        if line.status is t.TrajectoryStatus.RUNNING:
            if line.id in self.log_of:
                self._finish(line.id, 137, t.TrajectoryStatus.STOPPED)
            else:
                self._replace(line.id, status=t.TrajectoryStatus.STOPPED)
        return self.lines[line.id]

    def remove(self, ref: str, *, force: bool) -> None:
        line = self.trajectory(ref)
        if line.status is t.TrajectoryStatus.RUNNING and not force:
            raise Conflict(f"the trajectory {t.short(line.id)} is running; stop it first, or use --force")
        del self.lines[line.id]
        for key in [key for key, s in self.taken.items() if s.trajectory == line.id]:
            del self.taken[key]

    def check_removable(self, lines: Iterable[t.TrajectoryID]) -> None:
        gone: set[str] = set()
        for line in lines:
            gone.add(line)
            own = {taken.id for taken in self.taken.values() if taken.trajectory == line}
            for fork in self.lines.values():
                if fork.forked_from in own and fork.id not in gone:
                    raise Conflict(f"trajectory {t.short(fork.id)} was forked from it: remove that first")

    # -- looking -------------------------------------------------------------------------------------------------------

    def trajectories(self) -> list[t.Trajectory]:
        return list(self.lines.values())

    def sandboxes(self) -> list[base.SandboxInfo]:
        return [
            base.SandboxInfo(line, "c" * 32, 4242, NOW_NS, line.agent is not None)
            for line in self.lines.values()
            if line.status is t.TrajectoryStatus.RUNNING
        ]

    def trajectory(self, ref: str) -> t.Trajectory:
        lines = list(self.lines.values())
        found = [line for line in lines if line.name == ref] or [line for line in lines if line.id.startswith(ref)]
        if len(found) > 1:
            raise Ambiguous(f"{ref!r} fits {len(found)} trajectories; type more of the id")
        if not found:
            raise NotFound(f"there is no trajectory {ref!r}; `snapshotd ls` lists those there are")
        return found[0]

    def get(self, ref: str) -> t.Snapshot:
        for taken in list(self.taken.values()):  # other threads take snapshots meanwhile
            if ref in taken.tags or taken.id.startswith(ref):
                return taken
        try:
            return self.taken[self.trajectory(ref).head]
        except NotFound:
            raise NotFound(f"there is no snapshot {ref!r}; `snapshotd tree` shows those there are") from None

    def overview(self, ref: str | None = None) -> list[base.Overview]:
        chosen = self.lines.values() if ref is None else [self.trajectory(ref)]
        return [base.Overview(line, len(self.log(line.id)), None, None) for line in chosen]

    def look_at(self, snapshots: Sequence[t.Snapshot]) -> list[base.LookedAt]:
        return [base.LookedAt(one, None, None) for one in snapshots]

    def log(self, ref: str, last: int | None = None, *, before: int | None = None) -> list[t.Snapshot]:
        line = self.trajectory(ref)
        own = [s for s in list(self.taken.values()) if s.trajectory == line.id]
        own = own if before is None else [s for s in own if s.seq < before]
        return own if last is None else own[-last:]

    def all(self) -> list[t.Snapshot]:
        return list(self.taken.values())

    def conversation(self, ref: str, start: int = 0, count: int | None = None) -> list[t.Message]:
        said = self.messages.get(
            self.get(ref).id, [t.Message("user", "fix it"), t.Message("assistant", {"text": "done\x1b[31m"})]
        )
        return said[start : None if count is None else start + count]

    def output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        self.get(ref)
        yield from (b"first ", b"second\n")

    def diff(self, a: str, b: str | None) -> Iterator[Change]:
        self.get(a)
        yield Change(b"workspace/new\xff.txt", ChangeKind.ADDED, None, entry(10))
        yield Change(b"workspace/a\x1b.txt", ChangeKind.CHANGED, entry(6), entry(2048))
        yield Change(b"tmp/gone", ChangeKind.DELETED, entry(0, Kind.DIRECTORY), None)

    def patch(self, a: str, b: str | None, *, root: bytes, write: Callable[[bytes], object]) -> int:
        self.get(a)
        write(b"--- a/a.txt\n")
        write(b"+++ b/a.txt \xff\n")
        return 1

    def cat(self, ref: str, path: bytes) -> Iterator[bytes]:
        files = self.contents[self.get(ref).id]
        if path == b"workspace/broken":
            yield b"begin"
            raise ZeroDivisionError("in the middle")
        if path == b"workspace":
            raise UsageError("/workspace is a directory; name a file in it")
        if path not in files:
            raise NotFound(f"there is no file {'/' + path.decode(errors='replace')} in snapshot {ref}")
        yield files[path]

    def lstat(self, ref: str, path: bytes) -> tuple[Entry, bytes | None]:
        files = self.contents[self.get(ref).id]
        if path == b"workspace":
            return entry(0, Kind.DIRECTORY), None
        if path == b"workspace/link":
            return entry(9, Kind.SYMLINK), b"a\xff"
        if path not in files:
            raise NotFound(f"there is no file {'/' + path.decode(errors='replace')} in snapshot {ref}")
        return entry(len(files[path])), None

    def restore(self, ref: str, to: Path, *, path: bytes, namespace_pid: int = 0) -> RestoreReport:
        self.get(ref)
        if to.exists() and any(to.iterdir()):
            raise Conflict(f"the folder {to} is not empty; name one that is, or that does not exist")
        to.mkdir(exist_ok=True)
        (to / "path").write_bytes(path)
        return RestoreReport(files=1, directories=1, bytes=len(path), warnings=("one fifo was left out",))

    def tag(self, ref: str, name: str, *, move: bool) -> t.SnapshotID:
        taken = self.get(ref)
        holder = next((s for s in self.taken.values() if name in s.tags), None)
        if holder is not None and not move:
            raise Conflict(f"the tag {name} belongs to snapshot {t.short(holder.id)}; --move takes it away")
        if holder is not None:
            self.taken[holder.id] = dataclasses.replace(holder, tags=tuple(x for x in holder.tags if x != name))
        self.taken[taken.id] = dataclasses.replace(self.taken[taken.id], tags=(*self.taken[taken.id].tags, name))
        return taken.id

    def untag(self, name: str) -> None:
        for taken in list(self.taken.values()):
            if name in taken.tags:
                self.taken[taken.id] = dataclasses.replace(taken, tags=tuple(x for x in taken.tags if x != name))
                return
        raise NotFound(f"there is no tag {name!r}; `snapshotd log` shows tags")

    # -- durable storage -----------------------------------------------------------------------------------------------

    def usage(self) -> UsageInfo:
        states = {state.value: sum(s.state is state for s in self.taken.values()) for state in t.SnapshotState}
        return UsageInfo(3 << 30, 20 << 30, 1 << 30, 12 << 10, states, states["captured"])

    def policy(self, ref: str | None) -> Policy:
        own = None if ref is None else self.policies.get(self.trajectory(ref).id)
        return own or self.policies.get(None) or Policy()

    def set_policy(self, ref: str | None, policy: Policy | None) -> None:
        key = None if ref is None else self.trajectory(ref).id
        if policy is None:
            self.policies.pop(key, None)
        else:
            self.policies[key] = policy

    def prune(self, policy: Policy | None, *, dry_run: bool, grace_s: float, progress: base.ProgressSink) -> PruneInfo:
        last = (policy or self.policy(None)).keep_last
        progress(f"looking at the snapshots, grace {grace_s:g} s")
        gone: list[PrunedInfo] = []
        for line in self.lines.values():
            own = [s for s in self.log(line.id) if s.state is t.SnapshotState.STORED]
            old = own[: max(0, len(own) - (1 if last is None else last))]
            gone += [PrunedInfo(s.id, line.id, s.seq, iso_time(s.created_at_ns), "beyond the newest") for s in old]
        for item in gone if not dry_run else []:
            gone_id = t.SnapshotID(item.snapshot)
            self.taken[gone_id] = dataclasses.replace(self.taken[gone_id], state=t.SnapshotState.PRUNED)
        return PruneInfo(dry_run, tuple(gone), len(self.taken) - len(gone), 1000 * len(gone), 2 << 20, 1 << 30)

    def check(self, *, read_data: bool, progress: base.ProgressSink) -> CheckInfo:
        progress("pack 1 of 2")
        progress("pack 2 of 2")
        damaged = (
            [] if self.repaired else [line for line in self.lines.values() if (line.name or "").startswith("damaged")]
        )
        found = [
            DamageInfo("pack-7", "ab" * 32, "its bytes are not what was stored", line.head, "/workspace/a\udcff")
            for line in damaged
        ]
        found += [DamageInfo("pack-8", None, "the pack is too short", None, None)] * bool(damaged)
        return CheckInfo(100, 2, 5 << 20 if read_data else 0, tuple(found), tuple(line.head for line in damaged))

    def repair(self, progress: base.ProgressSink) -> RepairInfo:
        found = self.check(read_data=False, progress=progress)
        self.repaired = bool(found.damages)
        return RepairInfo(("the index was rebuilt",) * self.repaired, found.unreadable)

    def export(
        self,
        ref: str,
        *,
        form: base.ExportForm,
        whole: bool,
        since: str | None,
        forks: bool,
        write: Callable[[bytes], object],
        progress: base.ProgressSink,
    ) -> tuple[str, ...]:
        line = self.lines[self.get(ref).trajectory]
        if form != "bundle" and (whole or since is not None):
            raise UsageError(f"an export as {form} holds one snapshot; leave out --trajectory and --since")
        if form in ("atif", "jsonl"):
            write(b'{"id":"%s","forks":%d}\n' % (line.id.encode(), forks))
            return ()
        progress("1 of 3 MiB")
        write(f"BUNDLE {form} {whole} {since}\n".encode().ljust(1 << 20, b"."))
        if (line.name or "").startswith("damaged"):
            raise DataLoss(
                f"/workspace/a.txt of snapshot {t.short(line.head)} cannot be read: pack-7 is damaged; run `snapshotd repair`"
            )
        write(b"x" * (2 << 20))
        return ("one socket was left out",)

    def import_bundle(
        self, read: Callable[[int], bytes], name: str | None, progress: base.ProgressSink
    ) -> base.Imported:
        magic = read(6)
        if magic != b"BUNDLE":
            raise UsageError(
                "this is no bundle of snapshotd: it does not begin as one; make one with `snapshotd export`"
            )
        first, count = read(9), 15
        if first.startswith(b" damaged\n"):
            raise DataLoss("the bundle is damaged at byte 6; export it again")
        if first.startswith(b" crash\n"):
            raise ZeroDivisionError("a defect")
        while piece := read(1 << 20):
            count += len(piece)
            progress(f"{count} bytes")
        line = self._begin(base.SandboxRequest(name=name), None)
        self.imported[line.id] = count
        return base.Imported((line,), 1, (f"{count} bytes came",))

    def mount(self, directory: Path, namespace_pid: int) -> None:
        where = (directory, os.readlink(f"/proc/{namespace_pid}/ns/mnt"))
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory; make it first")
        if where in self.mounts:
            raise Conflict(f"something is mounted on {directory} already; choose another directory")
        self.mounts[where] = namespace_pid

    def unmount(self, directory: Path, namespace_pid: int) -> None:
        if self.mounts.pop((directory, os.readlink(f"/proc/{namespace_pid}/ns/mnt")), None) is None:
            raise NotFound(f"nothing of snapshotd is mounted on {directory}; `findmnt -t fuse` lists what is")

    # -- images --------------------------------------------------------------------------------------------------------

    def ensure_image(self, name: str, progress: base.ProgressSink) -> t.Image:
        if name == "new":
            progress("building new")
        return t.Image(t.ImageID(t.new_id()), name, f"recipe {name}", "y", 2000, 20, NOW_NS)

    def build_image(self, recipe: str, name: str | None, progress: base.ProgressSink) -> t.Image:
        progress(f"building {recipe}")
        if recipe == "nothing":
            raise NotFound("there is no recipe 'nothing'; name a folder, or default or minimal")
        image = t.Image(t.ImageID(t.new_id()), name or recipe, f"recipe {recipe}", "y", 2000, 20, NOW_NS)
        self.made_images.append(image)
        return image

    def import_image(self, source: str, name: str | None, progress: base.ProgressSink) -> t.Image:
        return self.build_image(source, name, progress)

    def remove_image(self, ref: str) -> None:
        if ref not in {image.name for image in self.made_images}:
            raise NotFound(f"there is no image {ref!r}; `snapshotd image ls` lists those there are")
        self.made_images = [image for image in self.made_images if image.name != ref]

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        imported = {line: count for line, count in self.imported.items() if line in self.lines}
        mounts = {str(directory): pid for (directory, _), pid in self.mounts.items()}
        return {
            "engine": "fake",
            "trajectory_count": len(self.lines),
            "imported": imported,
            "mounts": mounts,
            "secret_names": self.secret_names,
            "providers": {
                line: [dataclasses.asdict(item) for item in items] for line, items in self.providers.items() if items
            },
        }

    def flush(self, ref: t.TrajectoryID | None = None) -> None:
        for taken in list(self.taken.values()):
            if ref in (None, taken.trajectory) and taken.state is t.SnapshotState.CAPTURED:
                if (self.lines[taken.trajectory].name or "").startswith("full"):
                    raise OutOfSpace(
                        "the disk is full, so a snapshot could not be stored; free some space and repeat the command"
                    )
                self.taken[taken.id] = dataclasses.replace(taken, state=t.SnapshotState.STORED)

    def close(self) -> None:
        if self._made_experiments is not None:
            self._made_experiments.close()
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.watching.close()
        for _, ended in list(self.connections.values()):
            ended()
