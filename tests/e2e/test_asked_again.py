"""Answers that get lost: with a daemon that is killed between its work and the answer, and on a connection that is cut.
The client asks again, and nothing is made twice."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.client.exchange import new_key, request_bytes
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import run
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound
from tests import long
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.usefixtures("both_clients")
POINT = "engine.request.done"


class Proxy:
    """Forwards connections to a daemon's socket. `lose`: what is to become of the next answers."""

    def __init__(self, path: Path, daemon: Path) -> None:
        self.path, self._daemon = path, daemon
        self.lose: list[Callable[[bytes], bytes]] = []
        """For each: the part of it that the client gets. All of the answer is there by then."""
        self.cut_at_once = 0
        """So many connections are cut when the daemon has the request, while it works."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if client.recv(1, socket.MSG_PEEK) == b"":
                client.close()
                return
            thread = threading.Thread(target=self._forward, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon, contextlib.suppress(OSError):
            daemon.connect(str(self._daemon))
            if self.cut_at_once:
                self.cut_at_once -= 1
                daemon.sendall(_whole_request(client))
                return
            back = threading.Thread(target=_pump, args=(client, daemon))
            back.start()
            if self.lose:
                part = self.lose.pop(0)
                client.sendall(part(b"".join(iter(lambda: daemon.recv(1 << 16), b""))))
            else:
                _pump(daemon, client)
            for one in (client, daemon):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            back.join()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))
        for thread in self._threads:
            thread.join()
        self._listener.close()


def _pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)


def _whole_request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def proxy(snap: Snap, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(tmp_path / "p.sock", snap.state_dir / "snapshotd.sock")
    yield made
    made.close()


def added(client: Snapshotd, box: Sandbox) -> tuple[int, int, int]:
    """How many trajectories there are, and snapshots and background commands of one of them."""
    return len(client.trajectories()), len(box.snapshots()), len(box.commands())


@dataclass(frozen=True)
class Verb:
    """Something that makes something. `call` is one request, `check` gets its answer; `adds`: what there is more of."""

    name: str
    call: Callable[[Snapshotd, Sandbox], Any]
    check: Callable[[Sandbox, Any], None]
    adds: tuple[int, int, int]


def executed(box: Sandbox, done: Any) -> None:
    assert (done.exit_code, done.stdout, done.stderr) == (4, "1\n2\n3\n", "told\n"), "each byte once"
    assert done.snapshot_id == box.head().id
    calls = [one.info.tool.name for one in box.snapshots()].count("exec")
    assert box.files.read("marks") == b"x\n" * calls, "each ran once"


def written(box: Sandbox, done: Any) -> None:
    assert (done.file_count, done.bytes, done.snapshot.id) == (1, 3, box.head().id)
    assert done.directories == 1
    assert len(done.warnings) == 1, done.warnings
    assert "pipe" in done.warnings[0]


def archive() -> io.BytesIO:
    """A folder, a file, and a pipe, which no sandbox gets."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, data in (
            ("d", tarfile.DIRTYPE, b""),
            ("d/f", tarfile.REGTYPE, b"123"),
            ("pipe", tarfile.FIFOTYPE, b""),
        ):
            item = tarfile.TarInfo(name)
            item.type, item.size = kind, len(data)
            tar.addfile(item, io.BytesIO(data))
    file.seek(0)
    return file


def started(box: Sandbox, command: Any) -> None:
    assert box.command(command.id).wait().exit_code == 0
    assert box.files.read("lines") == b"y\n" * len(box.commands()), "each ran once"


def forked(box: Sandbox, made: Any) -> None:
    assert [one.forked_from for one in made.trajectories] == [box.head().id] * 2
    assert {one.experiment for one in made.trajectories} == {made.experiment}


def is_head(name: str) -> Callable[[Sandbox, Any], None]:
    def check(box: Sandbox, snapshot: Any) -> None:
        head = box.head()
        assert (snapshot.id, head.info.tool.name) == (head.id, name)

    return check


def merged(box: Sandbox, done: Any) -> None:
    is_head("merge")(box, done.snapshot)
    assert [change.path for change in done.changes] == [b"theirs"]
    assert box.files.read("theirs") == b"x\n"


