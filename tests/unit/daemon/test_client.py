"""The Python client against the real server: results, errors by class, loss of the daemon, starting it."""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import ExecFailed, Sandbox, Snapshot, Snapshotd, StillRunning, autostart
from snapshotd.client.results import FileStatus
from snapshotd.client.transport import Transport
from snapshotd.daemon.lock import StateLock, lock_holder
from snapshotd.errors import (
    Ambiguous,
    CommandNotFound,
    CommandNotRunnable,
    Conflict,
    DaemonUnavailable,
    InternalError,
    LimitExceeded,
    NotFound,
    Unsupported,
    UsageError,
    VersionMismatch,
)
from tests.unit.daemon.process import Daemon, start_small_ones

pytestmark = pytest.mark.usefixtures("both_clients")


def test_sizes_are_taken_as_the_command_line_takes_them(client: Snapshotd) -> None:
    for size in ("512m", "1GiB", 64 << 20):
        with pytest.raises(Unsupported, match="a limit of memory"):
            Sandbox.create(memory=size, client=client)
    for size in ("lots", "", "-1m", "9" * 5000):
        with pytest.raises(UsageError, match=r"memory=.*'512m'"):
            Sandbox.create(memory=size, client=client)


def test_a_timeout_is_checked_before_anything_runs(box: Sandbox) -> None:
    for timeout in (0, -1, float("nan"), float("inf"), "5", True):
        with pytest.raises(UsageError, match=r"^timeout="):
            box.exec("true", timeout=timeout)
    assert [snapshot.info.seq for snapshot in box.snapshots()] == [0]


def test_an_argument_of_the_wrong_kind_is_named_with_its_value(
    client: Snapshotd, box: Sandbox, short_dir: Path
) -> None:
    """Never a TypeError from deep inside, and nothing is done."""
    command = box.exec(["forever"], background=True)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("input=5", lambda: box.exec("true", input=5)),
        ("input=5", lambda: box.head().exec("true", input=5)),
        ("timeout='5'", lambda: box.exec("true", timeout="5")),
        ("timeout='5'", lambda: box.exec("true", timeout="5", background=True)),
        ("timeout='5'", lambda: box.head().exec("true", timeout="5")),
        ("timeout='5'", lambda: box.wait(timeout="5")),
        ("timeout='5'", lambda: command.wait(timeout="5")),
        ("idle_timeout='5'", lambda: box.exec("true", idle_timeout="5")),
        ("idle_timeout='5'", lambda: box.fork(idle_timeout="5")),
        ("idle_timeout=-1", lambda: client.create(idle_timeout=-1)),
        ("request_timeout='5'", lambda: Snapshotd(request_timeout="5")),
        ("env=<class 'int'>", lambda: box.exec("true", env=5)),
        ("env['A']=<class 'int'>", lambda: box.exec("true", env={"A": 1})),
        ("env=<class 'list'>", lambda: client.create(env=["A=1"])),
        ("secrets['B']=<class 'bytes'>", lambda: client.create(secrets={"A": "hidden", "B": b"hidden"})),
        ("command=5", lambda: box.exec(5)),
        ("command[1]=PosixPath('/x')", lambda: box.exec(["cat", Path("/x")])),
        ("argv='ls -l'", lambda: client.exec(box.id, "ls -l")),
        ("args='x'", lambda: client.run(agent="a.py", args="x")),
        ("command='x'", lambda: client.run(command="x")),
        ("n='2'", lambda: box.fork("2")),
        ("n=0", lambda: box.fork(0)),
        ("number='9'", lambda: command.signal("9")),
        ("data=5", lambda: command.write(5)),
        ("data=5", lambda: box.files.write("a", 5)),
        ("files['a']=<class 'int'>", lambda: box.files.write_many({"a": 5})),
        ("path=5", lambda: box.files.read(5)),
        ("path=5", lambda: box.head().cat(5)),
        ("path=5", lambda: box.head().restore(short_dir / "out", path=5)),
        ("path=5", lambda: box.head().apply(short_dir, path=5)),
        ("to=5", lambda: box.head().restore(5)),
        ("workspace=5", lambda: client.create(workspace=5)),
        ("on_stdout='x'", lambda: box.exec("true", on_stdout="x")),
        ("on_stderr=5", lambda: box.wait(on_stderr=5)),
        ("mode='0644'", lambda: box.files.write("a", "x", mode="0644")),
        ("mode=True", lambda: box.files.write("a", "x", mode=True)),
        ("mode=420.0", lambda: box.files.write("a", "x", mode=420.0)),
        ("mode=4096", lambda: box.files.write("a", "x", mode=0o10000)),
        ("mode=-1", lambda: client.write_file(box.id, "a", "x", mode=-1)),
        ("number=5.5", lambda: box.port(5.5)),
        ("port=0", lambda: box.port(0)),
        ("number=True", lambda: box.port(True)),
        ("local='1'", lambda: box.port(80, "1")),
        ("local=65536", lambda: box.port(80, 65536)),
        (r"input='\ud800'", lambda: box.exec("true", input="\ud800")),
        (r"data='\ud800'", lambda: box.files.write("a", "\ud800")),
        ("providers=5", lambda: client.create(providers=5)),
        ("providers[0]=<class 'int'>", lambda: client.create(providers=[5])),
        ("providers[0]=<class 'str'>", lambda: client.create(providers=["openai"])),
        ("providers='openai'", lambda: client.run(agent="a.py", providers="openai")),
        ("client=5", lambda: Sandbox.create(client=5)),
        ("client=5", lambda: Sandbox.run("a.py", client=5)),
        ("client=5", lambda: Sandbox.connect("x", client=5)),
        ("client=5", lambda: Snapshot.get("x", client=5)),
        ("file=5", lambda: box.files.archive("a.txt", 5)),
        ("write=5", lambda: client.read_archive(box.id, "a.txt", 5)),
        ("tar=5", lambda: client.write_archive(box.id, "/workspace", 5)),
        ("command={'a': 1}", lambda: box.exec({"a": 1})),
        ("command={'a'}", lambda: box.exec({"a"})),
        ("command={'a': 1}", lambda: box.exec({"a": 1}, background=True)),
        ("args={'a'}", lambda: client.run(agent="a.py", args={"a"})),
        ("background='no'", lambda: box.exec("true", background="no")),
        ("detach='no'", lambda: Sandbox.run("a.py", detach="no", client=client)),
        ("discard='x'", lambda: box.stop(discard="x")),
        ("force='no'", lambda: box.remove(force="no")),
        ("whole='no'", lambda: box.head().export(short_dir / "out", whole="no")),
        ("hooks='no'", lambda: client.apply(box.id, short_dir, hooks="no")),
        ("dry_run=0", lambda: box.head().apply(short_dir, dry_run=0)),
        ("name=<object object", lambda: client.create(name=object())),
    ]
    before = [snapshot.id for snapshot in box.snapshots()]
    for said, call in cases:
        with pytest.raises(UsageError) as raised:
            call()
        assert raised.value.message.startswith(said), (said, raised.value.message)
        assert "give " in raised.value.message
        assert "hidden" not in raised.value.message
    assert [snapshot.id for snapshot in box.snapshots()] == before
    command.kill()


