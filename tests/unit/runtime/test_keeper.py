"""The keeper alone: real processes, daemons that are killed, the keeper that is killed, and its own end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotd.errors import SandboxFailed
from snapshotd.runtime.base import Process
from snapshotd.runtime.keeper import KeeperClient
from tests.capabilities import require
from tests.keeper_rig import DEADLINE_S, eventually, keepers, killed_daemon, pipes, read_end, run


@pytest.fixture
def place(short_dir: Path) -> Iterator[Path]:
    """Where a keeper's socket goes. None is left behind there at the end, nor the socket."""
    path = short_dir / "keeper" / "keeper.sock"
    yield path
    try:
        eventually(lambda: not keepers(path), "a keeper is left")
        assert not path.exists()
    finally:
        for pid in keepers(path):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def keeper(place: Path) -> Iterator[KeeperClient]:
    """A daemon's; what it still holds is dropped at the end."""
    client = KeeperClient(place)
    yield client
    for key in sorted(client.keys()):
        client.drop(key)
    client.close()


@contextlib.contextmanager
def taken(keeper: KeeperClient, key: str) -> Iterator[Process]:
    """A kept command; its pipes are closed at the end."""
    process = keeper.process(key)
    assert process is not None
    try:
        yield process
    finally:
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_it_is_needed(place: Path) -> None:
    keeper = KeeperClient(place)
    assert keeper.keys() == set()
    assert keeper.process("key") is None
    assert keeper.open_held("key") is None
    keeper.drop("key")
    keeper.close()
    assert not place.parent.exists()


def test_a_command_and_its_pipes(keeper: KeeperClient, place: Path) -> None:
    assert run(keeper, "one", "echo out; echo err >&2; exit 7") == 0
    process = keeper.process("one")
    assert process is not None
    assert process.wait(DEADLINE_S) == 7
    keeper.drop("one")
    assert (read_end(process.stdout_fd), read_end(process.stderr_fd)) == (b"out\n", b"err\n")
    (pid,) = keepers(place)
    assert os.getsid(pid) == pid  # a signal from the terminal does not reach it
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_ends_by_signals(keeper: KeeperClient) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGPIPE):  # Python ignores the last one; a command must not
        run(keeper, "key", f"kill -{int(number)} $$")
        with taken(keeper, "key") as process:
            assert process.wait(DEADLINE_S) == 128 + number
    run(keeper, "key", "exec sleep 1000")
    with taken(keeper, "key") as process:
        assert process.wait(0) is None
        process.kill()
        assert process.wait(DEADLINE_S) == 137
        process.kill()


def test_a_command_that_ends_before_its_helper(keeper: KeeperClient) -> None:
    """The keeper has reaped it when it learns whose command it was."""
    assert (
        run(keeper, "early", "echo said; exit 9", then="while kill -0 $(cat $1) 2> /dev/null; do sleep 0.01; done") == 0
    )
    process = keeper.process("early")
    assert process is not None
    assert process.wait() == 9
    keeper.drop("early")
    assert (read_end(process.stdout_fd), read_end(process.stderr_fd)) == (b"said\n", b"")


def test_helpers_that_fail(keeper: KeeperClient) -> None:
    """Nothing is kept, and what they left behind is reaped when it ends."""
    assert run(keeper, "key", "exit 0", then="exit 5") == 5
    assert run(keeper, "key", "exit 0", then="kill -9 $$") == 137
    with pytest.raises(SandboxFailed, match="not a child"):
        run(keeper, "key", "exit 0", then="echo 1 > $1")
    with pytest.raises(SandboxFailed, match="cannot be kept"):
        run(keeper, "key", "exit 0", then="echo nonsense > $1")
    with pipes() as (stdout, stderr), pytest.raises(SandboxFailed, match="No such file"):
        keeper.run("key", ["/no/such/program"], Path("/no/such/file"), (*stdout, *stderr), DEADLINE_S)
    assert keeper.keys() == set()


