"""Starting a daemon on first use: detached from the terminal, logging into its state directory, waited for until it
answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from snapshotd.api.wire import log_path_of
from snapshotd.client.links import check_listener
from snapshotd.daemon.lock import lock_holder, lock_socket, make_state_dir
from snapshotd.errors import Conflict, DaemonUnavailable, error_of

START_TIMEOUT_S = 60.0
"""Recovery after a crash looks at every sandbox that was running; an empty state directory takes about half a
second."""
_POLL_S = 0.02
"""Interval of polling: no event tells that a socket begins to listen, or that a lock is free within a time."""


def start_daemon(
    state_dir: Path, socket_path: Path, timeout_s: float = START_TIMEOUT_S, *, isolation: str | None = None
) -> None:
    """Start a daemon and return when it answers, or when another one that was just starting does.

    If many clients ask at once (all that followed a run at a daemon that died), one starts it and the others wait.
    DaemonUnavailable when the state directory is another user's or when it takes longer than `timeout_s`; otherwise the
    error that the daemon died of. An ordinary user's is that user's own. `isolation`: "none" has it run sandboxes without
    isolation where nothing isolates them.
    """
    if state_dir.is_dir() and not os.access(state_dir, os.R_OK | os.W_OK | os.X_OK):
        raise DaemonUnavailable(f"no daemon answers on {socket_path}, and {_why_closed(state_dir.stat())}")
    deadline = time.monotonic() + timeout_s
    with _one_at_a_time(state_dir, deadline):
        while not answers(socket_path):
            try:
                _spawn_and_wait(state_dir, socket_path, deadline, isolation)
                return
            except Conflict:
                # Another process holds the state directory: a daemon that is just ending, or one that was not started
                # by a command.
                _check_socket(state_dir, socket_path)
                if _answers_or_ends(state_dir, socket_path, deadline):
                    return
                if time.monotonic() > deadline:
                    raise


def _why_closed(state_dir: os.stat_result) -> str:
    """The reason why this user cannot start the daemon of a state directory, and the next step."""
    mode, user = stat.S_IMODE(state_dir.st_mode), os.geteuid()
    if state_dir.st_uid == user:
        return f"the mode {mode:04o} of its state directory keeps user {user} out, whose it is; give it the mode 0700"
    owner = "root" if state_dir.st_uid == 0 else f"user {state_dir.st_uid}"
    return (
        f"user {user} cannot start one, since its state directory belongs to {owner} (mode {mode:04o}); run the command as {owner}"
        f"{' (with sudo), start the service,' if owner == 'root' else ''} or name a directory of your own with --state-dir"
    )


@contextlib.contextmanager
def _one_at_a_time(state_dir: Path, deadline: float) -> Iterator[None]:
    """A client that starts a daemon holds a lock on the directory itself: the lock ends with the process and leaves
    nothing behind."""
    make_state_dir(state_dir)
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _too_slow("another command has been starting the daemon", state_dir) from None
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _spawn_and_wait(state_dir: Path, socket_path: Path, deadline: float, isolation: str | None) -> None:
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    try:
        process = _spawn(state_dir, socket_path, ready_w, isolation)
        os.close(ready_w)
        ready_w = -1
        line = _read_line(ready_r, deadline)
    finally:
        os.close(ready_r)
        if ready_w >= 0:
            os.close(ready_w)
    if line is None:
        raise _too_slow(f"the daemon (pid {process.pid}) has been starting", state_dir)
    try:
        news = json.loads(line)
    except ValueError:
        news = {}
    if "ready" in news:
        process.returncode = 0  # it lives on without us: no ResourceWarning, no wait
        return
    if "error" in news:
        raise error_of(news)
    code = process.wait()
    raise DaemonUnavailable(f"the daemon died while starting (exit code {code}); {log_path_of(state_dir)} says why")


def _too_slow(what: str, state_dir: Path) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"{what} for more than {START_TIMEOUT_S:.0f} s; {log_path_of(state_dir)} says what it does, run the command again when it is ready"
    )


def daemon_argv(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None = None) -> list[str]:
    """The daemon's command line: this very installation, without looking for modules in the working directory."""
    return [
        sys.executable,
        "-P",
        "-m",
        "snapshotd",
        "daemon",
        "--state-dir",
        str(state_dir),
        "--socket",
        str(socket_path),
        "--ready-fd",
        str(ready_fd),
        *(["--isolation", isolation] if isolation else []),
    ]


def _spawn(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> subprocess.Popen[bytes]:
    argv = daemon_argv(state_dir, socket_path, ready_fd, isolation)
    with _open_log(state_dir) as log:
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                close_fds=True,
                pass_fds=(ready_fd,),
                start_new_session=True,
                cwd="/",
            )
        except OSError as exc:
            raise DaemonUnavailable(
                f"the daemon cannot be started: user {os.geteuid()} cannot run {sys.executable} ({exc.strerror}); install snapshotd where "
                "that user can run it"
            ) from exc


def _open_log(state_dir: Path) -> BinaryIO:
    """The daemon's log. Python's output before the daemon's own log is set up, or at a crash, goes into the same
    file."""
    fd = os.open(log_path_of(state_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return os.fdopen(fd, "ab")


def _read_line(fd: int, deadline: float) -> bytes | None:
    """The daemon's line, b"" if it died without a word, None if it is silent until the deadline."""
    data, poll = b"", select.poll()  # select(2) knows no descriptor above 1023, and a client may have more
    poll.register(fd, select.POLLIN)
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    return data


def _answers_or_ends(state_dir: Path, socket_path: Path, deadline: float) -> bool:
    """Wait for the daemon that holds the state directory. True when it answers; False when it has ended, or at the
    deadline."""
    while not answers(socket_path):
        if lock_holder(state_dir) is None or time.monotonic() > deadline:
            return False
        _check_socket(state_dir, socket_path)
        time.sleep(_POLL_S)
    return True


def _check_socket(state_dir: Path, socket_path: Path) -> None:
    """Conflict when the daemon of the state directory serves at another socket: it will never answer at this one."""
    holder, other = lock_holder(state_dir), lock_socket(state_dir)
    if holder is not None and other is not None and other != socket_path.absolute():
        raise Conflict(
            f"the daemon (pid {holder}) of the state directory {state_dir} serves at {other}, not at {socket_path}: use "
            f"that socket, or stop it first with `snapshotd daemon --stop --state-dir {state_dir}`"
        )


def answers(socket_path: Path) -> bool:
    """True if a process accepts connections on a socket. NotPermitted: another user's does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(socket_path))
            check_listener(probe, str(socket_path))
        except OSError:
            return False
    return True