def test_sandbox_as_an_object(box: Sandbox, short_dir: Path) -> None:
    heard: list[bytes] = []
    result = box.exec("echo $A; pwd; echo hi > b.txt", on_stdout=heard.append, env={"A": "1"})
    assert (result.stdout.splitlines()[0], result.stderr, result.exit_code) == ("1", "", 0)
    assert b"".join(heard).decode() == result.stdout
    assert result.stdout.endswith("/workspace\n")
    assert box.head().id == result.snapshot_id
    assert box.head().info.tool.arguments["argv"][:2] == ["/bin/sh", "-c"]
    assert [snapshot.info.seq for snapshot in box.snapshots()] == [0, 1]
    assert box.files.read("a.txt") == box.files.read("/workspace/a.txt") == b"hello\n"
    assert box.files.exists("a.txt")
    assert box.files.exists("/workspace"), "a directory is something, too"
    assert not box.files.exists("missing.txt")
    left, right = box.fork(2, name=f"{box.name}-fork")
    assert (left.name, right.name) == (f"{box.name}-fork-0", f"{box.name}-fork-1")
    head = box.head()
    assert [(change.change, change.path) for change in head.diff()] == [("added", "/workspace/b.txt")]
    assert head.patch().endswith(b"+hi\n")
    assert head.cat("/workspace/b.txt") == b"hi\n"
    assert head.restore(short_dir / "out", path="/workspace").file_count == 3
    assert (short_dir / "out" / "b.txt").read_text() == "hi\n"
    assert head.exec("ls").snapshot_id is None
    assert box.rewind(box.snapshots()[0]).info.tool.name == "rewind"
    assert not box.files.exists("b.txt")
    with box:
        assert box.info.status == "running"
    assert box.info.status == "stopped"