def test_a_helper_that_takes_too_long(keeper: KeeperClient, place: Path) -> None:
    """It is killed with what it has started; others go on meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(run, keeper, "late", "exit 0", then="sleep 1000; :", timeout_s=0.5)
        run(keeper, "other", "exit 3")
        with taken(keeper, "other") as process:
            assert process.wait(DEADLINE_S) == 3
        assert late.result(DEADLINE_S) is None
    (pid,) = keepers(place)
    eventually(
        lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text() == "",
        "what a killed helper had started is still there",
    )
    assert keeper.keys() == {"other"}


def test_a_command_that_is_dropped_goes_on(keeper: KeeperClient) -> None:
    run(keeper, "key", "exec sleep 1000")
    with taken(keeper, "key") as process:
        keeper.drop("key")
        assert keeper.process("key") is None
        assert process.wait(0) is None
        process.kill()
        assert process.wait(DEADLINE_S) == 137


def test_one_running_command_under_a_key(keeper: KeeperClient) -> None:
    run(keeper, "key", "exec sleep 1000")
    with taken(keeper, "key") as first:
        with pytest.raises(SandboxFailed, match="runs under the key"):
            run(keeper, "key", "exit 0")
        with pytest.raises(SandboxFailed, match="a command is kept"):
            keeper.hold("key", first.stdout_fd)
        first.kill()
        assert first.wait(DEADLINE_S) == 137
        run(keeper, "key", "exit 4")
        with taken(keeper, "key") as second:
            assert second.wait(DEADLINE_S) == 4


def test_many_threads(keeper: KeeperClient) -> None:
    def one(number: int) -> int | None:
        run(keeper, f"key-{number}", f"echo {number}; exit {number}")
        process = keeper.process(f"key-{number}")
        assert process is not None
        code = process.wait(DEADLINE_S)
        keeper.drop(f"key-{number}")
        assert (read_end(process.stdout_fd), read_end(process.stderr_fd)) == (b"%d\n" % number, b"")
        return code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == list(range(40))


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_descriptors_are_held(keeper: KeeperClient) -> None:
    first_r, first_w = os.pipe()
    second_r, second_w = os.pipe()
    keeper.hold("end", first_w)
    keeper.hold("end", second_w)  # in its place
    for fd in (first_w, second_w):
        os.close(fd)
    assert read_end(first_r) == b""
    held = keeper.open_held("end")
    assert held is not None
    assert not os.get_inheritable(held)
    os.write(held, b"through it")
    os.close(held)
    assert keeper.process("end") is None
    keeper.drop("end")
    assert keeper.open_held("end") is None
    assert read_end(second_r) == b"through it"


def test_it_has_only_what_it_was_given(keeper: KeeperClient, place: Path) -> None:
    """Neither what the daemon has open, inheritable or not, nor anything of what was dropped."""
    read_fd, write_fd = os.pipe()
    os.set_inheritable(write_fd, True)
    run(keeper, "key", "exec sleep 1000")
    os.close(write_fd)
    assert read_end(read_fd) == b""
    (pid,) = keepers(place)
    with taken(keeper, "key") as process:
        process.kill()
        assert process.wait(DEADLINE_S) == 137
    keeper.drop("key")
    before = len(
        os.listdir(f"/proc/{pid}/fd")
    )  # one more if it has not seen yet that the last question's connection is closed
    for number in range(20):
        run(keeper, f"key-{number}", "exit 0", then=f"exit {number % 2}")
    for key in sorted(keeper.keys()):
        keeper.drop(key)
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, "descriptors stay open")


def test_more_keys_than_fit_into_an_answer(keeper: KeeperClient) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    keys = {f"{number:03}".rjust(128, "k") for number in range(600)}
    for key in keys:
        keeper.hold(key, fd)
    assert keeper.keys() == keys
    for key in ("", "k" * 129):
        with pytest.raises(SandboxFailed, match="1 to 128 characters"):
            keeper.hold(key, fd)
    os.close(fd)


def test_nonsense_is_refused_and_harms_nobody(keeper: KeeperClient, place: Path) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    keeper.hold("key", fd)
    for data in (
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"do":"no"}',
        b'{"do":"run","key":"x"}',
        b'{"do":"held"}',
        b"[" * 50_000,
        b"\xff",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(place))
            socket.send_fds(stranger, [data], [fd] * 6)
            assert "error" in json.loads(stranger.recv(1 << 16)), data
    held = keeper.open_held("key")
    assert held is not None
    for each in (held, fd):
        os.close(each)


# -- life --------------------------------------------------------------------------------------------------------------


def test_what_a_killed_daemon_leaves(place: Path) -> None:
    """Output and exit code of a command that ran on, exit code of one that ended while nobody was there, and a
    listening socket."""
    pids = killed_daemon(
        place,
        """
        keeper_rig.run(keeper, "on", "echo before; while ! test -e $HOME/go; do sleep 0.02; done; echo after; exit 5")
        keeper_rig.run(keeper, "ended", "while test -e /proc/%d/cwd; do sleep 0.02; done; exit 6" % os.getpid())
        listener = socket.create_server(("127.0.0.1", 0))
        keeper.hold("listener", listener.fileno())
        print(listener.getsockname()[1])
        for key in ("on", "ended"):
            print(keeper.process(key).pid)
    """.replace("$HOME", str(place.parent.parent)),
    )
    (pid,) = keepers(place)
    eventually(lambda: not os.path.exists(f"/proc/{pids[2]}"), "a command was not reaped while no daemon was there")
    (place.parent.parent / "go").touch()
    keeper = KeeperClient(place)
    assert keeper.keys() == {"on", "ended", "listener"}
    for key, code, said in (("on", 5, b"before\nafter\n"), ("ended", 6, b"")):
        process = keeper.process(key)
        assert process is not None
        assert process.wait(DEADLINE_S) == code
        keeper.drop(key)
        assert (read_end(process.stdout_fd), read_end(process.stderr_fd)) == (said, b"")
    fd = keeper.open_held("listener")
    assert fd is not None
    with socket.socket(fileno=fd) as listener, socket.create_connection(("127.0.0.1", int(pids[0]))):
        listener.accept()[0].close()
    assert keepers(place) == [pid]
    keeper.drop("listener")
    keeper.close()


def test_it_ends_with_a_daemon_that_left_nothing(place: Path) -> None:
    """At once when that was killed; `close` returns when it has ended. The next `hold` starts another."""
    killed_daemon(place, "keeper.hold('key', 0); keeper.drop('key')")
    eventually(lambda: not keepers(place) and not place.exists(), "a keeper that nobody needs stays")
    client = KeeperClient(place)
    for _ in range(3):
        client.hold("key", 0)
        (pid,) = keepers(place)
        client.drop("key")
        assert keepers(place) == [pid]  # as long as the daemon is connected
        client.close()
        assert not place.exists()
        assert not os.path.exists(f"/proc/{pid}")


def test_closing_leaves_it_alone_with_what_it_holds(place: Path) -> None:
    first, second = KeeperClient(place), KeeperClient(place)
    first.hold("key", 0)
    (pid,) = keepers(place)
    first.close()
    assert second.keys() == {"key"}
    assert keepers(place) == [pid]
    second.drop("key")
    second.close()


def test_it_does_not_hold_a_daemons_mounts(place: Path) -> None:
    """They are to vanish with the daemon, whatever kills that."""
    require("root")
    (own,) = killed_daemon(
        place,
        """
        from snapshotd.daemon import host
        host.enter_own_mount_namespace()
        keeper = KeeperClient(path, host.host_mounts())
        keeper.hold("key", 0)
        print(os.readlink("/proc/self/ns/mnt"))
    """,
    )
    (pid,) = keepers(place)
    assert os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt") != own
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    keeper = KeeperClient(place)
    keeper.drop("key")
    keeper.close()


def test_its_end_and_a_new_beginning_at_the_same_time(place: Path) -> None:
    """Daemons that come and go as fast as they can, so that connections meet every moment of the end of a keeper."""

    def one(number: int) -> None:
        for _ in range(5):
            client = KeeperClient(place)
            client.hold(f"key-{number}", 0)
            held = client.open_held(f"key-{number}")
            assert held is not None
            os.close(held)
            client.drop(f"key-{number}")
            client.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))


def test_a_stale_socket_is_replaced(keeper: KeeperClient, place: Path) -> None:
    place.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(place))
    assert keeper.keys() == set()
    keeper.hold("key", 0)
    assert keeper.keys() == {"key"}


def test_an_open_directory_is_refused(place: Path) -> None:
    place.parent.mkdir(mode=0o755)
    with pytest.raises(SandboxFailed, match="open to others"):
        KeeperClient(place).hold("key", 0)


@pytest.mark.parametrize("adopts", [False, True])
def test_a_keeper_that_is_killed(place: Path, adopts: bool) -> None:
    """What it held is gone, and everything else goes on. The kernel tells the exit code, an older one only if the
    daemon itself inherits the command."""
    lines = killed_daemon(
        place,
        f"""
        from snapshotd.runtime._process import become_subreaper
        {"become_subreaper()" if adopts else ""}
        os.mkfifo("{place.parent.parent}/fifo")
        keeper_rig.run(keeper, "key", "read x < {place.parent.parent}/fifo; exit 8")
        process = keeper.process("key")
        (pid,) = keeper_rig.keepers(path)
        os.kill(pid, signal.SIGKILL)
        keeper_rig.eventually(lambda: not keeper_rig.keepers(path), "the keeper lives")
        print(keeper.keys(), keeper.process("key"), keeper.open_held("key"), os.path.exists("/proc/%d" % pid))
        open("{place.parent.parent}/fifo", "w").close()
        try:
            print(process.wait(keeper_rig.DEADLINE_S))
        except SandboxFailed as exc:
            print(exc.message)
        keeper.hold("again", 0)
        print(keeper.keys())
        keeper.drop("again")
    """,
    )
    assert lines[0] == "set() None None False"
    told = adopts or tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 15)
    assert lines[1] == "8" or (not told and "exit code is lost" in lines[1])
    assert lines[2] == "{'again'}"
