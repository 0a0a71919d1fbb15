"""The daemon's life: its lock, its socket, who may connect, how it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.wire import check_ref, check_socket_path
from snapshotd.client.twofold import run
from snapshotd.daemon.host import Footing, choose_mode
from snapshotd.daemon.http.peer import in_sandbox, in_sandbox_of, refusal
from snapshotd.daemon.lock import StateLock, lock_holder, make_state_dir
from snapshotd.daemon.server import bind
from snapshotd.errors import Conflict, NotFound, NotPermitted, Unsupported, UsageError
from snapshotd.kernel.abilities import Abilities, Mode
from snapshotd.kernel.mounts import LayerNaming
from tests.unit.daemon.process import Daemon, start


def test_everything_is_private(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.state_dir.stat().st_mode) == 0o700


def test_a_second_daemon_is_told_of_the_first(daemon: Daemon, short_dir: Path) -> None:
    with pytest.raises(
        AssertionError, match=rf"Conflict: another daemon \(pid {daemon.process.pid}\) .*{daemon.state_dir}"
    ):
        start(daemon.state_dir, short_dir / "other.sock")
    assert daemon.client.version().pid == daemon.process.pid
    assert not (short_dir / "other.sock").exists()


def test_another_state_directory_cannot_take_a_live_socket(daemon: Daemon, short_dir: Path) -> None:
    with pytest.raises(AssertionError, match="Conflict: another program already listens"):
        start(short_dir / "other", daemon.socket_path)
    assert daemon.client.version().pid == daemon.process.pid


def test_after_kill_nine_the_next_one_takes_over(daemon: Daemon) -> None:
    daemon.kill()
    assert daemon.socket_path.exists()
    assert lock_holder(daemon.state_dir) is None
    heir = start(daemon.state_dir, daemon.socket_path)
    assert heir.client.version().pid == heir.process.pid == lock_holder(daemon.state_dir)
    heir.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(daemon: Daemon, number: signal.Signals) -> None:
    daemon.process.send_signal(number)
    assert daemon.process.wait(60) == 0
    assert not daemon.socket_path.exists()
    assert lock_holder(daemon.state_dir) is None
    assert '"message": "stopped"' in (daemon.state_dir / "daemon.log").read_text()


def test_shutdown_over_the_api(daemon: Daemon) -> None:
    run(daemon.client._transport.request("POST", "/shutdown"))
    assert daemon.process.wait(60) == 0


def test_systemd_is_told_once_it_is_ready(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.settimeout(60)
        running = start(short_dir / "state", short_dir / "s.sock", NOTIFY_SOCKET=str(short_dir / "notify"))
        assert manager.recv(100) == b"READY=1"
    assert running.client.version().pid == running.process.pid
    running.close()


def test_a_refused_peer_gets_one_sentence_and_no_answer(short_dir: Path) -> None:
    running = start(short_dir / "state", short_dir / "s.sock", SMALL_SANDBOXED="1")
    for _ in range(20):
        with pytest.raises(NotPermitted, match=rf"process {os.getpid()} runs inside a sandbox"):
            running.client.trajectories()
    assert running.terminate() == 0
    running.close()


def test_who_may_connect() -> None:
    def inside(pid: int) -> bool:
        return pid == 66

    assert refusal(5, 0, inside, 0) is None
    assert refusal(5, 1000, inside, 1000) is None
    assert "user 1000 may not use this daemon, which serves root only" in str(refusal(5, 1000, inside, 0))
    assert "which serves root and user 1001 only; run the command as one" in str(refusal(5, 1000, inside, 1001))
    assert "user 1700000000" in str(refusal(66, 1_700_000_000, inside, 0)), "root of a user namespace"
    assert "process 66" in str(refusal(66, 0, inside, 0)), "root of a sandbox without one"
    assert refusal(0, 0, lambda pid: pytest.fail("nobody can look at process 0"), 0) is None


def test_a_process_that_is_gone_counts_as_sandboxed() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert in_sandbox(child.pid)
    assert not in_sandbox(os.getpid())


def test_a_peer_in_another_pid_namespace_is_compared_with_the_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's own process stands for a sandbox's init: whoever shares its cgroup is inside."""
    boxes = [SimpleNamespace(pid=os.getpid(), container="c")]
    engine: Any = SimpleNamespace(runs=SimpleNamespace(sandboxes=lambda: boxes))
    assert not in_sandbox_of(engine)(os.getpid()), "it lives in the daemon's own pid namespace"
    monkeypatch.setattr(os, "readlink", lambda path: path)  # now /proc/self/ns/pid and /proc/PID/ns/pid differ
    predicate = in_sandbox_of(engine)
    assert predicate(os.getpid())
    boxes.clear()
    assert not predicate(os.getpid()), "a container, but none of ours"