def test_files_are_written_and_read(box: Sandbox, short_dir: Path) -> None:
    done = box.files.write("odd\udcff", "text", mode=0o600)
    assert done.snapshot.tool.arguments["path"] == "/workspace/odd\udcff"
    assert box.files.read_text(b"odd\xff") == "text"
    with (short_dir / "f").open("wb") as file:
        file.write(bytes(3 << 20))
    with (short_dir / "f").open("rb") as file:
        assert box.files.write("/large", file, wait="stored").snapshot.state == "stored"
    assert sum(map(len, box.files.stream("/large"))) == 3 << 20
    many = box.files.write_many({"d/one": "1", "/two": b"2"}).snapshot.tool.arguments
    assert many["paths"] == ["/workspace/d/one", "/two"]
    assert [(item.path, item.name, item.kind, item.mode) for item in box.files.list()] == [
        ("/workspace/a.txt", "a.txt", "file", "0644"),
        ("/workspace/d", "d", "directory", "0755"),
        ("/workspace/link", "link", "symlink", "0777"),
        ("/workspace/odd\udcff", "odd\udcff", "file", "0600"),
    ]
    assert (box.files.stat("d").is_dir, box.files.stat("/").name) == (True, "/")
    assert box.files.make_dir("e").tool.name == "make_dir"
    assert box.files.rename("d/one", "e/one").tool.arguments == {"path": "/workspace/d/one", "to": "/workspace/e/one"}
    before = box.head()
    assert box.files.remove("e").tool.name == "remove"
    assert (box.files.exists("e"), before.files.exists("e")) == (False, True)

    heard: list[int] = []
    (short_dir / "in/sub").mkdir(parents=True)
    (short_dir / "in/sub/x").write_text("x")
    box.files.upload(short_dir / "in", "in", moved=heard.append)
    box.files.upload(short_dir / "in/sub/x", "y")
    assert box.files.read("in/sub/x") == box.files.read("y") == b"x"
    report = box.files.download("in", short_dir / "out", moved=heard.append)
    assert report.warnings == ()
    assert (short_dir / "out/sub/x").read_text() == "x"
    box.files.download("y", short_dir / "z")
    assert (short_dir / "z").read_text() == "x"
    assert len(heard) >= 2
    for wrong in ({}, [("x/../../y", "")]):
        with pytest.raises(UsageError):
            box.files.write_many(wrong)
    for source in (short_dir / "nothing", "\0"):
        with pytest.raises(UsageError):
            box.files.upload(source, "x")
    with pytest.raises(UsageError):
        box.files.write("../x", "")


def test_the_status_of_a_path(client: Snapshotd, box: Sandbox) -> None:
    owner = os.geteuid(), os.getegid()
    assert client.lstat(box.id, "/workspace/a.txt") == FileStatus("file", "0644", *owner, 6, None)
    assert client.lstat(box.id, b"/workspace/link").target == b"a\xff"
    with pytest.raises(NotFound, match="missing"):
        client.lstat(box.id, "/workspace/missing")


def test_a_string_goes_through_the_shell(box: Sandbox) -> None:
    assert box.exec("echo a | tr a b").stdout == "b\n"


def test_check_raises_and_the_snapshot_is_there(box: Sandbox) -> None:
    with pytest.raises(ExecFailed, match="exit code 4: oops") as caught:
        box.exec(["fail", "4", "oops"], check=True)
    assert caught.value.result.snapshot_id == box.head().id


def test_output_that_is_not_text(box: Sandbox) -> None:
    assert box.exec(["raw", "ff00"]).stdout_bytes == b"\xff\x00"


def test_errors_come_back_as_their_classes(client: Snapshotd, box: Sandbox) -> None:
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (NotFound, lambda: client.trajectory("nobody")),
        (NotFound, lambda: client.trajectory("../../etc")),
        (Conflict, lambda: client.create(name=box.name)),
        (Conflict, lambda: client.remove(box.id)),
        (CommandNotFound, lambda: box.exec(["missing"])),
        (CommandNotRunnable, lambda: box.exec(["blocked"])),
        (UsageError, lambda: box.exec([])),
        (UsageError, lambda: client.fork(box.id, 0)),
        (UsageError, lambda: client.fork(box.id, 10000)),
        (UsageError, lambda: client.fork(box.id, variants=["a"])),  # type: ignore[arg-type]
        (UsageError, lambda: client.fork(box.id, variants={"a": "b"})),  # type: ignore[dict-item]
        (UsageError, lambda: box.files.read("/workspace")),
        (NotFound, lambda: box.files.read("nothing")),
        (InternalError, lambda: box.exec(["crash"])),
        (NotFound, lambda: client.build_image("nothing")),
        (NotFound, lambda: client.untag("nothing")),
    ]
    for expected, call in cases:
        with pytest.raises(expected):
            call()
    assert [snapshot.info.seq for snapshot in box.snapshots()] == [0], "no failure left anything behind"