def anything(box: Sandbox, answer: Any) -> None:
    assert answer is not None


EXEC = Verb("exec", lambda _, box: box.exec("echo x >> marks; echo told >&2; seq 3; exit 4"), executed, (0, 1, 0))
VERBS = (
    EXEC,
    Verb("create", lambda client, box: client.create(runtime="runc", name=f"n-{new_key()}"), anything, (1, 0, 0)),
    Verb("fork", lambda client, box: client.fork(box.id, 2), forked, (2, 0, 0)),
    Verb("write_archive", lambda client, box: client.write_archive(box.id, ".", archive()), written, (0, 1, 0)),
    Verb("background", lambda _, box: box.exec("echo y >> lines", background=True), started, (0, 1, 1)),
    Verb("rewind", lambda client, box: client.rewind(box.id, "first", mode="files"), is_head("rewind"), (0, 1, 0)),
    Verb("undo", lambda client, box: client.undo(box.id), is_head("undo"), (0, 1, 0)),
    Verb("write", lambda _, box: box.files.write("n", b"12345").snapshot, is_head("write"), (0, 1, 0)),
    Verb("merge", lambda client, box: client.merge("other", box.id), merged, (0, 1, 0)),
    Verb("make_dir", lambda _, box: box.files.make_dir("deep/er"), is_head("make_dir"), (0, 1, 0)),
    Verb("tag", lambda client, box: client.tag(box.id, "asked", move=True), anything, (0, 0, 0)),
    Verb("run", lambda client, box: client.run(command=["true"], runtime="runc"), anything, (1, 0, 0)),
)
NOTHING: Callable[[bytes], bytes] = lambda _: b""  # noqa: E731
A_PART: Callable[[bytes], bytes] = lambda answer: answer[: len(answer) * 3 // 4]  # noqa: E731


def make_other(client: Snapshotd, box: Sandbox) -> None:
    """The branch that `merge` brings to `box`."""
    (other,) = client.fork(box.id, name="other").trajectories
    Sandbox.connect(other.id, client=client).exec("echo x > theirs", check=True)


@pytest.fixture
def box(snap: Snap, runtime: str) -> Iterator[Sandbox]:
    """A sandbox of the test's own; whatever else the test makes is removed, too."""
    client = Snapshotd(snap.state_dir, autostart=False)
    before = {one.id for one in client.trajectories()}
    made = Sandbox.create(runtime=runtime, client=client)
    client.tag(made.id, "first")
    make_other(client, made)
    yield made
    for one in reversed([one for one in client.trajectories() if one.id not in before]):
        client.remove(one.id, force=True)


def test_a_cut_answer_is_asked_for_again(snap: Snap, box: Sandbox, proxy: Proxy) -> None:
    """Nothing of it came, or a part; or the next one is lost, too."""
    client, through = Snapshotd(snap.state_dir, autostart=False), Snapshotd(socket=proxy.path)
    lossy = Sandbox.connect(box.id, client=through)
    losses = [[NOTHING], [A_PART], [NOTHING, A_PART]]
    for verb, lost in [(EXEC, losses[1]), (EXEC, losses[2]), *((verb, losses[0]) for verb in VERBS)]:
        before = added(client, box)
        proxy.lose[:] = lost
        answer = verb.call(through, lossy)
        assert proxy.lose == [], verb.name
        verb.check(box, answer)
        after = added(client, box)
        assert tuple(b - a for a, b in zip(before, after, strict=True)) == verb.adds, verb.name


def test_a_connection_that_is_cut_while_the_daemon_works(snap: Snap, box: Sandbox, proxy: Proxy) -> None:
    """It is not undone, as if the client had gone: the second request waits for what the first one makes."""
    client, through = Snapshotd(snap.state_dir, autostart=False), Snapshotd(socket=proxy.path)
    log = snap.state_dir / "daemon.log"

    def answers() -> int:
        lines = [line for line in log.read_text().splitlines() if '"/v1/runs"' in line]
        return sum(json.loads(line)["message"] == "request" for line in lines)

    before, answered = added(client, box), answers()
    proxy.cut_at_once = 1
    started = through.run(command=["sleep", "600"], runtime="runc")
    assert proxy.cut_at_once == 0
    wait_until(lambda: answers() == answered + 2, "both have ended")
    assert client.trajectory(started.id).status == "running"
    assert added(client, box)[0] - before[0] == 1


def test_one_that_is_lost_too_often_is_given_up(box: Sandbox, proxy: Proxy) -> None:
    through = Snapshotd(socket=proxy.path)
    proxy.lose[:] = [NOTHING] * 10
    with pytest.raises(DaemonUnavailable, match="in the middle of the answer"):
        through.tag(box.id, "asked")
    assert len(proxy.lose) == 10 - 4, "asked once, and three times again"


def test_what_is_no_creation_is_sent_once(box: Sandbox, proxy: Proxy) -> None:
    through = Snapshotd(socket=proxy.path)
    proxy.lose[:] = [NOTHING] * 2
    with pytest.raises(DaemonUnavailable):
        through.exec_snapshot(box.id, ["true"])
    assert len(proxy.lose) == 1


def ask(snap: Snap, body: dict[str, Any], key: str, *, recall: bool = False) -> dict[str, Any]:
    """Create a sandbox under this key."""
    transport = Transport(snap.state_dir / "snapshotd.sock")
    data = request_bytes("POST", "/sandboxes", None, body, key=key, recall=recall)

    async def answer() -> bytes:
        async with await transport._exchange(data, None) as reply:
            return await reply.read_all()

    answered: dict[str, Any] = json.loads(run(answer()))
    return answered


def test_two_requests_with_one_key_at_the_same_time(snap: Snap, box: Sandbox) -> None:
    client, key = Snapshotd(snap.state_dir, autostart=False), new_key()
    before = added(client, box)
    with pytest.raises(NotFound, match="nothing is recorded under this idempotency key"):
        ask(snap, {}, key, recall=True)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: ask(snap, {"runtime": "runc"}, key), range(4)))
    assert len({one["trajectory"]["id"] for one in made}) == 1
    assert len({one["snapshot"]["id"] for one in made}) == 1
    assert added(client, box)[0] - before[0] == 1
    with pytest.raises(Conflict, match=f"the idempotency key '{key}' belongs to another request"):
        ask(snap, {"runtime": "runc", "env": {"A": "1"}}, key)
    failed = new_key()
    with pytest.raises(NotFound, match="no image"):
        ask(snap, {"image": "none"}, failed)
    assert ask(snap, {"runtime": "runc"}, failed)["trajectory"]["id"] != made[0]["trajectory"]["id"]