_KEYRINGS = """
from snapshotd.daemon.server import leave_session_keyring
from snapshotd.kernel.syscalls import call

def session():
    return call("keyctl", 0, -3, 0)  # KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING

clients = call("keyctl", 1, "snapshotd-test")
assert session() == clients
leave_session_keyring()
print(session() != clients)
"""


def test_sandboxes_do_not_get_the_keyring_of_who_started_the_daemon() -> None:
    assert (
        subprocess.run([sys.executable, "-c", _KEYRINGS], capture_output=True, text=True, check=True).stdout == "True\n"
    )


_NO_CORE = """
import resource
from snapshotd.daemon import server

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
server._set_limits()
print(resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_a_limit_that_cannot_be_raised_keeps_no_daemon_from_starting() -> None:
    said = subprocess.run([sys.executable, "-c", _NO_CORE], capture_output=True, text=True, check=True).stdout
    assert said in ("(0, 0)\n", "(1, 1)\n")


def test_lock_is_free_when_its_holder_is_gone(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    lock = StateLock(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    with pytest.raises(Conflict, match=rf"pid {os.getpid()}"):
        StateLock(tmp_path)
    lock.release()
    assert lock_holder(tmp_path) is None
    StateLock(tmp_path).release()


def test_a_link_for_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        StateLock(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_state_directory_must_be_ours_alone(tmp_path: Path) -> None:
    make_state_dir(tmp_path / "new" / "state")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(
        NotPermitted, match=rf"mode 0777\) can be written by others; `chmod 0700 {open_to_all}`, or choose"
    ):
        make_state_dir(open_to_all)
    open_to_all.chmod(0o700)
    os.chown(open_to_all, 4711, -1)
    with pytest.raises(NotPermitted, match=r"belongs to user 4711, who could write into it; `chown` it to user 0, or"):
        make_state_dir(open_to_all)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"is not a directory; choose another with --state-dir"):
        make_state_dir(tmp_path / "file")
    with pytest.raises(
        UsageError, match=r"cannot be made by user 0: a directory above it is none; choose another with"
    ):
        make_state_dir(tmp_path / "file" / "below")


def test_bind_replaces_only_a_dead_socket(short_dir: Path) -> None:
    path = short_dir / "s.sock"
    path.write_text("not a socket")
    with pytest.raises(Conflict, match="not a socket"):
        bind(path)
    assert path.read_text() == "not a socket"
    path.unlink()
    umask = os.umask(0)
    try:
        first = bind(path)
        assert os.umask(0) == 0, "the process's umask is put back"
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(Conflict, match="already listens"):
        bind(path)
    first.close()
    bind(path).close()


def test_too_long_a_socket_path_is_named(tmp_path: Path) -> None:
    check_socket_path(Path("/" + "a" * 106))
    with pytest.raises(UsageError, match="108 bytes, but the kernel allows 107"):
        check_socket_path(Path("/" + "a" * 107))


def test_the_mode_is_the_wanted_one_or_the_best_that_isolates() -> None:
    whole = Abilities(True, True, LayerNaming.DESCRIPTOR, True, True, True, True, True, 2, "/sys/fs/cgroup")
    unmapped = dataclasses.replace(whole, mapped_layers=False, reasons={"mapped_layers": "Invalid argument"})
    assert choose_mode(whole, Footing()) == (Mode.PIVOT, "")
    assert choose_mode(whole, Footing(folder_will_do=True)) == (Mode.PIVOT, "")
    assert choose_mode(whole, Footing(wanted=Mode.PIVOT_ROOT)) == (Mode.PIVOT_ROOT, "")
    assert choose_mode(unmapped, Footing(wanted=Mode.PIVOT_ROOT)) == (Mode.PIVOT_ROOT, "")
    assert choose_mode(whole, Footing(wanted=Mode.FOLDER)) == (Mode.FOLDER, "")
    with pytest.raises(Unsupported, match=r"mode pivot: mapped_layers: Invalid argument.*SNAPSHOTD_MODE=pivot-root"):
        choose_mode(unmapped, Footing())
    with pytest.raises(Unsupported, match="mode pivot-root"):
        choose_mode(dataclasses.replace(unmapped, seals=False), Footing(wanted=Mode.PIVOT_ROOT))


def test_the_mode_of_an_ordinary_user_needs_neither_seal_nor_cgroup() -> None:
    inside = Abilities(True, True, LayerNaming.DESCRIPTOR, False, False, True, False, True, 0, "", ids=1)
    assert choose_mode(inside, Footing()) == (Mode.ROOTLESS, "")
    assert choose_mode(inside, Footing(wanted=Mode.ROOTLESS)) == (Mode.ROOTLESS, "")
    with pytest.raises(Unsupported, match="mode pivot is for root's daemon"):
        choose_mode(inside, Footing(wanted=Mode.PIVOT))
    closed = dataclasses.replace(inside, mounts=False, reasons={"mounts": "refused", "seals": "none"})
    with pytest.raises(Unsupported, match="mode rootless: mounts: refused"):
        choose_mode(closed, Footing())


def test_roots_daemon_is_never_rootless() -> None:
    whole = Abilities(True, True, LayerNaming.DESCRIPTOR, True, True, True, True, True, 2, "/sys/fs/cgroup")
    with pytest.raises(Unsupported, match="mode rootless is for an ordinary user's daemon"):
        choose_mode(whole, Footing(wanted=Mode.ROOTLESS))


def test_a_host_that_isolates_nothing_offers_folders_where_they_will_do() -> None:
    nothing = Abilities(
        False, False, LayerNaming.OPTIONS, False, False, False, False, True, 0, "", reasons={"mounts": "EPERM"}
    )
    with pytest.raises(Unsupported, match=r"mode pivot: mounts: EPERM.*--isolation none"):
        choose_mode(nothing, Footing())
    mode, reason = choose_mode(nothing, Footing(folder_will_do=True))
    assert mode is Mode.FOLDER
    assert "mode pivot: mounts: EPERM" in reason
    assert "--isolation none" in reason
    unmapped = dataclasses.replace(nothing, mounts=True, overlays=True, redirects=True, seals=True, cgroup_version=2)
    assert "SNAPSHOTD_MODE=pivot-root" in choose_mode(unmapped, Footing(folder_will_do=True))[1]


def test_the_reason_why_nothing_isolates_is_kept_or_raised() -> None:
    with pytest.raises(Unsupported, match=r"no mounts.*--isolation none"):
        Footing().without_isolation("no mounts")
    kept = Footing(folder_will_do=True).without_isolation("no mounts")
    assert kept.in_folder
    assert choose_mode(Abilities(True, True, LayerNaming.DESCRIPTOR, True, True, True, True, True, 2, "/x"), kept) == (
        Mode.FOLDER,
        kept.refusal,
    )
    wanted = Footing(wanted=Mode.FOLDER)
    assert wanted.without_isolation("no mounts") == wanted, "the settings ask for it"


@pytest.mark.parametrize("ref", ["", "a/b", "-x", "a b", "é", "a" * 200, "x\n"])
def test_impossible_refs_are_not_found(ref: str) -> None:
    with pytest.raises(NotFound):
        check_ref(ref)