def test_ambiguous_prefix(client: Snapshotd) -> None:
    """Seventeen ids of sixteen digits: two begin alike."""
    for _ in range(17):
        client.create()
    first = [item.id[0] for item in client.trajectories()]
    twice = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(Ambiguous):
        client.trajectory(twice)


@pytest.fixture
def agent(short_dir: Path) -> Path:
    path = short_dir / "agent.py"
    path.write_text("import sys\nprint('hi')\nsys.exit(3 if sys.argv[1:] else 0)\n")
    return path


def test_a_run_is_followed_to_its_end(client: Snapshotd, agent: Path) -> None:
    run = client.run(agent=agent, args=["x"])
    events = list(client.events(run.id))
    assert events[0]["event"] == "started"
    assert b"".join(base64.b64decode(one["data_b64"]) for one in events if one["event"] == "output") == b"hi\n"
    ended = client.trajectory(run.id)
    assert events[-1] == {
        "event": "finished",
        "trajectory": run.id,
        "exit_code": 3,
        "snapshot_count": len(client.log(run.id)),
        "status": ended.status,
    }


def test_a_run_and_a_forks_program_are_waited_for(client: Snapshotd, agent: Path) -> None:
    heard: list[bytes] = []
    done = Sandbox.run(agent, args=["x"], on_stdout=heard.append, client=client)
    assert (done.exit_code, done.stdout, done.status) == (3, "hi\n", "failed")
    assert b"".join(heard) == done.stdout_bytes
    assert done.snapshot_id == client.trajectory(done.trajectory).head
    with pytest.raises(ExecFailed, match=r"agent\.py x` ended with exit code 3"):
        Sandbox.run(agent, args=["x"], check=True, client=client)
    sandbox = Sandbox.run(command=["echo", "hi"], detach=True, client=client)
    assert sandbox.wait(check=True).stdout == "hi\n"
    assert client.wait(sandbox.id).status == "finished"
    with pytest.raises(UsageError, match="detached"):
        Sandbox.run(agent, detach=True, check=True, client=client)
    with pytest.raises(UsageError, match="no program ever ran"):
        Sandbox.create(client=client).wait()


def test_a_wait_has_an_end_and_the_run_goes_on(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    agent = short_dir / "forever.py"
    agent.write_text("import time\nprint('hi', flush=True)\ntime.sleep(1000)\n")
    heard: list[bytes] = []
    run = Sandbox.run(agent, detach=True, client=client)
    command = box.exec(["forever"], background=True)
    assert any(event["event"] == "output" for event in run.events())
    for waited, wait in ((run.id, run.wait), ("command", command.wait)):
        with pytest.raises(StillRunning, match=rf"{waited}.* has not ended within 0.2 s, and runs on") as raised:
            wait(timeout=0.2, on_stdout=heard.append)
        assert isinstance(raised.value, TimeoutError | Conflict)
    assert (run.info.status, command.info.status) == ("running", "running")
    assert b"".join(heard).startswith(b"hi\n"), "what it had printed came"
    run.stop()
    command.kill()
    assert (run.wait(timeout=60).status, command.wait(timeout=60).exit_code) == ("stopped", 137)


def test_a_path_of_a_snapshot_begins_in_the_workspace_in_every_method(box: Sandbox, short_dir: Path) -> None:
    box.files.write("src/x", "x")
    head = box.head()
    assert head.cat("a.txt") == head.cat("/workspace/a.txt")
    head.restore(short_dir / "one", path="src")
    assert (short_dir / "one" / "x").read_bytes() == b"x"
    for call in (lambda: head.cat("../x"), lambda: head.restore(short_dir / "two", path="../x")):
        with pytest.raises(UsageError, match=r"^'\.\./x' has"):
            call()


def test_images(client: Snapshotd, short_dir: Path) -> None:
    (short_dir / "root" / "workspace").mkdir(parents=True)
    image = client.import_image(str(short_dir / "root"), name="small")
    assert image.name == "small"
    assert "small" in [item.name for item in client.images()]
    client.remove_image("small")


def test_tags_move_and_go(client: Snapshotd, box: Sandbox) -> None:
    first = client.tag(box.id, "best")
    box.exec(["ls"])
    with pytest.raises(Conflict, match="move it"):
        client.tag(box.id, "best")
    assert client.tag(box.id, "best", move=True) != first
    client.untag("best")


# -- the daemon goes away ----------------------------------------------------------------------------------------------


def test_no_daemon_is_a_sentence_with_the_next_step(short_dir: Path) -> None:
    client = Snapshotd(short_dir, autostart=False)
    with pytest.raises(DaemonUnavailable, match="snapshotd daemon"):
        client.trajectories()


def test_a_daemon_that_does_not_answer_in_time(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_dir / "s.sock"))
        silent.listen()
        client = Snapshotd(socket=short_dir / "s.sock", autostart=False, request_timeout=0.2)
        for ask in (client.trajectories, lambda: client.stop("box"), lambda: client.compare("a", "b")):
            with pytest.raises(DaemonUnavailable, match=r"within 0\.2 s.*request_timeout"):
                ask()