@pytest.mark.runc
@pytest.mark.same_verbs
def test_a_daemon_that_is_killed_before_its_answer(own_snap: Snap) -> None:
    """The next one answers from what is recorded with the key of the request, and makes nothing."""
    client = Snapshotd(own_snap.state_dir)
    box = Sandbox.create(runtime="runc", client=client)
    client.tag(box.id, "first", move=True)
    make_other(client, box)
    log, armed = own_snap.state_dir / "daemon.log", {**own_snap.env, "SNAPSHOTD_FAILPOINT": POINT}
    for verb in VERBS[: long.size(3, len(VERBS))]:
        before, died = added(client, box), log.read_text().count(f"failpoint {POINT} reached")
        own_snap.kill_daemon()
        Snap(own_snap.state_dir, armed)("ls")
        answer = verb.call(client, box)
        assert log.read_text().count(f"failpoint {POINT} reached") == died + 1, verb.name
        verb.check(box, answer)
        after = added(client, box)
        assert tuple(b - a for a, b in zip(before, after, strict=True)) == verb.adds, verb.name
    for one in reversed(client.trajectories()):
        client.remove(one.id, force=True)


@pytest.mark.runc
def test_a_command_is_not_run_again_when_nothing_is_recorded(own_snap: Snap) -> None:
    """Its effects outside may have happened: the client says so, and lets its user decide."""
    client = Snapshotd(own_snap.state_dir)
    box = Sandbox.create(runtime="runc", client=client)
    own_snap.kill_daemon()
    Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_FAILPOINT": "engine.step.sealed"})("ls")
    with pytest.raises(DaemonUnavailable, match="in the middle of the answer"):
        box.exec("echo x >> marks")
    assert len(box.snapshots()) == 1
    assert not box.files.exists("marks")
    box.remove(force=True)