def test_a_command_may_take_longer_than_a_request(shared_daemon: Daemon) -> None:
    client = Snapshotd(shared_daemon.state_dir, shared_daemon.socket_path, autostart=False, request_timeout=30)
    box = Sandbox.create(client=client)
    assert box.exec(["echo", "hi"]).exit_code == 0
    for timeout in (0, -1, float("nan"), float("inf"), "5", True):
        with pytest.raises(UsageError, match=r"^request_timeout="):
            Snapshotd(shared_daemon.state_dir, autostart=False, request_timeout=timeout)


def test_daemon_killed_in_the_middle_of_a_command(
    daemon: Daemon, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for, and the error is the first one."""
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "0.1")
    box = Sandbox.create(client=daemon.client)

    def kill(_: bytes) -> None:
        daemon.kill()

    with pytest.raises(DaemonUnavailable, match=r"went away.*safe.*snapshotd log"):
        box.exec(["await", str(short_dir / "never")], on_stdout=kill)


def test_broken_bytes_are_never_taken_for_the_whole(box: Sandbox) -> None:
    with pytest.raises(DaemonUnavailable):
        box.head().cat("broken")


def test_a_daemon_of_another_version(client: Snapshotd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.client.exchange.API_VERSION", "0.9")
    with pytest.raises(VersionMismatch, match=r"0\.9.*1\.4.*snapshotd daemon --stop"):
        client.trajectories()


def test_a_closed_socket_says_sudo(daemon: Daemon) -> None:
    if os.geteuid() == 0:
        daemon.socket_path.parent.chmod(0o755)
    else:
        daemon.socket_path.chmod(0)
    argv = [sys.executable, "-c", _AS_NOBODY, str(daemon.socket_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("NotPermitted"), done.stderr
    assert "sudo" in done.stdout


_AS_NOBODY = """
import os, sys
from pathlib import Path
from snapshotd.client.results import FileStatus
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import run
from snapshotd.errors import SnapshotdError
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    run(Transport(Path(sys.argv[1])).request('GET', '/version'))
except SnapshotdError as e:
    print(e.code, e.message)
"""


# -- starting the daemon -----------------------------------------------------------------------------------------------


@pytest.fixture
def startable(request: pytest.FixtureRequest, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory where the client starts fake daemons, as it would as root. With the parameter "spawned" it
    does so in its own way."""
    start_small_ones(monkeypatch, forked_ones=getattr(request, "param", "") != "spawned")
    state_dir = short_dir / "state"
    yield state_dir
    pid = lock_holder(state_dir) if state_dir.exists() else None
    if pid is not None:
        os.kill(pid, 9)
        while lock_holder(state_dir) is not None:
            os.sched_yield()


SPAWNED = pytest.mark.parametrize("startable", ["spawned"], indirect=True)


@SPAWNED
def test_the_first_request_starts_a_daemon(startable: Path) -> None:
    client = Snapshotd(startable)
    assert client.trajectories() == []
    pid = client.version().pid
    assert pid == lock_holder(startable)
    assert os.getsid(pid) == pid, "it is detached from our terminal"
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"


@SPAWNED
def test_a_client_with_many_descriptors_starts_a_daemon(startable: Path) -> None:
    """More than select(2) can wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert Snapshotd(startable).trajectories() == []


def test_many_first_requests_start_one_daemon(startable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    spawned: list[Path] = []
    spawn = autostart._spawn

    def counted(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> Any:
        spawned.append(state_dir)
        return spawn(state_dir, socket_path, ready_fd, isolation)

    monkeypatch.setattr(autostart, "_spawn", counted)
    failures: list[Exception] = []

    def ask() -> None:
        try:
            pids.append(Snapshotd(startable).version().pid)
        except DaemonUnavailable as exc:
            failures.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(pids) == 4
    assert set(pids) == {lock_holder(startable)}
    assert spawned == [startable], "the others waited for the first"


def test_what_the_daemon_died_of_is_what_the_user_reads(startable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_FAILURE", "no init for sandboxes: catatonit is not installed; run `snapshotd setup`")
    with pytest.raises(Unsupported, match="catatonit is not installed"):
        Snapshotd(startable).trajectories()


def test_a_daemon_that_dies_without_a_word(startable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_EXIT", "1")
    with pytest.raises(DaemonUnavailable, match=r"exit code 3.*daemon\.log"):
        Snapshotd(startable).trajectories()


def test_a_daemon_that_is_just_ending_is_waited_for(startable: Path) -> None:
    """It still holds the lock, and listens no more."""
    startable.mkdir(mode=0o700)
    lock = StateLock(startable)
    threading.Timer(1.0, lock.release).start()
    pid = Snapshotd(startable).version().pid
    assert pid == lock_holder(startable) != os.getpid()


def test_a_conflict_without_anybody_answering_is_told(startable: Path, daemon: Daemon) -> None:
    """The lock is held, but its holder listens elsewhere."""
    with pytest.raises(Conflict, match=f"pid {daemon.process.pid}"):
        autostart.start_daemon(daemon.state_dir, startable.parent / "elsewhere.sock", timeout_s=10)


def test_in_anothers_state_directory_nobody_starts_one(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    os.chown(short_dir, 4711, -1)
    with pytest.raises(
        DaemonUnavailable, match=r"belongs to user 4711 .mode 0700.; run the command as user 4711 or name a"
    ):
        Snapshotd(short_dir).trajectories()
    os.chown(short_dir, os.geteuid(), -1)
    with pytest.raises(DaemonUnavailable, match="the mode 0700 of its state directory keeps user 0 out, whose it is"):
        Snapshotd(short_dir).trajectories()


def test_a_file_is_no_state_directory(short_dir: Path) -> None:
    (short_dir / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory; choose another"):
        Snapshotd(short_dir / "file").trajectories()


def test_too_long_a_socket_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="107"):
        Transport(tmp_path / ("x" * 120))


def test_too_large_a_request_is_not_even_sent(box: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match="put large input into files"):
        box.exec(["x" * (9 << 20)])


def test_where_the_daemon_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", "/a")
    monkeypatch.setenv("SNAPSHOTD_SOCKET", "/b.sock")
    assert (str(Snapshotd().state_dir), str(Snapshotd().socket_path)) == ("/a", "/b.sock")
    assert str(Snapshotd("/c").socket_path) == "/c/snapshotd.sock", "a named state directory means its own daemon"
    monkeypatch.delenv("SNAPSHOTD_SOCKET")
    monkeypatch.delenv("SNAPSHOTD_STATE_DIR")
    assert str(Snapshotd().socket_path) == "/var/lib/snapshotd/snapshotd.sock"


def test_the_client_imports_nothing_heavy() -> None:
    heavy = ("fastapi", "pydantic", "uvicorn", "rich", "click", "docker", "asyncio", "subprocess")
    slow = ("http.client", "email", "ssl", "hashlib", "tarfile", "snapshotd.types", "snapshotd.client.aio.client")
    slow += ("dataclasses", "inspect", "signal", "snapshotd.config")
    rare = ("xml", "pyexpat", "snapshotd.junit", "snapshotd.scores")
    code = f"""
import sys, snapshotd.client.results as results
from snapshotd.client import ExecResult, Port, Sandbox, Snapshotd, Terminal
print([m for m in {heavy + slow + rare} if m in sys.modules])
print(len([m for m in sys.modules if m.partition(".")[0] == "snapshotd"]) <= 56)
print([c for c in vars(results).values() if isinstance(c, type) and isinstance(vars(c).get("__dataclass_fields__"), dict)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["[]", "True", "[]"], "and no record is made before it is used"
